"""The handshake, on a real socket in this process."""

from __future__ import annotations

import asyncio
import json
import os
import socket as sockets
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from stagecache_wire.layout import ABI
from stagecache_wire.v1 import stagecache_pb2 as pb
from stagecached import peer
from stagecached.access import Access
from stagecached.auth import Tokens
from stagecached.refusal import Refusal

TOKENS = Tokens(b"k" * 32)
KNOWN = "a" * 16


class Registry:
    """Notes what was asked of it; knows one session."""

    def __init__(self) -> None:
        self.pidfds: dict[str, int | None] = {}

    def issue(self, session_id: str, pidfd: int | None) -> Path:
        self.pidfds[session_id] = pidfd
        return Path("/lock") / session_id

    def associate(self, session_id: str, pidfd: int | None) -> Path:
        if session_id != KNOWN:
            raise Refusal(pb.REASON_UNKNOWN_SESSION, "no such session.")
        return self.issue(session_id, pidfd)


Ask = Callable[[Any], dict[str, Any]]


def test_a_scheduler_gets_a_lock_only_where_it_names_its_engine(tmp_path: Path) -> None:
    """A client that may hold leases must be seen to die; one that only watches needs no lock."""
    hello = {"abi": ABI, "role": "scheduler"}
    workers, schedulers = Registry(), Registry()

    async def main() -> list[Any]:
        server = peer.PeerServer(tmp_path / "p.sock", Access(), TOKENS, workers, 77, schedulers)
        await server.start()
        answers = []
        for question in (hello, {**hello, "engine": "e"}):
            reader, writer = await asyncio.open_unix_connection(tmp_path / "p.sock")
            writer.write(json.dumps(question).encode() + b"\n")
            answers.append(json.loads(await asyncio.wait_for(reader.readline(), 5.0)))
            writer.close()
        await server.stop()
        return answers

    plain, leasing = asyncio.run(main())
    assert plain["worker_lock"] is None
    assert leasing["worker_lock"] == f"/lock/{leasing['session_id']}"
    assert list(schedulers.pidfds) == [leasing["session_id"]]
    assert not workers.pidfds


def serve(tmp_path: Path, questions: list[Any], access: Access | None = None) -> tuple[list[dict[str, Any]], Registry]:
    """The answers to some questions (bytes as they are, else as JSON), and what the registry saw."""
    registry = Registry()

    async def main() -> list[dict[str, Any]]:
        server = peer.PeerServer(tmp_path / "p.sock", access or Access(), TOKENS, registry, 77)
        await server.start()
        answers = []
        for question in questions:
            reader, writer = await asyncio.open_unix_connection(tmp_path / "p.sock")
            writer.write(question if isinstance(question, bytes) else json.dumps(question).encode() + b"\n")
            answers.append(json.loads(await asyncio.wait_for(reader.readline(), 5.0)))
            assert await reader.read() == b"", "the connection is closed after the answer"
            writer.close()
        await server.stop()
        return answers

    return run(main()), registry


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(work)


def close_all(registry: Registry) -> None:
    for pidfd in registry.pidfds.values():
        if pidfd is not None:
            os.close(pidfd)


def test_worker_gets_id_token_boot_id_and_lock(tmp_path: Path) -> None:
    (answer,), registry = serve(tmp_path, [{"abi": ABI, "role": "worker", "pid": 1}])
    session_id = answer["session_id"]
    assert answer == {
        "session_id": session_id,
        "token": TOKENS.issue("worker", session_id),
        "boot_id": 77,
        "worker_lock": f"/lock/{session_id}",
    }
    assert len(session_id) == 16
    assert list(registry.pidfds) == [session_id]
    close_all(registry)


@pytest.mark.parametrize("role", ["scheduler", "observer"])
def test_other_roles_get_no_lock_and_are_not_watched(tmp_path: Path, role: str) -> None:
    (answer,), registry = serve(tmp_path, [{"abi": ABI, "role": role}])
    assert answer["worker_lock"] is None
    assert TOKENS.is_good(role, answer["session_id"], answer["token"])
    assert registry.pidfds == {}


def test_ids_are_never_given_twice(tmp_path: Path) -> None:
    answers, _ = serve(tmp_path, [{"abi": ABI, "role": "observer"}] * 20)
    assert len({answer["session_id"] for answer in answers}) == 20


def test_known_worker_may_be_watched_again(tmp_path: Path) -> None:
    token = TOKENS.issue("worker", KNOWN)
    question = {"abi": ABI, "role": "worker", "session_id": KNOWN, "token": token}
    answers, registry = serve(
        tmp_path,
        [
            question,
            {**question, "token": TOKENS.issue("worker", "b" * 16)},
            {**question, "session_id": "b" * 16, "token": TOKENS.issue("worker", "b" * 16)},
        ],
    )
    assert (answers[0]["session_id"], answers[0]["token"]) == (KNOWN, token)
    assert answers[1]["reason"] == "UNAUTHENTICATED"
    assert answers[2]["reason"] == "UNKNOWN_SESSION"
    close_all(registry)


def test_other_abi_is_refused_with_both_numbers(tmp_path: Path) -> None:
    (answer,), _ = serve(tmp_path, [{"abi": 99, "role": "worker"}])
    assert answer["reason"] == "ABI_MISMATCH"
    assert answer["facts"] == {"daemon_abi": str(ABI), "caller_abi": "99"}
    assert "same release" in answer["remedy"]


@pytest.mark.parametrize(
    "line",
    [
        b"\n",
        b"hello\n",
        b"[1]\n",
        b"{}\n",
        b'{"abi": 1}\n',
        b'{"abi": 1, "role": "king"}\n',
        b'{"abi": 1, "role": ["worker"]}\n',
        b'{"abi": 1, "role": "worker", "session_id": 7}\n',
        b'{"abi": {}, "role": "worker"}\n',
        b'{"abi": "\\ud800", "role": "worker"}\n',
        b'{"abi": ' + b"[" * 900 + b"]" * 900 + b', "role": "worker"}\n',
        b'{"abi": 1, "role": "worker", "session_id": "0123456789abcdef", "token": "\\ud800"}\n',
        b"\xff\xfe\n",
        b"[" * 4000 + b"\n",
        b"x" * 9000,
    ],
)
def test_bad_line_is_answered_with_a_reason(tmp_path: Path, line: bytes) -> None:
    (answer,), registry = serve(tmp_path, [line])
    assert answer["error"]
    assert answer["reason"] in pb.Reason.keys() or f"REASON_{answer['reason']}" in pb.Reason.keys()  # noqa: SIM118
    assert answer["reason"] != "INTERNAL"
    assert registry.pidfds == {}


@pytest.mark.parametrize("pid", [b"[" * 900 + b"]" * 900, b'"\\ud800"', b"1e999", b"-1", b"true", b"{}", b"9" * 400])
def test_a_pid_that_is_none_is_left_out(tmp_path: Path, pid: bytes) -> None:
    """It is for people alone."""
    (answer,), _ = serve(tmp_path, [b'{"abi": %d, "role": "observer", "pid": %s}\n' % (ABI, pid)])
    assert answer["token"]


def test_other_uid_is_refused_unless_the_group_admits_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer, "peer_uid_and_groups", lambda _: (4242, frozenset({7, 8})))
    question = {"abi": ABI, "role": "observer"}
    (refused,), _ = serve(tmp_path, [question])
    assert refused["reason"] == "UNAUTHENTICATED"
    assert "caller is uid 4242" in refused["error"]
    assert Access(gid=8).admits(4242, frozenset({7, 8}))
    assert not Access(gid=9).admits(4242, frozenset({7, 8}))


def test_silent_peer_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer, "ANSWER_TIMEOUT_S", 0.05)

    async def main() -> bytes:
        server = peer.PeerServer(tmp_path / "p.sock", Access(), TOKENS, Registry(), 1)
        await server.start()
        reader, writer = await asyncio.open_unix_connection(tmp_path / "p.sock")
        dropped = await asyncio.wait_for(reader.read(), 5.0)
        writer.close()
        await server.stop()
        return dropped

    assert run(main()) == b""


def test_kernel_tells_who_connected() -> None:
    ours, theirs = sockets.socketpair(sockets.AF_UNIX)
    with ours, theirs:
        uid, groups = peer.peer_uid_and_groups(ours)
        assert uid == os.geteuid()
        assert os.getegid() in groups
        assert set(os.getgroups()) <= groups
