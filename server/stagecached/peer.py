"""The raw Unix socket beside gRPC, which cannot see who is at the other end: it issues session ids and tokens.

One JSON line in, one out, then the connection is closed:

    {"abi": 1, "role": "worker", "pid": 4711}
    {"session_id": "...", "token": "...", "boot_id": ..., "worker_lock": "..."}
    {"error": "...", "reason": "ABI_MISMATCH", "remedy": "...", "facts": {...}}

A scheduler that names its ``engine`` gets a lock too: it may hold leases on shared blocks, which end with its life.
``session_id`` and ``token`` of an earlier answer may be part of the question: a worker so makes a restarted daemon
watch its life by pidfd again. The kernel says the peer's uid (SO_PEERCRED), its groups (SO_PEERGROUPS) and gives a
pidfd of it (SO_PEERPIDFD, Linux 6.5); the pid in the line is for people.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket as sockets
import struct
from pathlib import Path
from typing import Any, Final, Protocol

import structlog

from stagecache_wire.layout import ABI
from stagecache_wire.v1 import stagecache_pb2 as pb
from stagecached import auth
from stagecached.access import Access
from stagecached.refusal import Refusal, internal

SO_PEERGROUPS: Final = 59
SO_PEERPIDFD: Final = 77
MAX_LINE_BYTES: Final = 4096
MAX_CONNECTIONS: Final = 64
ANSWER_TIMEOUT_S: Final = 5.0
_MAX_GROUPS: Final = 256
"""As many as Python's getsockopt reads; of a peer with more, only the primary group counts."""

log = structlog.get_logger()


class ClientRegistry(Protocol):
    """What the socket needs of the daemon's sessions, and of schedulers that may hold leases."""

    def issue(self, session_id: str, pidfd: int | None) -> Path:
        """Expect a client under this new id; its lock file is made. The pidfd is the registry's from here on."""
        ...

    def associate(self, session_id: str, pidfd: int | None) -> Path:
        """Watch the life of a known client by this pidfd, which is the registry's from here on.

        Raises:
            Refusal: UNKNOWN_SESSION; the pidfd is closed.
        """
        ...


def peer_uid_and_groups(connection: Any) -> tuple[int, frozenset[int]]:
    """uid and all groups of the process that connected, as the kernel noted them then."""
    _, uid, gid = struct.unpack("3i", connection.getsockopt(sockets.SOL_SOCKET, sockets.SO_PEERCRED, 12))
    groups = {gid}
    with contextlib.suppress(OSError):
        raw = connection.getsockopt(sockets.SOL_SOCKET, SO_PEERGROUPS, 4 * _MAX_GROUPS)
        groups.update(struct.unpack(f"{len(raw) // 4}I", raw))
    return uid, frozenset(groups)


def peer_pidfd(connection: Any) -> int | None:
    """A pidfd of the process that connected; None where the kernel has none to give."""
    try:
        pidfd = connection.getsockopt(sockets.SOL_SOCKET, SO_PEERPIDFD)
    except OSError:
        return None
    assert isinstance(pidfd, int)
    return pidfd


class PeerServer:
    """Answers on the peer socket; runs on the event loop."""

    def __init__(
        self,
        path: Path,
        access: Access,
        tokens: auth.Tokens,
        workers: ClientRegistry,
        boot_id: int,
        schedulers: ClientRegistry | None = None,
    ) -> None:
        """schedulers: of those that may hold leases; None where nobody may."""
        self._path = path
        self._access = access
        self._tokens = tokens
        self._workers = workers
        self._schedulers = schedulers
        self._boot_id = boot_id
        self._server: asyncio.AbstractServer | None = None
        self._connections = 0

    async def start(self) -> None:
        """Bind. The caller holds the run directory's lock, so a socket file that is there is a dead daemon's."""
        self._path.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(
            self._serve, os.fspath(self._path), limit=MAX_LINE_BYTES, backlog=MAX_CONNECTIONS
        )
        self._access.open_file(self._path)

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
            self._path.unlink(missing_ok=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections += 1
        try:
            await asyncio.wait_for(self._exchange(reader, writer), ANSWER_TIMEOUT_S)
        except (OSError, asyncio.TimeoutError):
            log.debug("peer left or was too slow")
        finally:
            self._connections -= 1
            writer.close()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = writer.get_extra_info("socket")
        try:
            question = await self._question(reader)
            self._admit(connection)
            answer = self._answer(question, connection)
        except Refusal as refusal:
            answer = _refused(refusal)
        except (OSError, asyncio.CancelledError):
            raise
        except Exception:
            log.exception("handshake failed")
            answer = _refused(internal())
        writer.write(json.dumps(answer).encode() + b"\n")
        await writer.drain()

    def _admit(self, connection: Any) -> None:
        if self._connections > MAX_CONNECTIONS:
            raise Refusal(pb.REASON_TOO_MANY, f"more than {MAX_CONNECTIONS} handshakes at once.", "Try again.")
        uid, groups = peer_uid_and_groups(connection)
        if not self._access.admits(uid, groups):
            raise Refusal(
                pb.REASON_UNAUTHENTICATED,
                f"the daemon serves uid {os.geteuid()}, the caller is uid {uid}.",
                "Run both as one user, or start the daemon with --group and put the caller's user into that group.",
                {"daemon_uid": os.geteuid(), "caller_uid": uid},
            )

    async def _question(self, reader: asyncio.StreamReader) -> dict[str, Any]:
        try:
            line = await reader.readuntil(b"\n")
            question = json.loads(line)
        except (asyncio.LimitOverrunError, asyncio.IncompleteReadError, ValueError, RecursionError):
            question = None
        if not isinstance(question, dict):
            raise Refusal(
                pb.REASON_UNSPECIFIED,
                f"the handshake is one line of JSON, an object, of at most {MAX_LINE_BYTES} bytes.",
            )
        return question

    def _answer(self, question: dict[str, Any], connection: Any) -> dict[str, object]:
        abi, role, pid = _number(question.get("abi")), question.get("role"), _number(question.get("pid"))
        if abi != ABI:
            raise abi_mismatch(abi)
        if not isinstance(role, str) or role not in auth.ROLES:
            raise Refusal(
                pb.REASON_UNAUTHENTICATED, f"the handshake names no role out of {', '.join(sorted(auth.ROLES))}."
            )
        session_id, token = question.get("session_id") or "", question.get("token") or ""
        if not (isinstance(session_id, str) and isinstance(token, str) and token.isascii()):
            raise Refusal(pb.REASON_UNAUTHENTICATED, "session_id and token of the handshake are no plain texts.")
        known = bool(session_id)
        if known and not self._tokens.is_good(role, session_id, token):
            raise Refusal(pb.REASON_UNAUTHENTICATED, "the token does not belong to that session and role.")
        session_id = session_id or auth.new_session_id()
        lock: Path | None = None
        leases = role == "scheduler" and question.get("engine")
        registry = self._workers if role == "worker" else self._schedulers if leases else None
        if registry is not None:
            register = registry.associate if known else registry.issue
            lock = register(session_id, peer_pidfd(connection))
        log.info("handshake", session=session_id, role=role, pid=pid, known=known)
        return {
            "session_id": session_id,
            "token": self._tokens.issue(role, session_id),
            "boot_id": self._boot_id,
            "worker_lock": None if lock is None else os.fspath(lock),
        }


def _number(value: object) -> int | None:
    """A whole number that a word holds; None for anything else: it goes into texts and logs, whoever sent it."""
    return value if type(value) is int and 0 <= value < 1 << 64 else None


def abi_mismatch(found: object) -> Refusal:
    """Refusal of a peer that has another shared-memory layout; both numbers are named."""
    return Refusal(
        pb.REASON_ABI_MISMATCH,
        f"the caller has shared-memory ABI {found!r}, the daemon {ABI}.",
        "Install the same release of stagecache on both sides.",
        {"daemon_abi": ABI, "caller_abi": found},
    )


def _refused(refusal: Refusal) -> dict[str, object]:
    return {
        "error": refusal.message,
        "reason": refusal.reason_name,
        "remedy": refusal.remedy,
        "facts": refusal.facts,
    }
