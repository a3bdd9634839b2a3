"""Steps that the daemon did not get, and the new epochs that follow from them (R5, W8).

A step that was scheduled published its blocks' hashes, whatever becomes of its rows. Its slots are logged LOST; where
even that cannot be logged, a new epoch begins before anything else is, so that no older tenant's row is ever read.
"""

from __future__ import annotations

from stagecache.counters import Counters
from stagecache.deferred import DeferredRows
from stagecache.engine_resets import EngineResets
from stagecache.errors import StageCacheError
from stagecache.reset_causes import NOT_LOGGED, ROWS_LOST
from stagecache.session import Session
from stagecache.slots import Runs, count_slots
from stagecache_wire.records import NO_PAGE, SAME_MODEL, Kind, Record


class Epochs:
    """Lost steps and resets of one session. Engine thread only.

    unlogged: something happened that the log does not know; the next record must be a RESET.
    model_may_differ: since the last RESET something happened after which the model may compute other rows; then what
        replicas share is not this session's any more.

    Where a scheduler-side shim is there, the engine is asked to forget its hashes after each loss.
    """

    def __init__(self, session: Session, deferred: DeferredRows, counters: Counters) -> None:
        self.unlogged = False
        self.model_may_differ = False
        self.model_resets = 0
        """RESETs that said so."""
        self._engine_epoch: int | None = None
        self._engine_model = 0
        self._anew = ""
        self._session = session
        self._resets = EngineResets(session.rpc, session.stage)
        self._deferred = deferred
        self._counters = counters

    def follow_on(self, old: Epochs) -> None:
        """What the engine said of its epoch and model is known from the session before."""
        self._engine_epoch, self._engine_model = old._engine_epoch, old._engine_model

    def begin_anew(self, epoch: int, cause: str) -> None:
        """The session is new, and the engine has published hashes of rows that it never got: the next step begins an
        epoch above ``epoch``, and the engine is asked to forget them.
        """
        self._session.epoch = max(self._session.epoch, epoch)
        self._anew = cause
        self.unlogged = True

    def lose(self, runs: Runs) -> None:
        """Make the slots of a step UNKNOWN for every key, by a record without rows (W8)."""
        if not len(runs):
            return
        try:
            self._session.append(Record(0, Kind.LOST, rows=count_slots(runs), unit_runs=runs.ndim == 1, runs=runs))
        except StageCacheError:
            self.unlogged = True
        self.lost()

    def lost(self) -> None:
        """A step's slots are UNKNOWN, as the log says already, or as the next epoch will."""
        self._counters.lost_steps += 1
        self._ask_engine(ROWS_LOST)

    def follow(self, engine_epoch: int | None, engine_model: int | None = None) -> None:
        """Begin a new epoch before anything else of a step is logged, where one is due: the engine forgot its prefix
        cache, steps were not logged during an outage that is over, or an operator insists.

        engine_epoch: what the scheduler-side shim put on the scheduler output; None where there is none. engine_model:
        likewise; another number than before says that the model may be another one.
        """
        session = self._session
        if engine_epoch is not None:
            if engine_epoch > (self._engine_epoch or 0):
                self.unlogged = True
                if engine_model is None or engine_model != self._engine_model:
                    self.model_may_differ = True
            self._engine_epoch = engine_epoch
            self._engine_model = engine_model or 0
        if session.watcher.reset_cause is not None:
            session.watcher.reset_cause = None
            self.unlogged = self.model_may_differ = True
        if session.away and session.returned() and self.unlogged:
            self._ask_engine(NOT_LOGGED)
        if self._anew:
            self._ask_engine(self._anew)
            self._anew = ""
        if self.unlogged and not session.away:
            self.reset()

    def _ask_engine(self, cause: str) -> None:
        if self._engine_epoch is not None and not self._session.away:
            self._resets.ask(cause)

    def reset(self) -> int:
        """Begin a new epoch: nothing saved before is readable after (R5). Returns the epoch."""
        self.unlogged = True  # Until it is logged, whatever interrupts it.
        self._deferred.drop_all()
        try:
            model = NO_PAGE if self.model_may_differ else SAME_MODEL
            self._session.append(Record(0, Kind.RESET, page=model, rows=self._session.epoch + 1))
        except StageCacheError:
            self.unlogged = True
            return self._session.epoch
        self.model_resets += self.model_may_differ
        self.unlogged = self.model_may_differ = False
        self._session.epoch += 1
        self._counters.resets += 1
        return self._session.epoch
