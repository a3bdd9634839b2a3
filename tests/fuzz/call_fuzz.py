"""Mutated calls against a real daemon, over its own socket, several at once, from every role and from nobody."""

from __future__ import annotations

import os
import re
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import grpc

from stagecache.rpc import Credentials, Rpc, handshake, reason_name
from stagecache_wire import layout, shm
from stagecache_wire.locks import LifeLock
from stagecache_wire.records import Kind
from stagecache_wire.v1 import stagecache_pb2 as pb
from tests.daemon_process import DaemonProcess
from tests.fuzz.beside import Beside
from tests.fuzz.messages import REQUESTS, VALID, mutate_bytes, mutate_fields, too_much

SERVICE = "stagecache.v1.StageCache"
AT_ONCE = 16
CALL_S = 20.0
RECORDS = 4
"""In the log of each worker, so that there is something to merge."""
SEGMENT = re.compile(rf"{shm.PREFIX}\.[0-9a-f]{{12}}")
UNTOLD = {"UNIMPLEMENTED", "CANCELLED", "MESSAGE_TOO_LARGE"}
"""Codes that come without the daemon's typed error: no such method; a stream that we cancel; over gRPC's own limit."""

REACHABLE = frozenset(
    {
        "UNSPECIFIED",
        "ABI_MISMATCH",
        "UNAUTHENTICATED",
        "UNKNOWN_SESSION",
        "WORKER_LOCK_FREE",
        "BAD_GEOMETRY",
        "BUDGET_EXCEEDED",
        "SCHEMA_MISMATCH",
        "UNKNOWN_KEY",
        "OUT_OF_RANGE",
        "SESSION_FAILED",
        "NO_SCHEDULER_SHIM",
        "TOO_MANY",
        "UNKNOWN_STAGE",
        "UNSUPPORTED_HASH",
        "UNKNOWN_NAMESPACE",
    }
)
"""Reasons that a message alone can meet. Others need a full /dev/shm (SHM_FULL), a consumer that stands still
(DEADLINE), a daemon that stops (SHUTTING_DOWN); INTERNAL is a finding."""


class Found(AssertionError):
    """The fuzz found something."""


@dataclass
class Result:
    calls: int = 0
    answered: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    slowest_s: float = 0.0
    took_s: float = 0.0

    def told(self) -> str:
        return (
            f"{self.calls} calls in {self.took_s:.0f} s ({self.calls / max(self.took_s, 1e-9):.0f}/s), slowest "
            f"{self.slowest_s:.2f} s\nanswered: {dict(sorted(self.answered.items()))}\n"
            f"refused: {dict(sorted(self.refused.items()))}"
        )


class Worker:
    """A worker without an engine: credentials, perhaps the lock, perhaps a session."""

    def __init__(self, socket: Path, *, lock: bool = True, attach: bool = True) -> None:
        self.credentials = handshake(socket, "worker", timeout_s=20.0)
        assert self.credentials.worker_lock is not None
        self.lock = LifeLock(self.credentials.worker_lock) if lock else None
        self.answer: pb.AttachResponse | None = None
        if attach:
            with Rpc(self.credentials) as rpc:
                request = VALID["Attach"](Random(3))
                assert isinstance(request, pb.AttachRequest)
                self.answer = rpc.attach(request, 20.0)
            self._publish(RECORDS)

    def _publish(self, head: int, *, written: bool = True) -> None:
        """Records that do nothing, up to ``head``; or a head alone, with no record to it."""
        assert self.answer is not None
        words = shm.open_segment(self.answer.control_segment).view.cast("Q")
        for sequence in range(words[layout.W_HEAD] + 1, head + 1 if written else 0):
            at = (3 * layout.PAGE) // layout.WORD + (sequence - 1) * layout.ENTRY_WORDS
            for index, value in enumerate((sequence, int(Kind.BEGIN))):
                words[at + index] = value
        words[layout.W_HEAD] = head
        bell = shm.open_semaphore(self.answer.daemon_doorbell)
        bell.release()
        bell.close()
        deadline = time.monotonic() + 20.0
        while words[layout.D_CONSUMED] < head and words[layout.D_STATUS] == layout.STATUS_LIVE:
            assert time.monotonic() < deadline, "the log was not consumed"
            time.sleep(0.001)

    def fail(self) -> None:
        """Publish a record that is none: the daemon ends the session."""
        self._publish(RECORDS + 1, written=False)

    def end(self) -> None:
        with Rpc(self.credentials) as rpc:
            rpc.detach(20.0)
        if self.lock is not None:
            self.lock.release(unlink=True)


class CallFuzz:
    """A client that may be anybody. ``step`` sends one call; what came of earlier ones is judged meanwhile."""

    def __init__(self, daemon: DaemonProcess, seed: int) -> None:
        self.rng = Random(seed)
        self.result = Result()
        self._socket = daemon.socket
        self._channel = grpc.insecure_channel(
            f"unix:{os.fspath(daemon.socket)}",
            options=[("grpc.default_authority", "localhost"), ("grpc.use_local_subchannel_pool", 1)],
        )
        self._calls: dict[str, Any] = {
            name: self._channel.unary_unary(f"/{SERVICE}/{name}") for name in (*VALID, "Nope", "attach")
        }
        self._watch = self._channel.unary_stream(f"/{SERVICE}/Watch")
        self._open: deque[tuple[str, Any, float]] = deque()
        self._streams: deque[Any] = deque()
        self._others = [handshake(self._socket, role) for role in ("observer", "scheduler")]
        self._workers: dict[str, Worker] = {}

    def __enter__(self) -> CallFuzz:
        self._people()
        return self

    def __exit__(self, *error: object) -> None:
        for stream in self._streams:
            stream.cancel()
        self._channel.close()
        for worker in self._workers.values():
            worker.end()

    def _people(self) -> None:
        """Workers in every state. Calls move them: now and then they are made anew."""
        for worker in self._workers.values():
            worker.end()
        self._workers = {
            "attached": Worker(self._socket),
            "another": Worker(self._socket),
            "leaving": Worker(self._socket),
            "handshaken": Worker(self._socket, attach=False),
            "without lock": Worker(self._socket, lock=False, attach=False),
            "failed": Worker(self._socket),
            "ended": Worker(self._socket),
        }
        self._workers["failed"].fail()
        self._workers["ended"].end()

    def step(self) -> None:
        """
        Raises:
            Found: an answer that must not be.
        """
        rng = self.rng
        method = rng.choice((*VALID, "Attach", "Attach", "OpenKey", "OpenKey", "Lookup", "Merge", "JoinNamespace"))
        credentials, good = self._credentials(method)
        raw = self._message(method, good)
        if rng.random() < 0.01:
            method = rng.choice(("Nope", "attach"))
        metadata = self._metadata(credentials, good)
        if method == "Watch":
            self._stream(raw, metadata)
        else:
            call = self._calls[method].future(raw, timeout=CALL_S, metadata=metadata)
            self._open.append((method, call, time.monotonic()))
            while len(self._open) >= AT_ONCE:
                self._judge(*self._open.popleft())
        self.result.calls += 1
        if self.result.calls % 400 == 0:
            self.settle()
            self._people()

    def settle(self) -> None:
        """Judge what is under way."""
        while self._open:
            self._judge(*self._open.popleft())

    # ---- inside

    def _credentials(self, method: str) -> tuple[Credentials, bool]:
        """Who calls, and whether by their own token; most are such as may call the method."""
        rng = self.rng
        name = rng.choice(("attached",) * 6 + ("another", "handshaken", "without lock", "failed", "ended"))
        if method == "Detach" and rng.random() < 0.9:
            name = "leaving"
        worker = self._workers[name].credentials
        if (method in ("Reset", "Stats") and rng.random() < 0.6) or rng.random() < 0.05:
            worker = rng.choice(self._others)
        return worker, rng.random() > 0.08

    def _message(self, method: str, good: bool) -> bytes:
        rng = self.rng
        message = VALID[method](rng)
        for _ in range(rng.choice((0, 1, 1, 1, 2, 4))):
            mutate_fields(rng, message)
        if rng.random() < 0.08:
            too_much(rng, message)
        raw = message.SerializeToString()
        if rng.random() < 0.25:
            raw = mutate_bytes(rng, raw)
        return raw if method != "Reset" or not good else self._spare(raw)

    def _spare(self, raw: bytes) -> bytes:
        """An observer may reset any stage, by force: that is no fault, and not what the bystander is there for."""
        try:
            request = REQUESTS["Reset"].FromString(raw)
        except Exception:
            return raw
        assert isinstance(request, pb.ResetRequest)
        return b"" if request.force and request.stage in ("", Beside.stage) else raw

    def _metadata(self, credentials: Credentials, good: bool) -> list[tuple[str, str | bytes]]:
        rng = self.rng
        entries: list[tuple[str, str | bytes]] = list(credentials.metadata)
        if good:
            return entries
        how = rng.randrange(6)
        if how == 0:
            return []
        if how == 1:
            del entries[rng.randrange(3)]
        elif how == 2:
            entries[2] = ("stagecache-token", self._workers["another"].credentials.token)
        elif how == 3:
            entries[1] = ("stagecache-role", rng.choice(("worker", "scheduler", "observer", "root", "")))
            entries[0] = ("stagecache-session", self._workers["another"].credentials.session_id)
        elif how == 4:
            token = credentials.token
            entries[2] = ("stagecache-token", rng.choice((token[:-1], token.upper(), token + "0", "", "0" * 5000)))
        else:
            entries[2] = ("stagecache-token-bin", rng.randbytes(32))
        return entries

    def _stream(self, raw: bytes, metadata: list[tuple[str, str | bytes]]) -> None:
        """A stream, read for one event by turns, and left open for a while."""
        stream = self._watch(raw, timeout=10 * CALL_S, metadata=metadata)
        self._streams.append(stream)
        if len(self._streams) > 24:
            old = self._streams.popleft()
            try:
                next(old)
                self.result.answered["Watch"] += 1
            except StopIteration:
                self.result.answered["Watch"] += 1
            except grpc.RpcError as error:
                self._refused("Watch", error)
            old.cancel()

    def _judge(self, method: str, call: Any, begun: float) -> None:
        try:
            call.result()
            self.result.answered[method] += 1
        except grpc.RpcError as error:
            self._refused(method, error)
        self.result.slowest_s = max(self.result.slowest_s, time.monotonic() - begun)

    def _refused(self, method: str, error: Any) -> None:
        code = error.code().name
        for name, value in error.trailing_metadata() or ():
            if name == "stagecache-error-bin":
                told = pb.Error.FromString(value)
                reason = reason_name(told.reason)
                self.result.refused[reason] += 1
                if reason == "INTERNAL":
                    raise Found(f"{method}: the daemon met an unexpected error")
                if SEGMENT.search(told.message + told.remedy + str(told.facts)):
                    raise Found(f"{method}: an error names a segment: {told.message}")
                return
        if "message larger than max" in error.details():
            code = "MESSAGE_TOO_LARGE"
        self.result.refused[code] += 1
        if code not in UNTOLD:
            raise Found(f"{method}: {code} without a reason: {error.details()}")


def run(
    daemon: DaemonProcess, seed: int, count: int, *, look_every: int = 500, looked: Callable[[], None] = lambda: None
) -> Result:
    """Send ``count`` calls, with a bystander beside. looked: called after each look at the bystander.

    Raises:
        Found: the first answer that must not be. WrongError: the bystander's rows.
    """
    begun = time.monotonic()
    with Beside(daemon.socket) as beside, CallFuzz(daemon, seed) as fuzz:
        for index in range(count):
            fuzz.step()
            if index % look_every == 0:
                beside.look()
                looked()
        fuzz.settle()
        beside.look()
        beside.end()
        fuzz.result.took_s = time.monotonic() - begun
        return fuzz.result
