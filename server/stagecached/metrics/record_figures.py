"""What the consumer counts of each record, in words that outlive the daemon (``stagecache_wire.figures.Daemon``)."""

from __future__ import annotations

import time
from collections import deque
from typing import Final, NamedTuple

from stagecache_wire import layout
from stagecache_wire.figures import BUCKETS, SHARED_BLOCKS, Daemon, bucket
from stagecache_wire.records import Kind, Record

MAX_LAG_NS: Final = 3600 * 10**9
"""Longer lags are no lags: two clocks that do not agree (time namespaces)."""

RECENT: Final = 512
_LAG: Final = layout.D_FIGURES + Daemon.LAG
_SCATTER: Final = layout.D_FIGURES + Daemon.SCATTER
_GATHER: Final = layout.D_FIGURES + Daemon.GATHER
_KIND: Final = layout.D_FIGURES + Daemon.KIND_RECORDS - 1
_SHARED: Final = {outcome: layout.D_FIGURES + Daemon.SHARED + at for at, outcome in enumerate(SHARED_BLOCKS)}
_SCATTERED_ROWS: Final = layout.D_FIGURES + Daemon.SCATTERED_ROWS
_GATHERED_ROWS: Final = layout.D_FIGURES + Daemon.GATHERED_ROWS


class RecordNote(NamedTuple):
    """One record's life, for the timeline. Times are time.monotonic_ns().

    published: by the worker; equal to begun where that is not known. gather_ns: part of done - begun.
    """

    sequence: int
    kind: int
    rows: int
    gathers: int
    published: int
    begun: int
    done: int
    gather_ns: int


class RecordFigures:
    """Written by the consumer thread alone; read by whoever folds."""

    def __init__(self, words: memoryview) -> None:
        """words: u64, the whole control segment."""
        self._words = words
        self._gather_ns = 0
        self.recent: deque[RecordNote] = deque(maxlen=RECENT)
        """The newest records, oldest first."""

    def scattered(self, rows: int, size: int) -> None:
        """Rows went into a pool; ``size`` in bytes."""
        self._words[_SCATTERED_ROWS] += rows
        self._words[layout.D_SCATTERED_BYTES] += size

    def gathered(self, rows: int, size: int) -> None:
        """Rows of one (span, key) went into the arena; ``size`` in bytes."""
        self._words[_GATHERED_ROWS] += rows
        self._words[layout.D_GATHERED_BYTES] += size

    def shared(self, outcome: str) -> None:
        """What became of a block of a PUBLISH or FILL: one of ``SHARED_BLOCKS``."""
        self._words[_SHARED[outcome]] += 1

    def spans_done(self, spans: int, rows: int, begun_ns: int) -> None:
        """All gathers of a record are done. spans, rows: of hits; begun_ns: time.monotonic_ns() before them."""
        words = self._words
        words[layout.D_SPANS] += spans
        words[layout.D_SPAN_ROWS] += rows
        self._gather_ns = took = time.monotonic_ns() - begun_ns
        self._observe(_GATHER, took)

    def done(self, record: Record, begun_ns: int) -> None:
        """A record's effect is in place. begun_ns: time.monotonic_ns() before it was read."""
        words, sequence, kind = self._words, record.sequence, record.kind
        now = time.monotonic_ns()
        gather_ns, self._gather_ns = self._gather_ns, 0
        words[layout.D_RECORDS] += 1
        words[layout.D_BUSY_NS] += now - begun_ns
        words[_KIND + kind] += 1
        if kind is Kind.SAVE or kind is Kind.FLUSH:
            self._observe(_SCATTER, now - begun_ns - gather_ns)
        published = self.published(sequence)
        if published and 0 <= now - published < MAX_LAG_NS:
            self._observe(_LAG, now - published)
        else:
            published = begun_ns
        self.recent.append(
            RecordNote(sequence, kind, record.rows, len(record.gathers), published, begun_ns, now, gather_ns)
        )

    def published(self, sequence: int) -> int:
        """When the worker published a record; 0 where its entry of the ring has been used again."""
        words = self._words
        if words[layout.W_HEAD] - sequence >= layout.TIME_ENTRIES:
            return 0
        return int(words[layout.W_TIMES + (sequence - 1) % layout.TIME_ENTRIES])

    def _observe(self, histogram: int, nanoseconds: int) -> None:
        self._words[histogram + bucket(nanoseconds)] += 1
        self._words[histogram + BUCKETS] += nanoseconds
