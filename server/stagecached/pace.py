"""When a consumer looks at its log by itself: about when the next record is due, going by the last ones.

A decode step comes a few milliseconds after the one before it, so one look a step finds each record soon, and costs no
more than being woken for it. Who misses a record looks again after twice the time, until it has been idle for so long
that it may as well sleep.
"""

from __future__ import annotations

from typing import Final

WARM_S: Final = 0.1
"""How long after a record the consumer looks by itself."""
FIRST_LOOK_S: Final = 0.001
LONGEST_LOOK_S: Final = 0.02
"""Least and most time from one look to the next."""
_LATE: Final = 1.25
"""A look comes when this part of the usual time between two records has gone by: most steps are not so late."""


class Pace:
    """Times in seconds of one clock."""

    def __init__(self, consumed: int, warm_s: float = WARM_S) -> None:
        """consumed: sequence of the last record that is done."""
        self._warm_s = warm_s
        self._sequence = consumed
        self._published_at = float("-inf")
        self._wait_s = FIRST_LOOK_S
        self._warm_until = float("-inf")

    def done(self, consumed: int, published_at: float, now: float) -> None:
        """Records up to ``consumed`` are done; that one was published at ``published_at``."""
        records = consumed - self._sequence
        if records <= 0:
            return
        between = min(max((published_at - self._published_at) / records, FIRST_LOOK_S), LONGEST_LOOK_S)
        self._sequence, self._published_at = consumed, published_at
        self._wait_s = min(max(published_at + _LATE * between - now, FIRST_LOOK_S), LONGEST_LOOK_S)
        self._warm_until = now + self._warm_s

    def next_look(self, now: float) -> float | None:
        """How long to wait before the next look; None: it is time to sleep."""
        if now >= self._warm_until:
            return None
        wait_s = self._wait_s
        self._wait_s = min(2 * wait_s, LONGEST_LOOK_S)
        return wait_s
