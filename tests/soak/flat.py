"""Whether a figure that is sampled for long stays where it is, or grows.

The window after the warm-up is cut into bins, and each bin stands for itself by its median, so that what comes and goes
(a session of a second, a scrape) does not count. Of these medians two things are asked:

    slope   Theil and Sen's: the median of the slopes of all pairs, times the window. A leak that goes on.
    rise    median of the last third less median of the first. A leak that came once, which half of the pairs miss.

Growth is the larger of both. H. Theil, A rank-invariant method of linear and polynomial regression analysis, 1950;
P. K. Sen, Estimates of the regression coefficient based on Kendall's tau, 1968.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median

BINS = 12
WARM_UP = 0.25
"""Part of a life that is not looked at: caches fill, threads start, pages are touched first."""


@dataclass(frozen=True)
class Trend:
    """What became of a figure. level: median after the warm-up. growth: over ``window_s`` seconds, in its unit."""

    level: float
    growth: float
    window_s: float

    def is_flat(self, absolute: float, relative: float = 0.0) -> bool:
        """Whether it grew by no more than ``absolute`` and ``relative`` times its level."""
        return self.growth <= absolute + relative * self.level


def trend(times: Sequence[float], values: Sequence[float], *, warm_up: float = WARM_UP, bins: int = BINS) -> Trend:
    """times: seconds, rising; values: one each.

    Raises:
        ValueError: too few samples to say anything: two a bin.
    """
    if len(times) < 2 or times[-1] <= times[0]:
        raise ValueError(f"{len(times)} samples are no series")
    start = times[0] + warm_up * (times[-1] - times[0])
    window_s = times[-1] - start
    binned: list[list[float]] = [[] for _ in range(bins)]
    for at, value in zip(times, values, strict=True):
        if at >= start:
            binned[min(int((at - start) / window_s * bins), bins - 1)].append(value)
    middles = [(index, median(bin_)) for index, bin_ in enumerate(binned) if bin_]
    if sum(map(len, binned)) < 2 * bins or len(middles) < bins * 3 // 4:
        raise ValueError(f"{sum(map(len, binned))} samples after the warm-up fill {len(middles)} of {bins} bins")
    slope = median((later - earlier) / (j - i) for (i, earlier), (j, later) in combinations(middles, 2)) * bins
    third = len(middles) // 3
    rise = median(value for _, value in middles[-third:]) - median(value for _, value in middles[:third])
    return Trend(median(value for _, value in middles), max(slope, rise), window_s)
