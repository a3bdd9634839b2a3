"""A histogram of plain integers, written by one thread."""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate


class Histogram:
    """Counts durations by upper bounds in seconds; one more bucket takes the rest."""

    __slots__ = ("_bounds", "buckets", "sum_s")

    def __init__(self, bounds_s: tuple[float, ...]) -> None:
        self._bounds = bounds_s
        self.buckets = [0] * (len(bounds_s) + 1)
        self.sum_s = 0.0

    def observe(self, seconds: float) -> None:
        self.buckets[bisect_left(self._bounds, seconds)] += 1
        self.sum_s += seconds

    @property
    def count(self) -> int:
        return sum(self.buckets)

    def cumulative(self) -> list[int]:
        """Observations up to each bound, the last one with all."""
        return list(accumulate(self.buckets))
