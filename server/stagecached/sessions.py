"""All sessions of this daemon: the one module that makes, changes and ends them.

    issue      the peer socket gave a worker an id and a token; its lock file is made, its life is watched
    attach     segments made, manifest durable, consumer running; then the answer
    open_key   likewise for one key (``stagecached.session_keys``)
    end        by Detach, by the worker's death or by a stop: status word, names, manifest, mapping, budget

Everything here runs on the event loop; what takes long (allocating, prefaulting, unmapping) runs in threads, so the
loop stays responsive. A call that is cancelled does not cancel the work: it is finished, and the repeated call finds
its result.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Final

import structlog

from stagecache_wire import layout, shm
from stagecache_wire.geometry import MAX_KEYS, KeySchema
from stagecache_wire.names import SessionNames
from stagecache_wire.v1 import stagecache_pb2 as pb
from stagecached import sweep
from stagecached.access import Access
from stagecached.background import Background, call_soon, progress_of
from stagecached.budget import Budget, Cost, Reservation, key_cost, mib, session_cost
from stagecached.consumer import Consumer
from stagecached.keymemory import KeyMemory
from stagecached.keystore import KeyStore
from stagecached.liveness import Liveness
from stagecached.manifest import Manifest, ManifestStore, NotDurableError
from stagecached.refusal import Refusal, not_durable
from stagecached.segments import SessionSegments
from stagecached.session import AttachSpec, Session, State, label_of, unknown_session
from stagecached.session_keys import SessionKeys
from stagecached.shared.manager import SharedBlocks
from stagecached.watch import WatchHub

MAX_EXPECTED: Final = 256
"""Workers that had a handshake and have not attached; beyond it the oldest must ask again."""

PINNED_AT_ONCE: Final = 4
"""Adopted sessions whose memory is faulted and locked at the same time."""

UNMAP_TIMEOUT_S: Final = 2.0
"""Longest wait for calls that still read a session which has ended."""

ConsumerFactory = Callable[[SessionSegments, Callable[[int, str], None], Callable[[int], None]], Consumer]

SessionEvent = Callable[[str, Session, str], None]
"""Called with ``attached``, ``adopted``, ``failed`` or ``ended``, the session, still mapped, and why."""

log = structlog.get_logger()


class SessionManager:
    """Composes what a session needs, and alone changes a session's state."""

    def __init__(
        self,
        node: str,
        boot_id: int,
        *,
        budget: Budget,
        manifests: ManifestStore,
        shared: SharedBlocks,
        memory: KeyMemory,
        hub: WatchHub,
        access: Access,
        background: Background,
        max_sessions: int,
        merge_threads: int,
        make_consumer: ConsumerFactory = Consumer,
    ) -> None:
        self.node = node
        self.boot_id = boot_id
        self.budget = budget
        self.hub = hub
        self.shared = shared
        self.background = background
        self.on_event: SessionEvent = lambda event, session, why: None
        self.liveness = Liveness(self._worker_died)
        self._keys = SessionKeys(budget, manifests, memory, access, self.background)
        self._manifests = manifests
        self._memory = memory
        self._access = access
        self._max_sessions = max_sessions
        self._merge_threads = merge_threads
        self._make_consumer = make_consumer
        self._draining = False
        self._sessions: dict[str, Session] = {}
        self._expected: dict[str, None] = {}
        self._attaching: dict[str, asyncio.Task[Session]] = {}
        self._ending: dict[str, asyncio.Task[None]] = {}

    def get(self, session_id: str) -> Session:
        """Raises: Refusal, UNKNOWN_SESSION."""
        session = self._sessions.get(session_id)
        if session is None:
            raise unknown_session()
        return session

    def has(self, session_id: str) -> bool:
        return session_id in self._sessions

    def all(self) -> list[Session]:
        return list(self._sessions.values())

    # ---------------------------------------------------------------- workers come (peer.ClientRegistry)

    def issue(self, session_id: str, pidfd: int | None) -> Path:
        lock = SessionNames(self.node, session_id).worker_lock
        os.close(os.open(lock, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        self._access.open_file(lock)
        self.liveness.watch(session_id, lock, pidfd)
        self._expected[session_id] = None
        if len(self._expected) > MAX_EXPECTED:
            self._start_end(next(iter(self._expected)), "too many handshakes without attach", 0.0)
        return lock

    def associate(self, session_id: str, pidfd: int | None) -> Path:
        if session_id not in self._sessions and session_id not in self._expected:
            if pidfd is not None:
                os.close(pidfd)
            raise unknown_session()
        lock = SessionNames(self.node, session_id).worker_lock
        self.liveness.watch(session_id, lock, pidfd)
        return lock

    def expect(self, session_id: str) -> None:
        """Watch a live worker that has no session here: its lock file is removed once it is dead."""
        self._expected[session_id] = None
        self.liveness.watch(session_id, SessionNames(self.node, session_id).worker_lock, None)
        self.liveness.holds_lock(session_id)

    # ---------------------------------------------------------------- attach

    async def attach(self, session_id: str, spec: AttachSpec) -> Session:
        """The session with every key of ``spec`` open, durable in its manifest; the same one when repeated.

        Raises:
            Refusal: it does not fit, its worker does not hold its lock, or it is attached with other sizes.
        """
        self._check_not_draining()
        task = self._attaching.get(session_id)
        if task is None:
            task = self.background.keep(self._attach(session_id, spec))
            self._attaching[session_id] = task
            task.add_done_callback(lambda _: self._attaching.pop(session_id, None))
        session = await asyncio.shield(task)
        if session.segments.geometry != spec.geometry or session.label != spec.label:
            raise Refusal(
                pb.REASON_BAD_GEOMETRY,
                f"the session is attached as {session.label} with {session.segments.geometry}, "
                f"not as {spec.label} with {spec.geometry}.",
                "Detach first; a new handshake gives a new session.",
            )
        for schema in spec.keys:
            await self._keys.open(session, schema)
        return session

    async def open_key(self, session_id: str, schema: KeySchema) -> KeyStore:
        """See ``SessionKeys.open``."""
        self._check_not_draining()
        return await self._keys.open(self.get(session_id), schema)

    async def _attach(self, session_id: str, spec: AttachSpec) -> Session:
        existing = self._sessions.get(session_id)
        if existing is not None:
            existing.check_usable()
            return existing
        names = SessionNames(self.node, session_id)
        if session_id in self._ending or not self._is_alive(names):
            raise Refusal(
                pb.REASON_WORKER_LOCK_FREE,
                "the worker does not hold the lock of this session, so it would look dead.",
                "Take the lock that the handshake named, keep it for life, then attach; where its file is gone, "
                "another handshake names a new one.",
            )
        if len(self._sessions) >= self._max_sessions:
            raise Refusal(
                pb.REASON_TOO_MANY,
                f"{len(self._sessions)} sessions are attached, as many as --max-sessions allows.",
                "Stop one, or raise --max-sessions.",
            )
        schemas, reservations = self._admit(spec)
        try:
            segments = await self._allocate(names, spec, schemas, reservations)
        except BaseException:
            for reservation in reservations:
                reservation.release()
            raise
        for reservation in reservations:
            reservation.settled()
        manifest = spec.manifest(session_id, schemas)
        session = self._start(manifest, segments, reservations[0], dict(enumerate(reservations[1:])))
        for schema in schemas:
            self._memory.remember(spec.model, spec.stage, schema)
        log.info(
            "session attached",
            session=session_id,
            label=spec.label,
            pid=spec.pid,
            keys=[schema.name for schema in schemas],
            mib=mib(segments.total_bytes),
        )
        return session

    def _is_alive(self, names: SessionNames) -> bool:
        """Whether the worker holds its lock. One that the daemon does not know (it was restarted) is watched anew."""
        if names.session_id not in self._expected:
            self.expect(names.session_id)
        if self.liveness.holds_lock(names.session_id):
            return True
        if not names.worker_lock.exists():
            self._expected.pop(names.session_id, None)
            self.liveness.forget(names.session_id)
        return False

    def _admit(self, spec: AttachSpec) -> tuple[list[KeySchema], list[Reservation]]:
        """Keys to open and what is set aside: one reservation for the session, then one a key.

        Remembered keys are a convenience: where only they are too much, the session does without.
        """
        asked = {schema.name for schema in spec.keys}
        if len(asked) != len(spec.keys):
            raise Refusal(pb.REASON_SCHEMA_MISMATCH, "the attach names a key twice.", "Name each key once.")
        remembered = self._memory.recall(spec.model, spec.stage) if spec.open_remembered_keys else []
        extra = [schema for schema in remembered if schema.name not in asked][: MAX_KEYS - len(asked)]
        if extra:
            try:
                return self._reserve(spec, [*spec.keys, *extra])
            except Refusal as refusal:
                log.warning("remembered keys are left out", label=spec.label, why=refusal.message)
        return self._reserve(spec, list(spec.keys))

    def _reserve(self, spec: AttachSpec, schemas: list[KeySchema]) -> tuple[list[KeySchema], list[Reservation]]:
        costs = [session_cost(spec.geometry), *(key_cost(spec.geometry, schema) for schema in schemas)]
        return schemas, self.budget.reserve(spec.label, f"attach of {spec.label}", costs)

    async def _allocate(
        self, names: SessionNames, spec: AttachSpec, schemas: list[KeySchema], reservations: list[Reservation]
    ) -> SessionSegments:
        """The segments of a session and its keys, durable in a manifest; or nothing of them."""

        def work() -> SessionSegments:
            sweep.remove_session_files(names.node, names.session_id)
            segments = SessionSegments.create(names, spec.geometry, self.boot_id, progress_of(spec.label))
            try:
                for key_id, schema in enumerate(schemas):
                    segments.open_key(key_id, schema, progress_of(spec.label))
                self._access.open_session(names)
                self._manifests.save(spec.manifest(names.session_id, schemas))
            except BaseException:
                segments.unlink()
                segments.close()
                raise
            return segments

        try:
            return await self.background.in_thread(work)
        except shm.ShmFullError as error:
            for reservation in reservations:
                reservation.release()
            cost = sum((reservation.cost for reservation in reservations), Cost())
            raise self.budget.shm_full(f"attach of {spec.label}", cost) from error
        except NotDurableError as error:
            raise not_durable(f"attach of {spec.label}", error) from error

    def adopt(self, manifest: Manifest, segments: SessionSegments) -> Session:
        """Go on with a session of an earlier daemon: segments mapped and checked, manifest true, worker alive."""
        label, geometry = label_of(manifest.model, manifest.stage, manifest.rank), segments.geometry
        keys = {key_id: key_cost(geometry, store.schema) for key_id, store in segments.keys.items()}
        session = self._start(
            manifest,
            segments,
            self.budget.adopt(label, session_cost(geometry)),
            {key_id: self.budget.adopt(label, cost) for key_id, cost in keys.items()},
            adopted=True,
        )
        self.expect(manifest.session_id)
        self._expected.pop(manifest.session_id)
        return session

    async def pin_adopted(self) -> None:
        """Fault and lock the memory of adopted sessions, beside their consumers: a GiB takes up to a second, so it is
        done behind the start, a few at a time: who attaches meanwhile needs the same threads.
        """
        turns = asyncio.Semaphore(PINNED_AT_ONCE)

        async def pin(session: Session) -> None:
            async with turns:
                if self._sessions.get(session.session_id) is session:
                    with session.in_use():
                        await self.background.in_thread(session.segments.pin)

        await asyncio.gather(*(pin(session) for session in self.all() if session.adopted))

    def _start(
        self,
        manifest: Manifest,
        segments: SessionSegments,
        base: Reservation,
        key_reservations: dict[int, Reservation],
        *,
        adopted: bool = False,
    ) -> Session:
        """A session with its consumer running."""
        session_id, loop = manifest.session_id, asyncio.get_running_loop()
        consumer = self._make_consumer(
            segments,
            lambda reason, message: call_soon(loop, self._session_failed, session_id, reason, message),
            lambda key_id: call_soon(loop, self._key_closed, session_id, key_id),
        )
        session = Session(
            names=segments.names,
            manifest=manifest,
            segments=segments,
            consumer=consumer,
            base=base,
            key_reservations=key_reservations,
            merges=ThreadPoolExecutor(self._merge_threads, thread_name_prefix=f"merge-{session_id[:8]}"),
            adopted=adopted,
        )
        self._sessions[session_id] = session
        self._expected.pop(session_id, None)
        if adopted:
            self.shared.adopt(session)
        consumer.start()
        self.on_event("adopted" if adopted else "attached", session, "")
        return session

    # ---------------------------------------------------------------- endings

    async def end(self, session_id: str, why: str) -> None:
        """End a session and give its memory back. No error where there is none: it may be asked for twice."""
        await asyncio.shield(self._start_end(session_id, why, 0.0))

    def _start_end(self, session_id: str, why: str, drain_s: float) -> asyncio.Task[None]:
        task = self._ending.get(session_id)
        if task is None:
            task = self.background.keep(self._end(session_id, why, drain_s))
            self._ending[session_id] = task
            task.add_done_callback(lambda _: self._ending.pop(session_id, None))
        return task

    async def _end(self, session_id: str, why: str, drain_s: float) -> None:
        """drain_s: longest time to work off what is in the log, in seconds."""
        self.liveness.forget(session_id)
        self._expected.pop(session_id, None)
        attaching = self._attaching.get(session_id)
        if attaching is not None:
            await asyncio.wait([attaching])
        session = self._sessions.pop(session_id, None)
        if session is None:
            sweep.remove_worker_lock(SessionNames(self.node, session_id))
            return
        started = time.monotonic()
        session.move(State.ENDED)
        segments = session.segments

        def remove() -> None:
            session.consumer.stop(drain_s)
            if segments.status == layout.STATUS_LIVE:
                segments.status = layout.STATUS_ENDED
            segments.worker_doorbell.release()
            self._manifests.remove(session_id)
            segments.unlink()
            sweep.remove_worker_lock(session.names)

        async with session.key_lock:
            await self.background.in_thread(remove)
        self.shared.leave(session_id)
        self.hub.session_ended(session_id)
        self.on_event("ended", session, why)
        session.merges.shutdown(wait=False, cancel_futures=True)
        if await session.wait_idle(UNMAP_TIMEOUT_S):
            await self.background.in_thread(segments.close)
        else:
            log.warning("session is still read, its mapping stays", session=session_id)
        session.release_budget()
        took_s = round(time.monotonic() - started, 3)
        log.info("session ended", session=session_id, label=session.label, why=why, took_s=took_s)

    def _worker_died(self, session_id: str, why: str) -> None:
        self._start_end(session_id, f"the worker is dead: {why}", 0.0)

    def _session_failed(self, session_id: str, reason: int, message: str) -> None:
        """The consumer met a bad record: only this session stops; its memory goes with its worker or with Detach."""
        session = self._sessions.get(session_id)
        if session is None or session.state is not State.LIVE:
            return
        session.failure = message
        session.move(State.FAILED)
        self.on_event("failed", session, message)
        self.hub.session_failed(session_id, message)
        log.error("session failed", session=session_id, label=session.label, reason=reason, message=message)

    def _key_closed(self, session_id: str, key_id: int) -> None:
        session = self._sessions.get(session_id)
        if session is not None:
            self._keys.closed(session, key_id)

    async def stop(self, *, keep: bool, drain_s: float) -> None:
        """End all sessions; with ``keep`` only stop working on them, so that the next daemon adopts them."""
        self._draining = True
        self.hub.shutdown("sessions are kept" if keep else "sessions end")
        if self._attaching:
            await asyncio.wait(list(self._attaching.values()), timeout=drain_s)
        if keep:
            stops = [partial(session.consumer.stop, drain_s) for session in self.all()]
            await asyncio.gather(*(self.background.in_thread(stop) for stop in stops))
            self._end_stuck_consumers()
        else:
            for session_id in [*self._sessions, *self._expected]:
                self._start_end(session_id, "the daemon stops", drain_s)
            await asyncio.gather(*self._ending.values())
        self.liveness.close()

    def _end_stuck_consumers(self) -> None:
        """A consumer that is still at work must not go on beside the next daemon's: two on one log corrupt it. The
        locks go with this process, so it ends here, as after a kill.
        """
        stuck = [session.session_id for session in self.all() if session.consumer.alive]
        if stuck:
            log.error("consumers did not stop in time; ending at once", sessions=stuck)
            os._exit(1)

    def _check_not_draining(self) -> None:
        if self._draining:
            raise Refusal(pb.REASON_SHUTTING_DOWN, "the daemon is stopping.", "Try again when it is back.")
