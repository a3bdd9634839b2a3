"""Records of the step log: what a worker tells the daemon, in order.

    BEGIN      gathers of hits on rows that are already there
    SAVE       claim the slots of a step, scatter its page, then the gathers that touch these slots
    LOST       a step whose rows will not come: its slots become UNKNOWN for every key (W8)
    FLUSH      rows of deferred keys, written only where their claim still stands (W3)
    FAIL       (slot, key) pairs whose write failed become UNKNOWN, where their claim still stands (W5)
    RESET      a new epoch (R5)
    CLOSE_KEY  a key is given up and its memory returned (K1)
    PUBLISH    full blocks are kept for the session's namespace, each under its hash, if all their rows are there
    FILL       blocks whose KV came from elsewhere get the rows that the namespace keeps under their hashes; a block
               whose hash it does not keep becomes UNKNOWN

A record is an entry of eight words (layout.E_*) and a payload of sections, each aligned to 8 bytes:

    keys       n_keys   x u32   key id in the low 24 bits, KeyMode in the high 8
    runs       n_runs   x (u32 start slot, u32 length); with UNIT_RUNS n_runs x u32 slot, each of length 1;
                        PUBLISH and FILL: n_runs x u32 block id, with UNIT_RUNS
    claims     n_runs   x u64   FLUSH and FAIL only: sequence of the record that claimed the run
    hashes     n_runs   x 32 bytes   PUBLISH and FILL only: the block's hash
    spans      n_spans  x (u32 first run, u32 number of runs, u32 rows, u32 0)
    span runs  n_span_runs x (u32 start slot, u32 length)
    gathers    n_gathers x (u32 span, u32 key id, u32 result index, u32 0, u64 arena offset)

Entry word 1 holds kind | flags << 8 | n_span_runs << 16; word 6 n_runs | n_keys << 32; word 7 n_spans |
n_gathers << 32. A gather of a span writes ``rows * row_bytes`` bytes at its arena offset: a row that is not PRESENT
reads zeros and is counted in the result entry.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, ClassVar, TypeAlias, final

import numpy as np
from numpy.typing import NDArray

U32: TypeAlias = NDArray[np.uint32]
U64: TypeAlias = NDArray[np.uint64]
U8: TypeAlias = NDArray[np.uint8]

UNIT_RUNS = 1
NO_PAGE = (1 << 64) - 1
SAME_MODEL = 0
"""In a RESET's page word: rows were lost, but the model computes what it computed before; else NO_PAGE."""
KEY_MASK = (1 << 24) - 1
MODE_SHIFT = 24
HASH_BYTES = 32

GATHER_DTYPE = np.dtype([("span", "<u4"), ("key", "<u4"), ("result", "<u4"), ("zero", "<u4"), ("arena_offset", "<u8")])

pack_span = struct.Struct("<4I").pack
"""(first run, number of runs, rows, 0) -> a span's bytes."""
pack_gather = struct.Struct("<4IQ").pack
"""(span, key id, result index, 0, arena offset) -> a gather's bytes."""

_EMPTY32: U32 = np.empty(0, np.uint32)
_EMPTY64: U64 = np.empty(0, np.uint64)
_EMPTY_GATHERS = np.empty(0, GATHER_DTYPE)
_NO_HASHES: U8 = np.empty((0, HASH_BYTES), np.uint8)


class Kind(IntEnum):
    """What a record does."""

    BEGIN = 1
    SAVE = 2
    LOST = 3
    FLUSH = 4
    FAIL = 5
    RESET = 6
    CLOSE_KEY = 7
    PUBLISH = 8
    FILL = 9


OF_CLAIMS = frozenset({Kind.FLUSH, Kind.FAIL})
"""Kinds with a claim for each run."""
OF_BLOCKS = frozenset({Kind.PUBLISH, Kind.FILL})
"""Kinds that name blocks and their hashes."""


class KeyMode(IntEnum):
    """What a SAVE says of one key."""

    ROWS = 1
    """Its rows are in the page."""
    CLAIM = 2
    """Deferred: claimed now, its rows come with a FLUSH."""
    FAILED = 3
    """Refused in this step (K3): claimed and UNKNOWN."""


def key_words(*keyed: tuple[int, KeyMode]) -> U32:
    """The keys section for (key id, mode) pairs: u32 [n]."""
    return np.array([key_id | int(mode) << MODE_SHIFT for key_id, mode in keyed], np.uint32)


class BadRecordError(ValueError):
    """A number of a record lies outside the geometry, or its parts do not fit together."""


@dataclass(slots=True)
class Record:
    """One decoded record. Arrays are views of its own copy of the payload."""

    sequence: int
    kind: Kind
    page: int = NO_PAGE
    rows: int = 0
    unit_runs: bool = False
    keys: U32 = field(default_factory=lambda: _EMPTY32)
    runs: U32 = field(default_factory=lambda: _EMPTY32)
    """[n, 2] start and length, or [n] slots with ``unit_runs``; block ids [n] in kinds ``OF_BLOCKS``."""
    claims: U64 = field(default_factory=lambda: _EMPTY64)
    spans: U32 = field(default_factory=lambda: _EMPTY32)
    """[n, 4]"""
    span_runs: U32 = field(default_factory=lambda: _EMPTY32)
    """[n, 2]"""
    gathers: NDArray[np.void] = field(default_factory=lambda: _EMPTY_GATHERS)
    hashes: U8 = field(default_factory=lambda: _NO_HASHES)
    """[n, 32], one a block."""

    @classmethod
    def save(cls, page: int, rows: int, keys: U32, runs: U32) -> Record:
        """A SAVE; its default sections are shared, not made."""
        return cls(
            0, Kind.SAVE, page, rows, runs.ndim == 1, keys, runs,
            _EMPTY64, _EMPTY32, _EMPTY32, _EMPTY_GATHERS, _NO_HASHES,
        )  # fmt: skip

    @classmethod
    def of_blocks(cls, kind: Kind, blocks: Sequence[tuple[int, bytes]]) -> Record:
        """A PUBLISH or a FILL of (block id, hash of 32 bytes) pairs.

        Raises:
            ValueError: a hash of another length.
        """
        if any(len(block_hash) != HASH_BYTES for _, block_hash in blocks):
            raise ValueError(f"a block hash has {HASH_BYTES} bytes")
        hashes = np.frombuffer(b"".join(block_hash for _, block_hash in blocks), np.uint8)
        ids = np.array([block for block, _ in blocks], np.uint32)
        return cls(0, kind, rows=len(blocks), unit_runs=True, runs=ids, hashes=hashes.reshape(-1, HASH_BYTES))

    @property
    def same_model(self) -> bool:
        """Of a RESET: what the namespace keeps is still right."""
        return self.page == SAME_MODEL

    def most_bytes(self) -> int:
        """At least as many as its payload has."""
        return sum(section.nbytes + 8 for section in self.sections())

    def sections(self) -> tuple[NDArray[Any], ...]:
        """What the payload holds, in its order."""
        return self.keys, self.runs, self.claims, self.hashes, self.spans, self.span_runs, self.gathers

    def named_blocks(self) -> list[tuple[int, bytes]]:
        """(block id, hash) of a PUBLISH or FILL."""
        return [(block, found.tobytes()) for block, found in zip(self.runs.tolist(), self.hashes, strict=True)]

    def slots(self) -> NDArray[np.int64]:
        """int64 [rows]: the slots that the runs name, in order."""
        if self.unit_runs:
            return self.runs.astype(np.int64)
        return expand_runs(self.runs)

    def keyed_modes(self) -> list[tuple[int, KeyMode]]:
        """(key id, mode) of each key section entry."""
        return [(word & KEY_MASK, KeyMode(word >> MODE_SHIFT)) for word in self.keys.tolist()]


_BEGIN_WORD = int(Kind.BEGIN)
_SPAN_BYTES, _GATHER_BYTES = 16, GATHER_DTYPE.itemsize
RUN_BYTES = 8
"""Of a run's start and length."""


@final
@dataclass(slots=True)
class PackedBegin:
    """A BEGIN as its writer makes it, its sections packed already: at a hit, numpy's code is cold.

    spans, gathers: what ``pack_span`` and ``pack_gather`` gave. span_runs: pairs of u32. ``decode`` makes it a Record.
    """

    sequence: int
    spans: bytes
    span_runs: bytes
    gathers: bytes
    kind: ClassVar[Kind] = Kind.BEGIN
    rows: ClassVar[int] = 0

    def most_bytes(self) -> int:
        """Bytes of its payload."""
        return len(self.spans) + len(self.span_runs) + len(self.gathers)

    def encoded(self) -> tuple[list[int], bytes]:
        """As ``encode``. Every section is a multiple of 8 bytes long."""
        payload = self.spans + self.span_runs + self.gathers
        return [
            self.sequence, _BEGIN_WORD | len(self.span_runs) // RUN_BYTES << 16, 0, len(payload), NO_PAGE, 0, 0,
            len(self.spans) // _SPAN_BYTES | len(self.gathers) // _GATHER_BYTES << 32,
        ], payload  # fmt: skip


Loggable: TypeAlias = Record | PackedBegin


def expand_runs(runs: U32) -> NDArray[np.int64]:
    """Slots that runs name, in order. runs: u32 [n, 2] of start and length; result: int64 [sum of lengths]."""
    starts = runs[:, 0].astype(np.int64)
    lengths = runs[:, 1].astype(np.int64)
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    slots: NDArray[np.int64] = np.arange(total, dtype=np.int64) + np.repeat(starts - (ends - lengths), lengths)
    return slots


def encode(record: Loggable) -> tuple[list[int], bytes]:
    """The entry words (payload position left 0, for the log writer to fill) and the payload of a record."""
    if type(record) is PackedBegin:
        return record.encoded()
    n_keys, n_runs = len(record.keys), len(record.runs)
    if record.kind is Kind.SAVE and record.gathers is _EMPTY_GATHERS and n_keys and n_runs < 1 << 32:
        payload = record.keys.tobytes()
        if n_keys & 1:
            payload += b"\0\0\0\0"
        payload += record.runs.tobytes()
        if len(payload) & 7:
            payload += b"\0\0\0\0"
        flags = UNIT_RUNS if record.unit_runs else 0
        return [
            record.sequence, int(Kind.SAVE) | flags << 8, 0, len(payload), record.page, record.rows,
            n_runs | n_keys << 32, 0,
        ], payload  # fmt: skip
    n_spans, n_span_runs, n_gathers = len(record.spans), len(record.span_runs), len(record.gathers)
    if n_span_runs >= 1 << 48 or n_runs >= 1 << 32 or n_gathers >= 1 << 32:
        raise BadRecordError("a count does not fit its field")
    parts: list[bytes] = []
    length = 0
    for section in record.sections():
        if len(section):
            raw = section.tobytes()
            parts.append(raw)
            length += len(raw)
            if length & 7:
                parts.append(b"\0\0\0\0")
                length += 4
    flags = UNIT_RUNS if record.unit_runs else 0
    words = [
        record.sequence,
        int(record.kind) | flags << 8 | n_span_runs << 16,
        0,
        length,
        record.page,
        record.rows,
        n_runs | n_keys << 32,
        n_spans | n_gathers << 32,
    ]
    return words, parts[0] if len(parts) == 1 else b"".join(parts)


def decode(words: list[int], payload: bytes) -> Record:
    """The record that ``words`` and ``payload`` hold. Counts are held against the payload's length; the numbers
    inside are checked by the daemon against its geometry before use.

    Raises:
        BadRecordError: an unknown kind or mode, or sections that do not fill the payload exactly.
    """
    sequence, word1, _, length, page, rows, counts_a, counts_b = words
    try:
        kind = Kind(word1 & 0xFF)
    except ValueError:
        raise BadRecordError(f"kind {word1 & 0xFF} is unknown") from None
    flags, n_span_runs = word1 >> 8 & 0xFF, word1 >> 16
    n_runs, n_keys = counts_a & 0xFFFFFFFF, counts_a >> 32
    n_spans, n_gathers = counts_b & 0xFFFFFFFF, counts_b >> 32
    if flags & ~UNIT_RUNS:
        raise BadRecordError(f"flags {flags} are unknown")
    unit = bool(flags & UNIT_RUNS)
    if kind in OF_BLOCKS and not unit:
        raise BadRecordError(f"{kind.name} with runs of slots")
    sizes = (
        n_keys * 4,
        n_runs * (4 if unit else 8),
        n_runs * 8 if kind in OF_CLAIMS else 0,
        n_runs * HASH_BYTES if kind in OF_BLOCKS else 0,
        n_spans * 16,
        n_span_runs * 8,
        n_gathers * GATHER_DTYPE.itemsize,
    )
    if length != len(payload) or sum((size + 7) // 8 * 8 for size in sizes) != length:
        raise BadRecordError(f"sections of {sizes} bytes do not fill a payload of {length}")
    at = 0
    sections: list[NDArray[np.uint8]] = []
    whole = np.frombuffer(payload, np.uint8)
    for size in sizes:
        sections.append(whole[at : at + size])
        at += (size + 7) // 8 * 8
    runs = sections[1].view(np.uint32)
    return Record(
        sequence=sequence,
        kind=kind,
        page=page,
        rows=rows,
        unit_runs=unit,
        keys=sections[0].view(np.uint32),
        runs=runs if unit else runs.reshape(-1, 2),
        claims=sections[2].view(np.uint64),
        hashes=sections[3].reshape(-1, HASH_BYTES),
        spans=sections[4].view(np.uint32).reshape(-1, 4),
        span_runs=sections[5].view(np.uint32).reshape(-1, 2),
        gathers=sections[6].view(GATHER_DTYPE),
    )
