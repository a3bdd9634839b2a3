"""Figures that both sides export through the control segment, for metrics: which word holds what.

The worker exports a block of u64 words (``layout.W_FIGURES``), the daemon another (``layout.D_FIGURES``). Totals only
grow, for the life of a session. Nobody decides anything by them, so they need no barrier: a scrape may see a step in
some words and not yet in others.
"""

from __future__ import annotations

from bisect import bisect_left
from enum import IntEnum
from typing import Final

BOUNDS_NS: Final = tuple(
    microseconds * 1000
    for microseconds in (5, 10, 25, 50, 100, 250, 500, 1000, 2500, 5000, 10000, 25000, 50000, 100000, 1000000)
)
"""Upper bounds of all histograms here, in nanoseconds; one more bucket takes the rest."""

BUCKETS: Final = len(BOUNDS_NS) + 1

REFUSED_SAVES: Final = ("too_large", "slot_mismatch", "staging_timeout", "daemon_lost", "session_failed", "other")
"""Why a save gave no step id."""

FAILED_MERGES: Final = ("unreadable", "schema_mismatch", "daemon_lost", "session_failed", "deadline", "other")
"""Why a materialize raised."""

FAILED_WRITES: Final = ("flush", "schema", "unopened")
"""Why rows of a key were not kept: a flush that failed (W5), a refused tensor (K3), a key that could not be opened."""

WAITS: Final = ("page", "log", "hit", "flush")
"""What a worker's thread waits for: a staging page, room in the log, a hit's rows, a page of a deferred key."""

PATHS: Final = ("staged", "cloned", "flushed", "merged", "preserved", "leftover")
"""Ways of rows through a worker: into a page; into a device clone; from clones into a page; handed out from a hit;
handed out from a hit after a newer step was saved; outputs that are no rows (values instead of rows)."""

PHASES: Final = ("begin", "save", "materialize")
"""Calls of a step."""

KINDS: Final = ("begin", "save", "lost", "flush", "fail", "reset", "close_key", "publish", "fill")
"""Kinds of records, as ``records.Kind`` counts them from 1."""

SHARED_BLOCKS: Final = (
    "stored", "known", "not_present", "no_room", "changed", "not_joined", "filled", "missing",
)  # fmt: skip
"""What became of the blocks of PUBLISH records (as ``pb.PublishState`` counts them from 1) and of FILL records (filled;
made UNKNOWN)."""


class Worker(IntEnum):
    """Words of the worker's block. Ranges run as the tuples above; times are nanoseconds."""

    STEPS = 0
    COMPUTED_TOKENS = 1
    PREFILL_TOKENS = 2
    """Computed tokens but those of requests that had one token in the step."""
    HIT_REQUESTS = 3
    HIT_TOKENS = 4
    MATERIALIZED = 5
    DISCARDED = 6
    LOST_STEPS = 7
    LOCAL_STEPS = 8
    RESETS = 9
    RECONNECTS = 10
    CALLS = 11
    COPIED_EXTENTS = 12
    SPILLED = 13
    PHASE_NS = 14
    PATHS = 17
    """A pair (rows, bytes) for each of ``PATHS``."""
    WAITS = 29
    """A pair (count, ns) for each of ``WAITS``."""
    REFUSED_SAVES = 37
    FAILED_MERGES = 43
    FAILED_WRITES = 49
    AWAY = 52
    """From here on values of now, not totals: 1 while the worker takes the daemon for gone."""
    EXPORTED_AT = 53
    """time.monotonic_ns() of the last save or materialize."""
    UNCONSUMED_STEPS = 54
    DEFERRED_BYTES = 55
    ARENA_USED_BYTES = 56
    ARENA_LEASED_BYTES = 57
    LEASES = 58
    OLDEST_LEASE_AT = 59
    """time.monotonic_ns() at which the oldest lease began; 0 where there is none."""
    PINNED_BYTES = 60
    """Host memory that the worker pinned for copies from its device: staging pages, arena, its own."""
    UNPINNED_BYTES = 61
    """The same that could not be pinned; both 0 where outputs are in host memory."""
    PHASE_BUCKETS = 64
    """``BUCKETS`` words for each of ``PHASES``: steps by their nanoseconds."""


WORKER_WORDS: Final = Worker.PHASE_BUCKETS + len(PHASES) * BUCKETS


class Daemon(IntEnum):
    """Words of the daemon's block. Histograms are ``BUCKETS`` words and the sum in nanoseconds behind them."""

    SPANS = 0
    SPAN_ROWS = 1
    UNKNOWN_ROWS = 2
    RECORDS = 3
    SCATTERED_BYTES = 4
    GATHERED_BYTES = 5
    BUSY_NS = 6
    SCATTERED_ROWS = 7
    GATHERED_ROWS = 8
    KIND_RECORDS = 9
    """One word for each of ``KINDS``."""
    LAG = 18
    """From a record's publication to the end of its effect."""
    SCATTER = 35
    """Effect of SAVE and FLUSH records without their gathers."""
    GATHER = 52
    """Gathers of a record."""
    SHARED = 69
    """One word for each of ``SHARED_BLOCKS``."""


DAEMON_WORDS: Final = Daemon.SHARED + len(SHARED_BLOCKS)


def bucket(nanoseconds: int) -> int:
    """Index of the bucket that a duration belongs to."""
    return bisect_left(BOUNDS_NS, nanoseconds)
