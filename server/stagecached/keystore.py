"""One key's rows in the daemon: its staging pages, its pool, and the claims that say whose rows these are.

Rows are opaque bytes of a fixed stride. Numpy moves them as items of a void dtype, one item a row, which copies each
row with one memmove: measured, scatter and gather of 512 rows and more run at 85 to 100 % of memcpy, where a 2-D row
assignment pays an iterator step a row. ``take`` needs ``mode='clip'`` to be fast, which hides bad slots, so slots are
checked against the geometry before they get here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from stagecache_wire import presence, shm
from stagecache_wire.geometry import Geometry, KeySchema, page_stride, pool_bytes, staging_bytes, table_bytes
from stagecache_wire.names import SessionNames

PIECE: Final = 1 << 14
"""Slots that are looked at together where a whole table is counted: 128 KiB of words."""

Slots: TypeAlias = NDArray[np.int64]
Words: TypeAlias = NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Span:
    """Slots of one hit span, and how to address them: a slice where they are one run, else int64 indices."""

    slots: Slots
    rows: int
    run: slice | None

    @classmethod
    def of(cls, slots: Slots, *, single_run: bool) -> Span:
        first = int(slots[0]) if len(slots) else 0
        return cls(slots, len(slots), slice(first, first + len(slots)) if single_run else None)


@dataclass(frozen=True, slots=True)
class Gathered:
    """What a gather found; the fields are those of ``stagecache_wire.results.Result``."""

    unknown: int
    absent: int
    pending: int
    unknown_first: int
    unknown_end: int
    absent_first: int
    absent_end: int

    @property
    def first_missing(self) -> int:
        """Index of the first row that is not PRESENT; the number of rows where there is none."""
        return min(self.unknown_first, self.absent_first)


class KeyStore:
    """Staging pages, pool and claim table of one key. Only the session's consumer thread changes them.

    Attributes:
        locked_bytes: of ``total_bytes``, those that are locked in memory.
        unlocked_why: why the others are not; empty where there are none.
    """

    def __init__(self, key_id: int, schema: KeySchema, geometry: Geometry, segments: dict[str, shm.Segment]) -> None:
        """segments: the mapped ``staging``, ``pool`` and ``table`` segments."""
        self.key_id = key_id
        self.schema = schema
        self.locked_bytes = 0
        self.unlocked_why = "not locked yet"
        self.rows_scattered = 0
        self.rows_gathered = 0
        self._segments = segments
        self._row = np.dtype(f"V{schema.row_bytes}")
        self._capacity = geometry.staging_capacity_tokens
        stride = page_stride(geometry, schema.row_bytes)
        self._pages = [
            np.frombuffer(segments["staging"].map, self._row, self._capacity, page * stride)
            for page in range(geometry.staging_depth)
        ]
        self._pool = np.frombuffer(segments["pool"].map, self._row, geometry.num_slots)
        self.claims: Words = np.frombuffer(segments["table"].map, np.uint64, geometry.num_slots)

    @property
    def row_bytes(self) -> int:
        return self.schema.row_bytes

    @property
    def pool_bytes(self) -> int:
        return self._segments["pool"].size

    @property
    def staging_bytes(self) -> int:
        return self._segments["staging"].size

    @property
    def table_bytes(self) -> int:
        return self._segments["table"].size

    @property
    def total_bytes(self) -> int:
        """Staging pages, pool and claims: what is to be locked."""
        return sum(segment.size for segment in self._segments.values())

    @property
    def locked(self) -> bool:
        return self.locked_bytes == self.total_bytes

    def lock(self) -> None:
        """Lock its memory, as far as that is allowed; may be done again. Sets ``locked_bytes`` and, where some are not,
        ``unlocked_why``.
        """
        locked, why = 0, ""
        for segment in self._segments.values():
            error = shm.lock_memory(segment)
            locked += 0 if error else segment.size
            why = why or error
        self.locked_bytes, self.unlocked_why = locked, why

    def segments(self) -> list[shm.Segment]:
        return list(self._segments.values())

    def claim(self, span: Span, sequence: int, *, failed: bool) -> None:
        """Note that the record ``sequence`` claimed the slots; their bytes are not in yet, or failed (W9)."""
        word = sequence << presence.CLAIM_SHIFT | (presence.FAILED if failed else 0)
        self.claims[span.slots if span.run is None else span.run] = word

    def scatter(self, page: int, span: Span) -> int:
        """Copy the first ``span.rows`` rows of a staging page to the slots. Returns the bytes moved."""
        self._pool[span.slots if span.run is None else span.run] = self._pages[page][: span.rows]
        self.rows_scattered += span.rows
        return span.rows * self.row_bytes

    def mark_written(self, span: Span, sequence: int) -> None:
        """The bytes of the claim ``sequence`` are in: PENDING becomes PRESENT."""
        word = sequence << presence.CLAIM_SHIFT | presence.WRITTEN
        self.claims[span.slots if span.run is None else span.run] = word

    def standing(self, slots: Slots, claims: Words, slot_words: Words) -> NDArray[np.bool_]:
        """bool [n]: where the claim ``claims[i]`` of slot ``slots[i]`` still stands: nobody wrote the slot since.

        claims: u64 [n], sequence of the claiming record; slot_words: the session's words, u64 [num_slots].
        """
        same_claim = self.claims[slots] >> np.uint64(presence.CLAIM_SHIFT) == claims
        stands: NDArray[np.bool_] = same_claim & (slot_words[slots] == claims << np.uint64(presence.SLOT_SHIFT))
        return stands

    def flush(self, page: int, slots: Slots, claims: Words, keep: NDArray[np.bool_]) -> int:
        """Write rows of deferred claims, where ``keep`` says that the claim stands (W3). Returns the bytes moved."""
        rows = self._pages[page][: len(slots)]
        if keep.all():
            self._pool[slots] = rows
        else:
            self._pool[slots[keep]] = rows[keep]
        count = int(keep.sum())
        self.rows_scattered += count
        return count * self.row_bytes

    def settle(self, slots: Slots, claims: Words, keep: NDArray[np.bool_], *, failed: bool) -> None:
        """Mark flushed claims written, or failed (W5), where they stand."""
        flag = np.uint64(presence.FAILED if failed else presence.WRITTEN)
        self.claims[slots[keep]] = claims[keep] << np.uint64(presence.CLAIM_SHIFT) | flag

    def gather(self, span: Span, slot_words: Words, epoch_sequence: int, out: NDArray[np.void]) -> Gathered:
        """Copy the span's rows to ``out``; rows that are not PRESENT read zeros (H5).

        slot_words: u64 [span.rows], the session's words of the span's slots.
        out: void [span.rows], one item a row.
        """
        if span.run is not None:
            np.copyto(out, self._pool[span.run])
            claims = self.claims[span.run]
        else:
            self._pool.take(span.slots, out=out, mode="clip")
            claims = self.claims.take(span.slots, mode="clip")
        self.rows_gathered += span.rows
        found, present = classify(slot_words, claims, epoch_sequence)
        if present is not None:
            out.view(np.uint8).reshape(span.rows, self.row_bytes)[~present] = 0
        return found

    def rows(self, slots: slice) -> NDArray[np.void]:
        """void [n]: the pool's rows of a run of slots, as they stand there."""
        return self._pool[slots]

    def write(self, slots: slice, rows: NDArray[np.void]) -> None:
        """Copy ``rows``, void [n], to a run of slots."""
        self._pool[slots] = rows

    def present_slots(self, slot_words: Words, epoch_sequence: int) -> int:
        """How many slots of the whole pool are PRESENT."""
        return count(slot_words, self.claims, epoch_sequence)[0]


def classify(slot_words: Words, claims: Words, epoch_sequence: int) -> tuple[Gathered, NDArray[np.bool_] | None]:
    """``stagecache_wire.presence.presence_of`` over arrays: the counts, and the mask of PRESENT rows.

    slot_words, claims: u64 [n]. The mask is None where every row is PRESENT: a slot word ``w << 1`` and a claim
    ``w << 2 | WRITTEN`` belong together, so a claim is then twice the slot word and 1. That is found without masks, by
    two kinds of numpy's functions: behind a copy of megabytes, it is their code that costs.
    """
    rows = len(slot_words)
    newest_old = epoch_sequence << presence.SLOT_SHIFT | presence.LOST
    if rows:
        beyond = claims - slot_words
        beyond -= slot_words
        least, most = np.minimum.reduce, np.maximum.reduce
        if least(beyond) == 1 and most(beyond) == 1 and least(slot_words) > newest_old:
            return Gathered(0, 0, 0, rows, 0, rows, 0), None
    one = np.uint64(1)
    in_epoch = slot_words > np.uint64(newest_old)
    present = (claims == (slot_words << one | one)) & in_epoch
    writer = slot_words >> one
    claimer = claims >> np.uint64(presence.CLAIM_SHIFT)
    tenant_unknown = ~in_epoch | (slot_words & one != 0)
    absent = ~tenant_unknown & (claimer < writer)
    failed = ~tenant_unknown & ~absent & (claims & np.uint64(presence.FAILED) != 0)
    unknown = tenant_unknown | failed
    n_unknown, n_absent, n_present = int(unknown.sum()), int(absent.sum()), int(present.sum())
    pending = rows - n_unknown - n_absent - n_present
    unreadable = _range(~present & ~absent)
    return Gathered(n_unknown, n_absent, pending, *unreadable, *_range(absent)), present


def count(slot_words: Words, claims: Words, epoch_sequence: int) -> tuple[int, int, int, int]:
    """PRESENT, ABSENT, PENDING and UNKNOWN rows of whole tables. In pieces: temporaries as long as a large pool's table
    would stay in the allocator's arenas, one for each thread that ever counted.
    """
    absent = pending = unknown = 0
    rows = len(slot_words)
    for start in range(0, rows, PIECE):
        found, _ = classify(slot_words[start : start + PIECE], claims[start : start + PIECE], epoch_sequence)
        absent, pending, unknown = absent + found.absent, pending + found.pending, unknown + found.unknown
    return rows - absent - pending - unknown, absent, pending, unknown


def _range(mask: NDArray[np.bool_]) -> tuple[int, int]:
    """Index of the first True and the index after the last one; the length and 0 where there is none."""
    if not mask.any():
        return len(mask), 0
    return int(np.argmax(mask)), len(mask) - int(np.argmax(mask[::-1]))


def create_key(names: SessionNames, key_id: int, schema: KeySchema, geometry: Geometry, mode: int) -> KeyStore:
    """Create the three segments of a key.

    Raises:
        shm.ShmFullError: no room; nothing is left behind.
    """
    wanted = {
        "staging": (names.staging(key_id), staging_bytes(geometry, schema.row_bytes)),
        "pool": (names.pool(key_id), pool_bytes(geometry, schema.row_bytes)),
        "table": (names.table(key_id), table_bytes(geometry)),
    }
    made: dict[str, shm.Segment] = {}
    try:
        for part, (name, size) in wanted.items():
            made[part] = shm.create_segment(name, size, mode)
    except BaseException:
        for segment in made.values():
            shm.unlink_segment(segment.name)
        raise
    return KeyStore(key_id, schema, geometry, made)


def adopt_key(names: SessionNames, key_id: int, schema: KeySchema, geometry: Geometry) -> KeyStore:
    """Map the three segments of a key that an earlier daemon made.

    Raises:
        FileNotFoundError: one of them is gone.
        ValueError: one of them is not as long as the geometry says.
    """
    segments = {
        "staging": shm.open_segment(names.staging(key_id)),
        "pool": shm.open_segment(names.pool(key_id)),
        "table": shm.open_segment(names.table(key_id)),
    }
    wanted = (staging_bytes(geometry, schema.row_bytes), pool_bytes(geometry, schema.row_bytes), table_bytes(geometry))
    if tuple(segment.size for segment in segments.values()) != wanted:
        raise ValueError("a segment is not as long as its key says")
    return KeyStore(key_id, schema, geometry, segments)
