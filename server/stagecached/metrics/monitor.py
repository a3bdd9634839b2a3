"""All figures of one daemon: what is counted as it happens, and the snapshot that somebody asks for.

On the event loop, but for ``exposition`` and what is done in a thread for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, Protocol

import structlog

from stagecache_wire.v1 import stagecache_pb2 as pb
from stagecached.metrics.calls import CallFigures, CallTimer
from stagecached.metrics.catalog import SESSION_EVENTS
from stagecached.metrics.families import Snapshot, families
from stagecached.metrics.fold import SessionFold, fold_session
from stagecached.metrics.history import History
from stagecached.metrics.journal import Journal
from stagecached.metrics.process import add_process, process_families
from stagecached.metrics.pulse import Pulse
from stagecached.metrics.survey import BUDGET_S, Survey
from stagecached.metrics.text import TextWriter
from stagecached.metrics.totals import Replicas, Totals
from stagecached.session import Session, State
from stagecached.sessions import SessionManager

TICK_S: Final = 1.0

_ENDS: Final = (("its worker detached", "detached"), ("the worker is dead", "worker_dead"))
"""How the manager's reasons begin; a stop is the only other, and nobody sees figures after it."""
_REFUSED_QUIETLY: Final = frozenset({"DEADLINE", "UNKNOWN_SESSION", "SHUTTING_DOWN"})
"""Refusals that a healthy worker meets: counted, but nobody has to do something."""

log = structlog.get_logger()


class IndexFigures(Protocol):
    """What the store of shared blocks must tell. Called where a snapshot is made."""

    def samples(self) -> Iterable[tuple[str, tuple[str, ...], float]]:
        """(metric, label values in the catalog's order, value) of every sample of ``catalog.INDEX_METRICS``."""
        ...

    def state(self) -> dict[str, Any]:
        """The same for people, as JSON values."""
        ...


class Monitor:
    """Counts, remembers, and folds. ``index``: set by a daemon that keeps shared blocks."""

    def __init__(self, manager: SessionManager, journal: Journal, clock: Callable[[], float] = time.monotonic) -> None:
        self.journal = journal
        self.calls = CallFigures()
        self.pulse = Pulse()
        self.history = History()
        self.totals = Totals()
        self.index: IndexFigures | None = None
        self.started_unix_s = time.time()
        self.folds: list[SessionFold] = []
        """Every session as of the last tick."""
        self.on_tick: list[Callable[[], None]] = []
        self._manager = manager
        self._clock = clock
        self._replicas = Replicas()
        self._survey = Survey()
        self._events = dict.fromkeys(SESSION_EVENTS, 0)
        self._writer = TextWriter()
        self._fold_s = 0.0
        self._tasks: list[asyncio.Task[None]] = []
        self._surveying = asyncio.Lock()
        manager.on_event = self.session_event

    def call_timer(self) -> CallTimer:
        """Times calls and counts refusals; stands before all else."""
        return CallTimer(self.calls, self._refused)

    def start(self) -> None:
        loop = asyncio.get_running_loop()
        self.pulse.watch_gc()
        self._tasks = [loop.create_task(self.pulse.beat()), loop.create_task(self._tick_on())]

    def stop(self) -> None:
        self.pulse.unwatch_gc()
        for task in self._tasks:
            task.cancel()

    # ---------------------------------------------------------------- what happens

    def session_event(self, event: str, session: Session, why: str) -> None:
        """See ``sessions.SessionEvent``. What fails in here is no reason to fail a session."""
        try:
            self._note_event(event, session, why)
        except Exception:
            log.exception("an event of a session was not counted", session=session.session_id)

    def _note_event(self, event: str, session: Session, why: str) -> None:
        stage = session.manifest.stage
        replica = self._replicas.name(session.session_id, stage)
        if event == "ended":
            event = next((name for start, name in _ENDS if why.startswith(start)), event)
            self.totals.keep(fold_session(session, replica, time.monotonic_ns()))
            self._replicas.drop(session.session_id)
        elif event == "failed":
            cure = "The worker attaches anew by itself; report it with this daemon's log."
            self.journal.add("session failed", why, cure, where=f"{stage} #{replica}")
        if event in self._events:
            self._events[event] += 1

    def _refused(self, method: str, error: pb.Error) -> None:
        reason = pb.Reason.Name(error.reason).removeprefix("REASON_")
        if reason not in _REFUSED_QUIETLY:
            name = reason.lower().replace("_", " ")
            self.journal.add(f"{method} refused: {name}", error.message, error.remedy, level="warning")

    async def _tick_on(self) -> None:
        while True:
            try:
                self.tick()
            except Exception:
                log.exception("figures could not be taken")
            await asyncio.sleep(TICK_S)

    def tick(self) -> None:
        """Take a point of every session, and tell who listens."""
        self.folds = self.fold()
        self.history.note(self.folds, self._clock())
        self.journal.notice(self.folds)
        for listener in list(self.on_tick):
            listener()

    # ---------------------------------------------------------------- what is told

    def fold(self) -> list[SessionFold]:
        """Every session now, by stage and replica."""
        now_ns = time.monotonic_ns()
        found = [
            fold_session(session, self._replicas.name(session.session_id, session.manifest.stage), now_ns)
            for session in sorted(self._manager.all(), key=_age)
            if session.state is not State.ENDED
        ]
        found.sort(key=lambda fold: (fold.stage, int(fold.replica)))
        return found

    async def surveyed(self, budget_s: float) -> list[SessionFold]:
        """Every session now, with presence counts as far as ``budget_s`` seconds allow."""
        async with self._surveying:
            with self.sessions_in_use():
                folds = self.fold()
                await self._manager.background.in_thread(lambda: self._look(folds, budget_s))
            return folds

    def _look(self, folds: list[SessionFold], budget_s: float) -> None:
        """Fill in presence counts. In a thread, with the sessions in use."""
        by_id = {session.session_id: session for session in self._manager.all()}
        self._survey.look([(by_id[fold.session_id], fold) for fold in folds if fold.session_id in by_id], budget_s)

    @contextlib.contextmanager
    def sessions_in_use(self) -> Iterator[None]:
        """While inside, no session is unmapped."""
        with contextlib.ExitStack() as held:
            for session in self._manager.all():
                held.enter_context(session.in_use())
            yield

    def snapshot(self, folds: list[SessionFold]) -> Snapshot:
        """Every figure but presence counts."""
        shot = Snapshot(sessions=folds, totals=self.totals.copy())
        add_process(shot, self.started_unix_s)
        budget = self._manager.budget
        shot.gauge("stagecache_budget_bytes", budget.limit_bytes)
        shot.gauge("stagecache_budget_used_bytes", budget.used_bytes)
        live = sum(fold.live for fold in folds)
        shot.gauge("stagecache_sessions", live, "live")
        shot.gauge("stagecache_sessions", len(folds) - live, "failed")
        shot.gauge("stagecache_schedulers", self._manager.hub.schedulers())
        for event, count in self._events.items():
            shot.gauge("stagecache_session_events_total", count, event)
        for method, seconds in self.calls.seconds.items():
            shot.histogram("stagecache_rpc_seconds", seconds, method)
        for reason, count in self.calls.refused.items():
            shot.gauge("stagecache_rpc_refused_total", count, reason)
        shot.histogram("stagecache_loop_lag_seconds", self.pulse.loop_lag)
        for generation, pauses in self.pulse.gc_pauses.items():
            shot.histogram("stagecache_gc_pause_seconds", pauses, generation)
        for level, count in self.journal.lines.items():
            shot.gauge("stagecache_log_lines_total", count, level)
        shot.gauge("stagecache_fold_seconds", self._fold_s)
        if self.index is not None:
            for name, labels, value in self.index.samples():
                shot.gauge(name, value, *labels)
        return shot

    async def exposition(self) -> str:
        """What a scrape gets."""
        async with self._surveying:
            begun = time.perf_counter()
            with self.sessions_in_use():
                shot = self.snapshot(self.fold())
                text = await self._manager.background.in_thread(lambda: self._write(shot))
            self._fold_s = time.perf_counter() - begun
            return text

    def _write(self, shot: Snapshot) -> str:
        self._look(shot.sessions, BUDGET_S)
        return self._writer.write(families(shot)) + process_families()


def _age(session: Session) -> float:
    return session.manifest.attached_unix_s
