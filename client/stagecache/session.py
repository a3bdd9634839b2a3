"""One worker's session with the daemon: attach, the log, keys, and whether the daemon is there.

``append`` never waits for the daemon while the log has room. Where something must be waited for, the wait is bounded,
and an outage is waited for once: after ``daemon_grace_s`` the session is *away*, everything that needs the daemon
fails at once, and steps without hits go on. When a daemon has adopted the session, ``returned`` says so.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

from stagecache.arena import ALIGN
from stagecache.errors import (
    AttachError,
    CallDeadlineError,
    DaemonLostError,
    DaemonUnavailableError,
    GeometryError,
    SessionFailedError,
    StageCacheError,
)
from stagecache.log import WAIT_SLICE_S, LogFullError, LogWriter
from stagecache.mapping import ControlWords, StagedKey
from stagecache.rpc import Rpc, handshake
from stagecache.watcher import Watcher
from stagecache_wire import layout, shm
from stagecache_wire.fence import fence
from stagecache_wire.figures import WAITS
from stagecache_wire.geometry import BadGeometryError, Geometry, KeySchema
from stagecache_wire.locks import LifeLock, is_held
from stagecache_wire.messages import geometry_from_wire, geometry_to_wire, schema_from_wire, schema_to_wire
from stagecache_wire.names import RunPaths
from stagecache_wire.records import KeyMode, Kind, Loggable, Record, key_words
from stagecache_wire.v1 import stagecache_pb2 as pb

if TYPE_CHECKING:
    from stagecache.copies import Copies
    from stagecache.stream_path import StreamPath
    from stagecache.writes import Write

logger = logging.getLogger("stagecache")

ATTACH_TIMEOUT_S: Final = 120.0
"""Prefaulting pools takes about a second a GiB."""
RPC_TIMEOUT_S: Final = 30.0
LOCK_TIMEOUT_S: Final = 1.0
"""Longest wait for the lock of this process, which a sweep may hold for a moment."""
_ALIVE_EVERY_S: Final = 0.05
ANEW: Final = "The worker attaches anew by itself as soon as a daemon takes it; rows saved before are gone."


_sessions: weakref.WeakSet[Session] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for session in list(_sessions):
        session.forked = True


os.register_at_fork(after_in_child=_after_fork_in_child)


def check_key(schema: KeySchema, geometry: Geometry) -> None:
    """
    Raises:
        BadGeometryError: the schema cannot be, or a hit on its rows could not be brought through the arena's bounce.
    """
    schema.checked()
    if schema.row_bytes > geometry.arena_bytes // 8 - ALIGN:
        raise BadGeometryError(
            f"key {schema.name}: a row of {schema.row_bytes} bytes is more than an eighth of the arena of "
            f"{geometry.arena_bytes}; raise arena_bytes"
        )


class Session:
    """An attached worker. Made by ``Session.attach``; ended by ``close`` or by the process' end."""

    def __init__(self, rpc: Rpc, lock: LifeLock, answer: pb.AttachResponse, stage: str, daemon_grace_s: float) -> None:
        self.geometry = geometry_from_wire(answer.geometry)
        self.rpc = rpc
        self.stage = stage
        self.control = ControlWords(
            answer.control_segment, answer.arena_segment, self.geometry, rpc.credentials.session_id
        )
        doorbells = shm.open_doorbells(answer.daemon_doorbell, answer.worker_doorbell)
        self.log = LogWriter(self.control, *doorbells)
        self.stream: StreamPath | None = None
        """Appends to the log in the engine thread's place, where rows come from a device with streams."""
        # posix_ipc leaves a semaphore mapped when its object goes; no thread can wait on one of ours by then.
        for doorbell in doorbells:
            weakref.finalize(self.log, doorbell.close).atexit = False
        self.epoch = answer.epoch
        self.away = False
        self.forked = False
        """This is a forked child of the process that attached: the session is its parent's."""
        _sessions.add(self)
        self.waits = [0, 0] * len(WAITS)
        """Count and nanoseconds of each kind of wait, and the count of all: for metrics."""
        self.waits_total = 0
        self.attached_at = time.monotonic()
        self.attach_again: Callable[..., Session] = Session.attach
        """Makes another session like this one; takes ``keys``."""
        self._lock = lock
        self._daemon_lock = RunPaths.of(rpc.credentials.socket).lock
        self._daemon_grace_s = daemon_grace_s
        self._seen = (self.control.boot_id, self.log.consumed)
        self.keys = [self._staged(key) for key in answer.keys]
        self.watcher = Watcher(rpc)
        self.watcher.start()

    @classmethod
    def attach(
        cls,
        socket: str | os.PathLike[str],
        *,
        model: str,
        stage: str,
        geometry: Geometry,
        keys: Sequence[KeySchema] = (),
        rank: int = 0,
        engine: str = "",
        open_remembered_keys: bool = False,
        daemon_grace_s: float = 2.0,
    ) -> Session:
        """Attach this process to the daemon at ``socket``; arguments as of ``StageCache.attach``.

        Raises:
            DaemonUnavailableError: nobody answers there.
            AttachError: refused; its class and text say why and what to change.
        """
        try:
            checked = geometry.checked()
            for key in keys:
                check_key(key, checked)
            f"{model}{stage}".encode()
            if not 0 <= rank < 1 << 31:
                raise BadGeometryError(f"rank {rank}")
        except (BadGeometryError, UnicodeEncodeError) as error:
            raise GeometryError(f"attach: {error}") from error
        credentials = handshake(socket, "worker")
        lock = credentials.take_lock(LOCK_TIMEOUT_S)
        rpc = Rpc(credentials)
        try:
            answer = rpc.attach(
                pb.AttachRequest(
                    abi=layout.ABI,
                    model=model,
                    stage=stage,
                    pid=os.getpid(),
                    geometry=geometry_to_wire(geometry),
                    keys=[schema_to_wire(key) for key in keys],
                    open_remembered_keys=open_remembered_keys,
                    rank=rank,
                    engine=engine,
                ),
                ATTACH_TIMEOUT_S,
            )
            session = cls(rpc, lock, answer, stage, daemon_grace_s)
            session.attach_again = partial(
                cls.attach,
                socket,
                model=model,
                stage=stage,
                geometry=session.geometry,
                rank=rank,
                engine=engine,
                open_remembered_keys=open_remembered_keys,
                daemon_grace_s=daemon_grace_s,
            )
            return session
        except BaseException as error:
            # Nothing stays behind: the daemon forgets the id and watches this process no more.
            with contextlib.suppress(StageCacheError):
                rpc.detach(RPC_TIMEOUT_S)
            rpc.close()
            lock.release(unlink=True)
            if isinstance(error, (FileNotFoundError, DaemonLostError)):
                raise DaemonUnavailableError(
                    f"attach: the daemon at {socket} stopped right behind its answer: {error}."
                ) from error
            if isinstance(error, StageCacheError) and not isinstance(error, AttachError):
                raise AttachError(f"attach: {error}", reason=error.reason) from error
            raise

    @property
    def session_id(self) -> str:
        return self.rpc.credentials.session_id

    def open_key(self, schema: KeySchema, replacing: StagedKey | None = None) -> StagedKey:
        """Open a key at the daemon: one call, the only one that a step may need.

        replacing: an open key of the same name whose schema was wrong; it is given up first.

        Raises:
            StageCacheError: away, refused (budget, shared memory, schema), or not answered in time.
        """
        try:
            check_key(schema, self.geometry)
        except BadGeometryError as error:
            raise GeometryError(str(error)) from error
        if self.away:
            raise DaemonLostError(f"key {schema.name} cannot be opened: the daemon is away")
        if replacing is not None:
            self.wait_consumed(self.close_key(replacing), RPC_TIMEOUT_S, f"key {schema.name} to be given up")
        request = pb.OpenKeyRequest(key=schema_to_wire(schema))
        deadline = time.monotonic() + RPC_TIMEOUT_S
        gone_since: float | None = None
        while True:
            try:
                key = self._staged(self.rpc.open_key(request, RPC_TIMEOUT_S))
                if self.stream is not None:
                    self.stream.opened(key)
                return key
            except DaemonLostError:
                if self.has_ended():
                    raise
                # It may be starting again; the call may be repeated. An outage is waited for once.
                now = time.monotonic()
                gone_since = None if is_held(self._daemon_lock) else gone_since or now
                if gone_since is not None and now - gone_since >= self._daemon_grace_s:
                    self._go_away()
                    raise
                if now >= deadline:
                    raise
                time.sleep(WAIT_SLICE_S)

    def close_key(self, key: StagedKey) -> int:
        """Give a key up: its memory is freed. Returns the record's sequence.

        Raises:
            StageCacheError: it cannot be logged.
        """
        try:
            return self.append(Record(0, Kind.CLOSE_KEY, keys=key_words((key.key_id, KeyMode.ROWS))))
        finally:
            if self.stream is not None:
                self.stream.closed(key)

    def _staged(self, answer: pb.OpenKeyResponse) -> StagedKey:
        schema = schema_from_wire(answer.key)
        try:
            segment = shm.open_segment(answer.staging_segment)
        except FileNotFoundError as error:
            raise DaemonLostError(f"key {schema.name}: the daemon stopped right behind its answer") from error
        shm.prefault(segment)
        return StagedKey(answer.key_id, schema, segment, self.geometry)

    # ---------------------------------------------------------------- the log

    def append(
        self, record: Loggable, copies: Copies | None = None, writes: Sequence[Write] = (), *, urgent: bool = True
    ) -> int:
        """Publish a record; returns its sequence. urgent: as for ``LogWriter.append``. Where there is a sender, it is
        published once ``copies`` and all records before it are through, and ``writes`` are told.

        Raises:
            SessionFailedError: the daemon ended the session.
            DaemonLostError: away, or the log is full and the daemon gone.
            CallDeadlineError: the log stayed full though the daemon lives.
            LogFullError: the record is larger than the log can hold.
        """
        if self.away or self.has_ended():
            self.check()
        if self.stream is not None:
            return self.stream.sender.append(record, copies, writes, urgent=urgent)
        try:
            return self.log.append(record, 0.0, urgent=urgent)
        except LogFullError:
            size = record.most_bytes()
            if size > self.log.longest:
                raise
            self.wait(lambda: self.log.has_room(size), RPC_TIMEOUT_S, "room in the step log", kind="log")
            return self.log.append(record, WAIT_SLICE_S)

    def check(self) -> None:
        """
        Raises:
            SessionFailedError: the daemon ended the session; the text says why.
            DaemonLostError: away.
        """
        failure = self.failure()
        if failure is not None:
            raise failure
        if self.away:
            raise DaemonLostError("the daemon is away; rows that only it holds cannot be had until it is back")

    def failure(self) -> SessionFailedError | None:
        """Why the session is over; None while it lives."""
        if self.forked:
            return SessionFailedError(
                "this session belongs to the process that attached; a forked child has none.",
                remedy="Attach in the child.",
            )
        if self.watcher.gone:
            return SessionFailedError(
                f"the daemon does not hold this session any more: {self.watcher.gone}.", remedy=ANEW
            )
        if self.stream is not None and self.stream.sender.broken is not None:
            return self.stream.sender.broken.again()
        words = self.control.words
        if self.control.status == layout.STATUS_LIVE:
            return None
        if self.control.status == layout.STATUS_ENDED:
            return SessionFailedError("the daemon was stopped and ended this session.", remedy=ANEW)
        return SessionFailedError(
            f"the daemon ended this session: record {words[layout.D_FAIL_SEQUENCE]} broke a rule of the log.",
            remedy=f"Its log names the rule; `stagecache status` shows it. {ANEW}",
        )

    def wait_consumed(self, sequence: int, timeout_s: float, what: str, whose: str = "", *, kind: str = "hit") -> None:
        """Wait until the daemon has consumed the log up to ``sequence``. Any thread. kind: as for ``wait``.

        Raises:
            SessionFailedError, DaemonLostError: as ``check``; also when the daemon dies meanwhile.
            CallDeadlineError: not in ``timeout_s`` seconds; names ``what`` and ``whose`` it is.
        """
        if self.log.consumed < sequence:
            self._wait_consumed(sequence, timeout_s, f"{what} {whose}".rstrip(), kind)
        fence()

    def _wait_consumed(self, sequence: int, timeout_s: float, what: str, kind: str) -> None:
        """Apart, so that a call which need not wait makes no function and no text."""
        self.wait(lambda: self.log.consumed >= sequence, timeout_s, what, kind=kind)

    def wait(
        self,
        ready: Callable[[], bool],
        timeout_s: float,
        what: str,
        listen: Callable[[float], None] | None = None,
        *,
        kind: str,
    ) -> None:
        """Wait until ``ready``, for ``timeout_s`` seconds at most; the daemon's absence ends it earlier.

        listen(slice_s) sleeps until something may have changed; by default on the daemon's doorbell. kind: one of
        ``figures.WAITS``, under which metrics count the wait.
        """
        begun = time.monotonic_ns()
        try:
            self._wait(ready, timeout_s, what, listen)
        finally:
            at = 2 * WAITS.index(kind)
            self.waits[at] += 1
            self.waits[at + 1] += time.monotonic_ns() - begun
            self.waits_total += 1

    def _wait(
        self, ready: Callable[[], bool], timeout_s: float, what: str, listen: Callable[[float], None] | None
    ) -> None:
        listen = listen or self.log.listen
        deadline = time.monotonic() + timeout_s
        look_at = time.monotonic() + _ALIVE_EVERY_S
        gone_since: float | None = None
        while not ready():
            self.check()
            now = time.monotonic()
            if now >= deadline:
                raise CallDeadlineError(f"{what}: not there after {timeout_s:g} s, though the daemon lives")
            if now >= look_at:
                look_at = now + _ALIVE_EVERY_S
                gone_since = None if is_held(self._daemon_lock) else gone_since or now
                if gone_since is not None and now - gone_since >= self._daemon_grace_s:
                    self._go_away()
                    raise DaemonLostError(f"{what}: the daemon is gone for {self._daemon_grace_s:g} s")
            self.log.ring()
            listen(min(WAIT_SLICE_S, deadline - now))

    # ---------------------------------------------------------------- outages

    def has_ended(self) -> bool:
        """Whether the daemon ended the session: it was stopped, or a record was bad. It does not come back."""
        live = self.control.words[layout.D_STATUS] == layout.STATUS_LIVE
        if self.stream is not None and self.stream.sender.broken is not None:
            return True
        return not live or self.forked or bool(self.watcher.gone)

    def _go_away(self) -> None:
        if not self.away:
            self.away = True
            self._seen = (self.control.boot_id, self.log.consumed)
            logger.warning(
                "stagecache: the daemon at %s is gone; steps go on without it, prefix hits fail until it is back",
                self.rpc.credentials.socket,
            )

    def returned(self) -> bool:
        """Whether a daemon has adopted the session since it went away; then it is no longer away."""
        if not self.away:
            return False
        if (self.control.boot_id, self.log.consumed) == self._seen:
            return False
        self.away = False
        logger.warning("stagecache: the daemon at %s is back", self.rpc.credentials.socket)
        return True

    def let_go(self) -> None:
        """Give up a session that is over: the daemon, if it still holds it, gives its memory back. Not on the watch's
        thread. What is mapped stays mapped.
        """
        if self.forked:
            return
        self.watcher.stop()
        with contextlib.suppress(StageCacheError):
            if not self.rpc.closed and self.control.status != layout.STATUS_ENDED:
                self.rpc.detach(RPC_TIMEOUT_S)
        self.rpc.close()
        self._lock.release(unlink=True)

    def close(self, drain_s: float = 5.0) -> None:
        """Detach: the daemon frees the session's memory. In a forked child it does nothing: the parent goes on."""
        if self.forked:
            return
        self.watcher.stop()
        try:
            if self.control.status == layout.STATUS_LIVE and not self.away:
                self.log.wait_consumed(self.log.head, drain_s)
            if self.control.status != layout.STATUS_ENDED and not self.away:
                self.rpc.detach(RPC_TIMEOUT_S)
        except StageCacheError as error:
            logger.warning("stagecache: detach: %s", error)
        finally:
            self.rpc.close()
            self._lock.release(unlink=True)
