"""What a worker tells the daemon's metrics: its figures, as plain words of the control segment.

They gather in an array of this process and reach shared memory by one copy of under 1 KiB, at the end of each save and
of each materialize. No call is made and nothing is waited for. A plain decode step writes only what it changed and pays
about a microsecond; the rest follows when something happened that it may tell of, and every ``FULL_NS`` anyway.
"""

from __future__ import annotations

import struct
import threading
import time
from array import array
from bisect import bisect_left
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

import torch

from stagecache import errors
from stagecache_wire import figures, layout

if TYPE_CHECKING:
    from stagecache.arena import Arena
    from stagecache.counters import Counters
    from stagecache.deferred import DeferredRows
    from stagecache.hits import Hit, HitReader
    from stagecache.mapping import StagedKey
    from stagecache.merge import SavedStep
    from stagecache.pins import Pins
    from stagecache.session import Session

FULL_NS: Final = 50_000_000

_W = figures.Worker
_BOUNDS: Final = figures.BOUNDS_NS
_BEGIN: Final = int(_W.PHASE_BUCKETS)
_SAVE: Final = _BEGIN + figures.BUCKETS
_MATERIALIZE: Final = _SAVE + figures.BUCKETS
_STEPS: Final = int(_W.STEPS)
_COMPUTED: Final = int(_W.COMPUTED_TOKENS)
_PREFILL: Final = int(_W.PREFILL_TOKENS)
_BEGIN_NS: Final = int(_W.PHASE_NS)
_SAVE_NS: Final = _BEGIN_NS + 1
_EXPORTED_AT: Final = int(_W.EXPORTED_AT)
_UNCONSUMED: Final = int(_W.UNCONSUMED_STEPS)
_MATERIALIZED: Final = int(_W.MATERIALIZED)
_MATERIALIZE_NS: Final = int(_W.PHASE_NS) + figures.PHASES.index("materialize")
_NOW_AT: Final = 8 * _W.AWAY
_ARENA_AT: Final = 8 * _W.ARENA_USED_BYTES
_STAGED: Final = int(_W.PATHS)
_CLONED, _FLUSHED, _MERGED, _PRESERVED, _LEFTOVER = (
    _STAGED + 2 * figures.PATHS.index(path) for path in ("cloned", "flushed", "merged", "preserved", "leftover")
)
_FLUSH_FAILED, _SCHEMA_FAILED, _UNOPENED = (
    int(_W.FAILED_WRITES) + figures.FAILED_WRITES.index(reason) for reason in ("flush", "schema", "unopened")
)
_TOTALS: Final = struct.Struct(f"{_W.PHASE_NS + len(figures.PHASES)}Q")
_NOW: Final = struct.Struct("3Q")
_ARENA: Final = struct.Struct("4Q")
_WAITS: Final = struct.Struct(f"{2 * len(figures.WAITS)}Q")

_REASON_OF: Final[tuple[tuple[type[BaseException], str], ...]] = (
    (errors.StepTooLargeError, "too_large"),
    (errors.SlotMismatchError, "slot_mismatch"),
    (errors.StagingTimeoutError, "staging_timeout"),
    (errors.UnreadableHitError, "unreadable"),
    (errors.SchemaMismatchError, "schema_mismatch"),
    (errors.CallDeadlineError, "deadline"),
    (errors.DaemonLostError, "daemon_lost"),
    (errors.SessionFailedError, "session_failed"),
)


class Exporter:
    """Figures of one cache. ``saved`` and ``refused`` on the engine thread, the others where a step is consumed."""

    def __init__(
        self,
        session: Session,
        counters: Counters,
        arena: Arena,
        deferred: DeferredRows,
        hits: HitReader,
        lock: threading.Lock,
        pins: Pins | None = None,
    ) -> None:
        """lock: the cache's, which guards the arena's tables. pins: None where outputs are in host memory."""
        words = session.control.words
        self._session = session
        self._counters = counters
        self._arena = arena
        self._deferred = deferred
        self._hits = hits
        self._lock = lock
        self._pins = pins
        self._values = array("Q", bytes(8 * figures.WORKER_WORDS))
        self._source = memoryview(self._values)
        self._target = words[layout.W_FIGURES : layout.W_FIGURES + figures.WORKER_WORDS]
        spent = counters.phase_ns  # not none, where the cache had another session before
        self._begin_ns, self._save_ns, self._materialize_ns = spent["begin"], spent["save"], spent["materialize"]
        self._waits_seen = 0
        self._full_at = 0
        self._staged: list[StagedKey] = []
        self._staged_bytes = 0
        self._target[:] = self._source

    def saved(self, step: SavedStep, unconsumed: int) -> None:
        """A save gave a step id. unconsumed: steps that neither materialize nor discard has consumed."""
        values, counters, batch, staged = self._values, self._counters, step.batch, step.staged
        tokens, phases = batch.tokens, counters.phase_ns
        if batch.counts is not None:
            values[_PREFILL] += tokens - batch.counts.count(1)
        if staged != self._staged:
            self._staged, self._staged_bytes = staged, sum(key.row_bytes for key in staged)
        values[_STAGED] += tokens * len(staged)
        values[_STAGED + 1] += tokens * self._staged_bytes
        begin, save = phases["begin"], phases["save"]
        values[_BEGIN + bisect_left(_BOUNDS, begin - self._begin_ns)] += 1
        values[_SAVE + bisect_left(_BOUNDS, save - self._save_ns)] += 1
        self._begin_ns = values[_BEGIN_NS] = begin
        self._save_ns = values[_SAVE_NS] = save
        if step.leftover or step.failed:
            self._saved_more(step)
        if step.hits:  # Its figures are written when it is materialized or discarded.
            return
        now, session = time.monotonic_ns(), self._session
        if (
            now - self._full_at > FULL_NS
            or step.local
            or step.leftover
            or step.failed
            or session.away
            or session.waits_total != self._waits_seen
            or self._arena.released
        ):
            self._publish(unconsumed)
            return
        values[_STEPS] = counters.steps
        values[_COMPUTED] = counters.computed_rows
        values[_EXPORTED_AT] = now
        values[_UNCONSUMED] = unconsumed
        self._target[:] = self._source

    def _saved_more(self, step: SavedStep) -> None:
        """What few steps have."""
        values = self._values
        if step.leftover:
            values[_LEFTOVER] += len(step.leftover)
            values[_LEFTOVER + 1] += _nbytes(step.leftover.values())
        if step.failed:
            values[_SCHEMA_FAILED] += len(step.failed)

    def refused(self, error: BaseException, unconsumed: int) -> None:
        """A save raised."""
        self._values[_W.REFUSED_SAVES + _reason(error, figures.REFUSED_SAVES)] += 1
        self._publish(unconsumed)

    def handed_out(self, step: SavedStep, req_ids: list[str], unconsumed: int, newest: int) -> None:
        """A materialize gave rows to ``req_ids``. newest: id of the newest step saved."""
        values, counters = self._values, self._counters
        if step.hits:
            self._merged(step, req_ids, _PRESERVED if newest > step.step_id else _MERGED)
        spent = counters.phase_ns["materialize"]
        values[_MATERIALIZE + bisect_left(_BOUNDS, spent - self._materialize_ns)] += 1
        self._materialize_ns = spent
        values[_MATERIALIZED] = counters.materialized
        values[_MATERIALIZE_NS] = spent
        if step.hits:
            self._publish(unconsumed)
        else:
            values[_UNCONSUMED] = unconsumed
            self._target[:] = self._source

    def failed(self, error: BaseException, unconsumed: int) -> None:
        """A materialize raised after it consumed its step."""
        self._values[_W.FAILED_MERGES + _reason(error, figures.FAILED_MERGES)] += 1
        self._publish(unconsumed)

    def refresh(self, unconsumed: int) -> None:
        """Something else happened: a discard, a reset, an outage."""
        self._publish(unconsumed)

    def _merged(self, step: SavedStep, req_ids: Iterable[str], path: int) -> None:
        rows = size = 0
        for req_id in req_ids:
            hit: Hit | None = step.hits.get(req_id)
            if hit is not None:
                for gather in hit.gathers.values():
                    rows += hit.high - hit.low
                    size += (hit.high - hit.low) * gather.key.row_bytes
        self._values[path] += rows
        self._values[path + 1] += size

    def _publish(self, unconsumed: int) -> None:
        values, counters, session, source = self._values, self._counters, self._session, self._source
        phases = counters.phase_ns
        _TOTALS.pack_into(
            source,
            0,
            counters.steps,
            counters.computed_rows,
            values[_PREFILL],
            counters.hits,
            counters.hit_rows,
            counters.materialized,
            counters.discarded,
            counters.lost_steps,
            counters.local_steps,
            counters.resets,
            session.watcher.reconnects,
            session.rpc.calls,
            counters.copied_extents,
            self._hits.spilled,
            phases["begin"],
            phases["save"],
            phases["materialize"],
        )
        self._full_at = now = time.monotonic_ns()
        _NOW.pack_into(source, _NOW_AT, session.away, now, unconsumed)
        if counters.hits:
            self._note_arena()
        if session.waits_total != self._waits_seen:
            self._waits_seen = session.waits_total
            _WAITS.pack_into(source, 8 * _W.WAITS, *session.waits)
        deferred = self._deferred
        if deferred.cloned_rows:
            values[_CLONED], values[_CLONED + 1] = deferred.cloned_rows, deferred.cloned_bytes
            values[_FLUSHED], values[_FLUSHED + 1] = deferred.flushed_rows, deferred.flushed_bytes
            values[_FLUSH_FAILED] = deferred.failed_flushes
            values[_W.DEFERRED_BYTES] = deferred.used_bytes
        if self._pins is not None:
            values[_W.PINNED_BYTES], values[_W.UNPINNED_BYTES] = self._pins.pinned_bytes, self._pins.unpinned_bytes
        if counters.unopened:
            values[_UNOPENED] = counters.unopened
        self._target[:] = source

    def _note_arena(self) -> None:
        arena = self._arena
        if arena.released:
            with self._lock:
                arena.collect()
        _ARENA.pack_into(self._source, _ARENA_AT, arena.used_bytes, arena.leased_bytes, *arena.oldest_lease())


def _reason(error: BaseException, closed: tuple[str, ...]) -> int:
    """Index of an error's reason in a closed set; the last one takes what has no word of its own."""
    for kind, name in _REASON_OF:
        if isinstance(error, kind) and name in closed:
            return closed.index(name)
    return len(closed) - 1


def _nbytes(values: Iterable[Any]) -> int:
    """Bytes of the tensors in a snapshot, containers included."""
    total = 0
    for value in values:
        if isinstance(value, torch.Tensor):
            total += value.numel() * value.element_size()
        elif isinstance(value, dict):
            total += _nbytes(value.values())
        elif isinstance(value, (list, tuple)):
            total += _nbytes(value)
    return total
