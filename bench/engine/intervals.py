"""Medians with 95 % intervals from interleaved rounds, and what may be concluded from them.

Values come as a list a round, each a list of that round's turns: engines are started anew every round, so the turns of
one round have more in common with each other than with those of another. The intervals are percentiles of a bootstrap
in two stages that keeps that: rounds are drawn with replacement, then turns within each (Davison and Hinkley,
Bootstrap Methods and their Application, 1997, section 3.8).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Rounds = Sequence[Sequence[float]]

RESAMPLES = 2000
FEWEST = 4
"""Turns that an interval needs; of fewer nothing is concluded."""


@dataclass(frozen=True)
class Interval:
    """A median, its 95 % interval, and how many values it is of."""

    middle: float
    low: float
    high: float
    count: int

    @property
    def enough(self) -> bool:
        return self.count >= FEWEST

    def below(self, other: Interval) -> bool | None:
        """Whether all of this interval lies below all of the other; None where one is of too few values."""
        return self.high < other.low if self.enough and other.enough else None

    def within(self, bound: float) -> bool:
        """Whether it lies in [-bound, bound] and is of enough values."""
        return self.enough and -bound <= self.low and self.high <= bound


def interval(rounds: Rounds, *, seed: int = 0) -> Interval:
    """The median over all turns of all rounds. ``seed``: of the bootstrap, so that the same values say the same."""
    values = np.asarray(rounds, dtype=np.float64)
    if values.ndim != 2 or not values.size:
        raise ValueError("an interval is of one or more rounds, each of as many turns")
    count, turns = values.shape
    draw = np.random.default_rng(seed)
    of_rounds = draw.integers(count, size=(RESAMPLES, count, 1))
    of_turns = draw.integers(turns, size=(RESAMPLES, count, turns))
    medians = np.median(values[of_rounds, of_turns], axis=(1, 2))
    low, high = np.quantile(medians, (0.025, 0.975))
    return Interval(float(np.median(values)), float(low), float(high), values.size)


def differences(ours: Sequence[Rounds], base: Sequence[Rounds]) -> list[list[float]]:
    """By turn, how much more ours is than the base, as a share of the base: 0.1 is a tenth more.

    Engines of a kind come as one ``Rounds`` each; their mean counts. Within a turn all ran right after each other.
    """
    return [
        [
            float(np.mean([engine[at][turn] for engine in ours]) / np.mean([engine[at][turn] for engine in base]) - 1)
            for turn in range(len(base[0][at]))
        ]
        for at in range(len(base[0]))
    ]


def judge(difference: Interval, again: Sequence[Interval], bound: float) -> bool | None:
    """Whether a difference is at most ``bound``.

    None, no verdict, where two engines of one kind (``again``) are not known to be within ``bound`` of each other, or
    where the interval of the difference has the bound inside.
    """
    if not difference.enough or not all(pair.within(bound) for pair in again):
        return None
    if difference.high <= bound:
        return True
    return False if difference.low > bound else None
