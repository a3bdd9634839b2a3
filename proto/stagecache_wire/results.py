"""What the daemon found of one gathered (span, key): an entry of the result table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_LOW = (1 << 32) - 1


@dataclass(frozen=True, slots=True)
class Result:
    """One entry.

    sequence: record that filled it. key_id, arena_offset, rows: of the gather.
    unknown, absent, pending: counts of rows of that presence (stagecache_wire.presence).
    unknown_first, unknown_end: index of the first row that is UNKNOWN or PENDING, and the index after the last one;
        ``rows`` and 0 where there is none. A reader that needs only a part of the span can tell whether it is whole.
    absent_first, absent_end: the same for ABSENT.
    """

    sequence: int
    key_id: int
    arena_offset: int
    rows: int
    unknown: int = 0
    absent: int = 0
    pending: int = 0
    unknown_first: int = 0
    unknown_end: int = 0
    absent_first: int = 0
    absent_end: int = 0

    @property
    def first_missing(self) -> int:
        """Index of the first row that is not PRESENT; ``rows`` where there is none."""
        return min(self.unknown_first, self.absent_first)

    def words(self) -> tuple[int, ...]:
        """The eight words of the entry, see layout.R_*."""
        return (
            self.sequence,
            self.key_id,
            self.arena_offset,
            self.rows,
            self.unknown_first | self.unknown_end << 32,
            self.absent_first | self.absent_end << 32,
            self.unknown | self.absent << 32,
            self.pending,
        )

    @classmethod
    def of(cls, words: Sequence[int]) -> Result:
        """The entry that eight words hold."""
        sequence, key_id, offset, rows, unknown_range, absent_range, counts, pending = words
        return cls(
            sequence,
            key_id,
            offset,
            rows,
            counts & _LOW,
            counts >> 32,
            pending,
            unknown_range & _LOW,
            unknown_range >> 32,
            absent_range & _LOW,
            absent_range >> 32,
        )
