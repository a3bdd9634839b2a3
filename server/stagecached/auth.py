"""Tokens, and which role may call what.

A token is ``hex(HMAC-SHA256(secret, role + "|" + session_id))``: the daemon keeps no list of them, and one that it
issued before a restart is still good after it. The peer socket issues them to processes whose uid the kernel
vouches for (``stagecached.peer``); every call of the service carries one; health and reflection need none.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from stagecache_wire.v1 import stagecache_pb2 as pb
from stagecached.refusal import Refusal

SERVICE: Final = "stagecache.v1.StageCache"
ROLES: Final = frozenset({"worker", "scheduler", "observer"})
SECRET_BYTES: Final = 32
SESSION_ID: Final = re.compile(r"[0-9a-f]{16}")

ALLOWED: Final[dict[str, frozenset[str]]] = {
    "Attach": frozenset({"worker"}),
    "OpenKey": frozenset({"worker"}),
    "Merge": frozenset({"worker"}),
    "Lookup": frozenset({"worker"}),
    "Detach": frozenset({"worker"}),
    "Watch": frozenset({"worker", "scheduler"}),
    "JoinNamespace": frozenset({"worker"}),
    "PublishBlocks": frozenset({"worker"}),
    "LookupBlocks": ROLES,
    "AcquireBlocks": frozenset({"worker", "scheduler"}),
    "ReleaseBlocks": frozenset({"worker", "scheduler"}),
    "Reset": ROLES,
    "Stats": ROLES,
}


@dataclass(frozen=True)
class Caller:
    """Who calls: proven by the token."""

    session_id: str
    role: str


def new_session_id() -> str:
    """16 random hex digits."""
    return secrets.token_hex(8)


class Tokens:
    """Issues and checks tokens with one secret."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    @classmethod
    def at(cls, path: Path) -> Tokens:
        """Tokens of the secret at ``path`` (mode 0600), which is made if there is none yet or it was cut short."""
        try:
            secret = path.read_bytes()
        except FileNotFoundError:
            secret = b""
        if len(secret) != SECRET_BYTES:
            secret = secrets.token_bytes(SECRET_BYTES)
            draft = path.with_suffix(".new")
            draft.unlink(missing_ok=True)
            with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
                file.write(secret)
            draft.replace(path)
        return cls(secret)

    def issue(self, role: str, session_id: str) -> str:
        return hmac.new(self._secret, f"{role}|{session_id}".encode(), hashlib.sha256).hexdigest()

    def is_good(self, role: str, session_id: str, token: str) -> bool:
        """Compared in constant time; ids and roles of another form are never good."""
        if role not in ROLES or SESSION_ID.fullmatch(session_id) is None:
            return False
        return hmac.compare_digest(self.issue(role, session_id).encode(), token.encode())


def caller_of(metadata: Iterable[tuple[str, str | bytes]] | None) -> tuple[Caller, str]:
    """The claimed caller and the token that a call's metadata carry; empty where they are missing."""
    found = {key: value for key, value in metadata or () if isinstance(value, str)}
    caller = Caller(found.get("stagecache-session", ""), found.get("stagecache-role", ""))
    return caller, found.get("stagecache-token", "")


def check(tokens: Tokens, path: str, metadata: Iterable[tuple[str, str | bytes]] | None) -> Caller:
    """The caller of the method at ``path`` (``/service/Method``).

    Raises:
        Refusal: UNAUTHENTICATED, with no hint which part was wrong; a good token of a role that may not call this.
    """
    caller, token = caller_of(metadata)
    if not tokens.is_good(caller.role, caller.session_id, token):
        raise Refusal(
            pb.REASON_UNAUTHENTICATED,
            "the call carries no valid session, role and token.",
            "Ask the daemon's peer socket for credentials (stagecache.rpc.handshake).",
        )
    method = path.rpartition("/")[2]
    if caller.role not in ALLOWED.get(method, frozenset()):
        raise Refusal(
            pb.REASON_UNAUTHENTICATED,
            f"role {caller.role} may not call {method}.",
            f"Roles that may: {', '.join(sorted(ALLOWED.get(method, frozenset()))) or 'none'}.",
        )
    return caller
