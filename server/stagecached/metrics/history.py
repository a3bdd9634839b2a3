"""A point a second of each session, so that a page which is opened now shows the last quarter of an hour."""

from __future__ import annotations

from enum import IntEnum
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from stagecache_wire.figures import Daemon, Worker
from stagecached.metrics.fold import SessionFold

POINTS: Final = 900

Points: TypeAlias = NDArray[np.float64]
"""[n, len(Field)]"""


class Field(IntEnum):
    """Columns of a point: totals at one moment, but for WAITING. AT: time.monotonic(); times in nanoseconds."""

    AT = 0
    STEPS = 1
    HIT_TOKENS = 2
    PREFILL_TOKENS = 3
    COMPUTED_TOKENS = 4
    BEGIN_NS = 5
    SAVE_NS = 6
    MATERIALIZE_NS = 7
    CONSUMED = 8
    WAITING = 9
    SCATTERED_BYTES = 10
    GATHERED_BYTES = 11


class Track:
    """Points of one session: a ring, 8 bytes a figure."""

    def __init__(self) -> None:
        self._ring: Points = np.zeros((POINTS, len(Field)))
        self._count = 0

    def __len__(self) -> int:
        return min(self._count, POINTS)

    def add(self, values: tuple[float, ...]) -> None:
        self._ring[self._count % POINTS] = values
        self._count += 1

    def points(self) -> Points:
        """All points, oldest first."""
        if self._count <= POINTS:
            return self._ring[: self._count]
        return np.roll(self._ring, -(self._count % POINTS), axis=0)

    def last(self, back: int = 0) -> Points:
        """The newest point, or the one ``back`` points before it (or the oldest)."""
        back = min(back, len(self) - 1)
        row: Points = self._ring[(self._count - 1 - back) % POINTS]
        return row

    def moved(self, points: int) -> Points:
        """How much each figure grew over the last ``points`` points; all zeros while there are not two."""
        if len(self) < 2:
            return np.zeros(len(Field))
        return self.last() - self.last(points)


class History:
    """Tracks of live sessions, by id."""

    def __init__(self) -> None:
        self.tracks: dict[str, Track] = {}

    def note(self, folds: list[SessionFold], at: float) -> None:
        """Add a point for each session; those that are not among them are forgotten. at: time.monotonic()."""
        tracks: dict[str, Track] = {}
        for fold in folds:
            track = tracks[fold.session_id] = self.tracks.get(fold.session_id) or Track()
            track.add(values_of(fold, at))
        self.tracks = tracks


def values_of(fold: SessionFold, at: float) -> tuple[float, ...]:
    """A session's totals in the order of ``Field``."""
    worker, daemon = fold.worker, fold.daemon
    return (
        at,
        worker[Worker.STEPS],
        worker[Worker.HIT_TOKENS],
        worker[Worker.PREFILL_TOKENS],
        worker[Worker.COMPUTED_TOKENS],
        worker[Worker.PHASE_NS],
        worker[Worker.PHASE_NS + 1],
        worker[Worker.PHASE_NS + 2],
        fold.consumed,
        fold.waiting,
        daemon[Daemon.SCATTERED_BYTES],
        daemon[Daemon.GATHERED_BYTES],
    )
