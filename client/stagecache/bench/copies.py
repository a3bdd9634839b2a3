"""The copy itself: scatter into a pool and gather from it, each beside one memmove of as many bytes the same way: from
the staging page into the pool, from the pool into memory like the arena's. One thread.

A copy of some MiB is as fast as what the one before it left in the caches. So each pair stands together and changes its
order from turn to turn; neither has lines of its target nearer than the other.
"""

from __future__ import annotations

import ctypes
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median

import numpy as np

from stagecache.bench.batch import BLOCK_SIZE
from stagecache_wire import shm
from stagecache_wire.geometry import Geometry, KeySchema
from stagecache_wire.names import SessionNames
from stagecached.keystore import KeyStore, Span, create_key

COPY_KINDS = ("memmove_in", "scatter", "memmove_out", "gather")


@dataclass
class CopyResult:
    """Nanoseconds of each repetition. memmove_in, memmove_out: beside scatter and gather. share(kind): speed relative
    to its memmove, from the medians.
    """

    rows: int
    row_bytes: int
    layout: str
    memmove_in: list[int] = field(default_factory=list)
    scatter: list[int] = field(default_factory=list)
    memmove_out: list[int] = field(default_factory=list)
    gather: list[int] = field(default_factory=list)

    def share(self, kind: str) -> float:
        times: list[int] = getattr(self, kind)
        return median(self.memmove_in if kind == "scatter" else self.memmove_out) / median(times)


@contextmanager
def _key(rows: int, row_bytes: int, blocks: int) -> Iterator[KeyStore]:
    geometry = Geometry(blocks, BLOCK_SIZE, rows, 2, 1 << 16, 16).checked()
    names = SessionNames("bench" + secrets.token_hex(4), secrets.token_hex(8))
    key = create_key(names, 1, KeySchema("bench", "uint8", (row_bytes,)), geometry, 0o600)
    for segment in key.segments():
        shm.unlink_segment(segment.name)
    yield key


def _shared(size: int) -> shm.Segment:
    segment = shm.create_segment("stagecache-bench" + secrets.token_hex(8), size)
    shm.unlink_segment(segment.name)
    shm.prefault(segment)
    return segment


def measure_copies(rows: int, row_bytes: int, *, scattered: bool, repetitions: int = 25) -> CopyResult:
    """Copy ``rows`` rows, all ways in turns. scattered: blocks all over the pool, else one run of slots."""
    blocks = max(64, 4 * -(-rows // BLOCK_SIZE))
    result = CopyResult(rows, row_bytes, "blocks all over" if scattered else "one run")
    size = rows * row_bytes
    with _key(rows, row_bytes, blocks) as key:
        order = np.random.default_rng(3).permutation(blocks) if scattered else np.arange(blocks)
        slots = (order[:, None] * BLOCK_SIZE + np.arange(BLOCK_SIZE)).reshape(-1)[:rows].astype(np.int64)
        span = Span.of(slots, single_run=not scattered)
        staging, pool = (segment for segment in key.segments() if not segment.name.endswith("table1"))
        source = np.frombuffer(staging.map, np.uint8, size)
        target = np.frombuffer(pool.map, np.uint8, size)
        source[:] = np.random.default_rng(5).integers(0, 255, size, np.uint8)
        words = np.full(rows, 1 << 1, np.uint64)
        out_bytes = np.frombuffer(_shared(size).map, np.uint8)
        out = out_bytes.view(f"V{row_bytes}")
        key.claim(span, 1, failed=False)
        key.mark_written(span, 1)

        def scatter() -> None:
            key.scatter(0, span)

        def gather() -> None:
            key.gather(span, words, 0, out)

        def move_in() -> None:
            ctypes.memmove(target.ctypes.data, source.ctypes.data, size)

        def move_out() -> None:
            ctypes.memmove(out_bytes.ctypes.data, target.ctypes.data, size)

        ways = [("memmove_in", move_in), ("scatter", scatter), ("memmove_out", move_out), ("gather", gather)]
        for turn in range(repetitions + 2):
            for pair in (ways[:2], ways[2:]):
                for kind, action in pair if turn % 2 else reversed(pair):
                    spent = _time(action)
                    if turn >= 2:
                        getattr(result, kind).append(spent)
        scatter()  # Where blocks are all over, move_in wrote over some of them.
        gather()
        if not np.array_equal(out_bytes, source):
            raise AssertionError("scatter and gather gave other bytes back")
    return result


def _time(action: Callable[[], None]) -> int:
    begun = time.perf_counter_ns()
    action()
    return time.perf_counter_ns() - begun
