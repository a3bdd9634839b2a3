"""Which figure of a session goes into which series: two tables, one for sessions and one for keys.

A line is one series a session (or key). Lines of one family stand together, in the order of the catalog.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from stagecache_wire import figures
from stagecache_wire.figures import (
    BUCKETS,
    FAILED_MERGES,
    FAILED_WRITES,
    KINDS,
    PATHS,
    PHASES,
    REFUSED_SAVES,
    WAITS,
    Daemon,
    Worker,
)
from stagecached.metrics.catalog import (
    KEY_PATHS,
    METRICS,
    PRESENCES,
    PURPOSES,
    SHARED_BLOCKS,
    STEP_BOUNDS_S,
    Metric,
)
from stagecached.metrics.fold import KeyFold, SessionFold

Folded = TypeVar("Folded", SessionFold, KeyFold)

BOUND_NAMES: Final = (*(f"{bound:g}" for bound in STEP_BOUNDS_S), "+Inf")


@dataclass(frozen=True)
class Line(Generic[Folded]):
    """labels: values behind those that name the session or key. total: it only grows while a session lives."""

    metric: Metric
    suffix: str
    labels: tuple[str, ...]
    total: bool
    read: Callable[[Folded], float]


class _Sheet(Generic[Folded]):
    """Collects lines; the catalog's kind says whether one is a total."""

    def __init__(self) -> None:
        self.lines: list[Line[Folded]] = []

    def add(self, name: str, read: Callable[[Folded], float], *labels: str, suffix: str = "") -> None:
        metric = METRICS[name]
        self.lines.append(Line(metric, suffix, labels, metric.kind != "gauge", read))

    def add_each(self, name: str, values: Sequence[str], read: Callable[[int], Callable[[Folded], float]]) -> None:
        """A line for each value of the last label; read(i) makes the reader of the i-th."""
        for index, value in enumerate(values):
            self.add(name, read(index), value)


def _worker(index: int, scale: float = 1) -> Callable[[SessionFold], float]:
    if scale == 1:
        return lambda fold: fold.worker[index]
    return lambda fold: fold.worker[index] * scale


def _daemon(index: int, scale: float = 1) -> Callable[[SessionFold], float]:
    if scale == 1:
        return lambda fold: fold.daemon[index]
    return lambda fold: fold.daemon[index] * scale


_NS: Final = 1e-9


def _gauges(sheet: _Sheet[SessionFold]) -> None:
    add = sheet.add
    add("stagecache_session_live", lambda fold: int(fold.live))
    add("stagecache_worker_away", _worker(Worker.AWAY))
    add("stagecache_worker_idle_seconds", lambda fold: fold.idle_s)
    add("stagecache_epoch", lambda fold: fold.epoch)
    add("stagecache_slots", lambda fold: fold.slots)
    add("stagecache_staging_pages", lambda fold: fold.depth)
    add("stagecache_unconsumed_steps", _worker(Worker.UNCONSUMED_STEPS))
    add("stagecache_log_depth", lambda fold: fold.waiting)
    add("stagecache_log_oldest_seconds", lambda fold: fold.oldest_s)
    for purpose in PURPOSES:
        add("stagecache_memory_bytes", lambda fold, purpose=purpose: getattr(fold.memory, purpose), purpose)  # type: ignore[misc]
    add("stagecache_arena_bytes", lambda fold: fold.arena_bytes)
    add("stagecache_arena_used_bytes", _worker(Worker.ARENA_USED_BYTES))
    add("stagecache_arena_leased_bytes", _worker(Worker.ARENA_LEASED_BYTES))
    add("stagecache_leases", _worker(Worker.LEASES))
    add("stagecache_oldest_lease_seconds", lambda fold: fold.lease_s)
    add("stagecache_deferred_bytes", _worker(Worker.DEFERRED_BYTES))
    add("stagecache_copy_memory_bytes", _worker(Worker.PINNED_BYTES), "pinned")
    add("stagecache_copy_memory_bytes", _worker(Worker.UNPINNED_BYTES), "unpinned")
    add("stagecache_survey_age_seconds", _survey_age)


def _survey_age(fold: SessionFold) -> float:
    return max((key.presence.age_s or 0.0 for key in fold.keys), default=0.0)


def _work(sheet: _Sheet[SessionFold]) -> None:
    add = sheet.add
    add("stagecache_steps_total", _worker(Worker.STEPS))
    add("stagecache_steps_consumed_total", _worker(Worker.MATERIALIZED), "materialized")
    add("stagecache_steps_consumed_total", _worker(Worker.DISCARDED), "discarded")
    add("stagecache_lost_steps_total", _worker(Worker.LOST_STEPS))
    add("stagecache_local_steps_total", _worker(Worker.LOCAL_STEPS))
    add("stagecache_hit_requests_total", _worker(Worker.HIT_REQUESTS))
    add("stagecache_hit_tokens_total", _worker(Worker.HIT_TOKENS))
    add("stagecache_prefill_tokens_total", _worker(Worker.PREFILL_TOKENS))
    add("stagecache_computed_tokens_total", _worker(Worker.COMPUTED_TOKENS))
    add(
        "stagecache_queried_tokens_total",
        lambda fold: fold.worker[Worker.HIT_TOKENS] + fold.worker[Worker.PREFILL_TOKENS],
    )
    for unit, at in (("rows", 0), ("bytes", 1)):
        name = f"stagecache_{unit}_total"
        add(name, _worker(Worker.PATHS + at), "staged")
        add(name, _daemon((Daemon.SCATTERED_ROWS, Daemon.SCATTERED_BYTES)[at]), "scattered")
        add(name, _daemon((Daemon.GATHERED_ROWS, Daemon.GATHERED_BYTES)[at]), "gathered")
        for index, path in enumerate(PATHS[1:], 1):
            add(name, _worker(Worker.PATHS + 2 * index + at), path)
    for index, phase in enumerate(PHASES):
        _histogram(sheet, "stagecache_engine_phase_seconds", "worker", Worker.PHASE_BUCKETS + index * BUCKETS,
                   Worker.PHASE_NS + index, phase)  # fmt: skip
    sheet.add_each("stagecache_waits_total", WAITS, lambda i: _worker(Worker.WAITS + 2 * i))
    sheet.add_each("stagecache_wait_seconds_total", WAITS, lambda i: _worker(Worker.WAITS + 2 * i + 1, _NS))
    sheet.add_each("stagecache_records_total", KINDS, lambda i: _daemon(Daemon.KIND_RECORDS + i))
    for name, at in (
        ("stagecache_record_lag_seconds", Daemon.LAG),
        ("stagecache_scatter_seconds", Daemon.SCATTER),
        ("stagecache_gather_seconds", Daemon.GATHER),
    ):
        _histogram(sheet, name, "daemon", at, at + BUCKETS)
    add("stagecache_consumer_seconds_total", _daemon(Daemon.BUSY_NS, _NS))
    add("stagecache_gathered_spans_total", _daemon(Daemon.SPANS))
    add("stagecache_gathered_span_tokens_total", _daemon(Daemon.SPAN_ROWS))
    for outcome in SHARED_BLOCKS:
        add("stagecache_shared_blocks_total", _shared(outcome), outcome)


def _shared(outcome: str) -> Callable[[SessionFold], float]:
    """What a session's log came to; ``not_kept`` are those whose rows, or whose session's namespace, changed."""
    names = ("changed", "not_joined") if outcome == "not_kept" else (outcome,)
    words = [Daemon.SHARED + figures.SHARED_BLOCKS.index(name) for name in names]
    return lambda fold: sum(fold.daemon[word] for word in words)


def _trouble(sheet: _Sheet[SessionFold]) -> None:
    for name, at, reasons in (
        ("stagecache_refused_saves_total", Worker.REFUSED_SAVES, REFUSED_SAVES),
        ("stagecache_failed_merges_total", Worker.FAILED_MERGES, FAILED_MERGES),
        ("stagecache_failed_writes_total", Worker.FAILED_WRITES, FAILED_WRITES),
    ):
        sheet.add_each(name, reasons, lambda i, at=at: _worker(at + i))  # type: ignore[misc]
    sheet.add("stagecache_unknown_rows_total", _daemon(Daemon.UNKNOWN_ROWS))
    sheet.add("stagecache_copied_merges_total", _worker(Worker.COPIED_EXTENTS))
    sheet.add("stagecache_spilled_merges_total", _worker(Worker.SPILLED))
    sheet.add("stagecache_resets_total", _worker(Worker.RESETS))
    sheet.add("stagecache_reconnects_total", _worker(Worker.RECONNECTS))
    sheet.add("stagecache_worker_calls_total", _worker(Worker.CALLS))


def _histogram(sheet: _Sheet[SessionFold], name: str, side: str, first: int, total: int, *labels: str) -> None:
    """Lines of a histogram; ``first``: word of its first bucket, ``total``: word of its sum in nanoseconds."""
    for index, bound in enumerate(BOUND_NAMES):
        end = first + index + 1
        sheet.add(name, lambda fold, end=end: sum(getattr(fold, side)[first:end]), *labels, bound, suffix="_bucket")  # type: ignore[misc]
    sheet.add(name, lambda fold: getattr(fold, side)[total] * _NS, *labels, suffix="_sum")
    sheet.add(name, lambda fold: sum(getattr(fold, side)[first : first + BUCKETS]), *labels, suffix="_count")


def _keys(sheet: _Sheet[KeyFold]) -> None:
    for presence in PRESENCES:
        sheet.add("stagecache_key_slots", lambda key, presence=presence: getattr(key.presence, presence), presence)  # type: ignore[misc]
    for path in KEY_PATHS:
        sheet.add("stagecache_key_rows_total", lambda key, path=path: getattr(key, path), path)  # type: ignore[misc]
    for path in KEY_PATHS:
        sheet.add("stagecache_key_bytes_total", lambda key, path=path: getattr(key, path) * key.row_bytes, path)  # type: ignore[misc]
    sheet.add("stagecache_key_pool_bytes", lambda key: key.pool_bytes)
    sheet.add("stagecache_key_staging_bytes", lambda key: key.staging_bytes)
    sheet.add("stagecache_key_row_bytes", lambda key: key.row_bytes)
    sheet.add("stagecache_key_locked", lambda key: int(key.locked))


def _session_lines() -> tuple[Line[SessionFold], ...]:
    sheet: _Sheet[SessionFold] = _Sheet()
    for fill in (_gauges, _work, _trouble):
        fill(sheet)
    return tuple(sheet.lines)


def _key_lines() -> tuple[Line[KeyFold], ...]:
    sheet: _Sheet[KeyFold] = _Sheet()
    _keys(sheet)
    return tuple(sheet.lines)


SESSION_LINES: Final = _session_lines()
KEY_LINES: Final = _key_lines()


def slices(lines: Sequence[Line[Folded]]) -> dict[str, slice]:
    """Where each family stands in a table."""
    found: dict[str, slice] = {}
    for index, line in enumerate(lines):
        name = line.metric.name
        found[name] = slice(found[name].start if name in found else index, index + 1)
    return found
