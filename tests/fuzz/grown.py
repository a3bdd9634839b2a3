"""Log records that are valid, as plain numbers: what mutations are grown from.

A record is kept as its eight entry words and its sections, each a list of ints, so that a mutation may change a number
inside a section and still be encoded consistently, or an entry word, and not.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from random import Random

from stagecache_wire.records import MODE_SHIFT, NO_PAGE, SAME_MODEL, KeyMode, Kind

BEGIN, SAVE, LOST, FLUSH, FAIL, RESET, CLOSE_KEY, PUBLISH, FILL = (int(kind) for kind in Kind)
ROWS, CLAIM, FAILED = (int(mode) for mode in KeyMode)

KEYS, RUNS, CLAIMS, HASHES, SPANS, SPAN_RUNS, GATHERS = range(7)
WIDTHS = (1, 2, 1, 8, 4, 2, 6)
"""Numbers an item; of RUNS one with unit runs. A gather's u64 offset is two numbers, low and high, a hash
eight."""


@dataclass(frozen=True)
class Bounds:
    """What numbers are held against. keys: bytes of a row by id of the open keys."""

    num_blocks: int
    num_slots: int
    capacity: int
    depth: int
    max_results: int
    arena_bytes: int
    keys: dict[int, int]


@dataclass
class Grown:
    """A record in numbers. CLAIMS are u64, all others u32."""

    kind: int
    page: int = NO_PAGE
    rows: int = 0
    unit: bool = False
    sections: list[list[int]] = field(default_factory=lambda: [[] for _ in WIDTHS])
    name: str = ""

    def copy(self) -> Grown:
        sections = [list(section) for section in self.sections]
        return Grown(self.kind, self.page, self.rows, self.unit, sections, self.name)

    def encode(self, sequence: int) -> tuple[list[int], bytes]:
        """Entry words (payload position 0) and payload. Counts are those of whole items."""
        parts = []
        for index, section in enumerate(self.sections):
            raw = array("Q" if index == CLAIMS else "I", section).tobytes()
            parts.append(raw + bytes(-len(raw) % 8))
        payload = b"".join(parts)
        counts = [len(section) // width for section, width in zip(self.sections, WIDTHS, strict=True)]
        if self.unit:
            counts[RUNS] = len(self.sections[RUNS])
        words = [
            sequence,
            self.kind | (1 << 8 if self.unit else 0) | counts[SPAN_RUNS] << 16,
            0,
            len(payload),
            self.page,
            self.rows,
            counts[RUNS] | counts[KEYS] << 32,
            counts[SPANS] | counts[GATHERS] << 32,
        ]
        return words, payload


def grow(rng: Random, bounds: Bounds, sequence: int) -> Grown:
    """A valid record for a log that is consumed up to ``sequence`` - 1, which is at least 2."""
    kind = rng.choices((SAVE, BEGIN, FLUSH, LOST, FAIL, RESET, CLOSE_KEY, PUBLISH, FILL), (8, 6, 4, 2, 2, 1, 1, 2, 2))[
        0
    ]
    record = Grown(kind)
    if kind in (SAVE, LOST, FLUSH, FAIL):
        _runs(rng, bounds, record)
    if kind == SAVE:
        keys = rng.sample(sorted(bounds.keys), rng.randint(0, len(bounds.keys)))
        modes = [rng.choice((ROWS, ROWS, CLAIM, FAILED)) for _ in keys]
        record.sections[KEYS] = [key | mode << MODE_SHIFT for key, mode in zip(keys, modes, strict=True)]
        if ROWS in modes or rng.random() < 0.5:
            record.page = rng.randrange(bounds.depth)
    elif kind in (FLUSH, FAIL):
        record.sections[KEYS] = [rng.choice(sorted(bounds.keys)) | ROWS << MODE_SHIFT]
        record.sections[CLAIMS] = [
            rng.randint(max(1, sequence - 40), sequence - 1)
            for _ in range(len(record.sections[RUNS]) // (1 if record.unit else 2))
        ]
        record.page = rng.randrange(bounds.depth) if kind == FLUSH else rng.choice((0, NO_PAGE))
    elif kind == RESET:
        record.rows = rng.randint(1, 1 << 20)
        record.page = rng.choice((SAME_MODEL, NO_PAGE))
    elif kind == CLOSE_KEY:
        record.sections[KEYS] = [rng.choice(sorted(bounds.keys)) | ROWS << MODE_SHIFT]
    elif kind in (PUBLISH, FILL):
        record.unit, record.rows = True, rng.randint(1, min(4, bounds.num_blocks))
        record.sections[RUNS] = rng.sample(range(bounds.num_blocks), record.rows)
        record.sections[HASHES] = [rng.randrange(1 << 32) for _ in range(8 * record.rows)]
    if kind == BEGIN or (kind == SAVE and rng.random() < 0.4):
        _gathers(rng, bounds, record)
    record.name = Kind(kind).name
    return record


def _runs(rng: Random, bounds: Bounds, record: Grown) -> None:
    most = bounds.capacity if record.kind in (SAVE, FLUSH) else bounds.num_slots
    record.unit = rng.random() < 0.5
    total = 0
    for _ in range(rng.randint(1, 4)):
        length = 1 if record.unit else rng.randint(1, min(6, most - total))
        start = rng.randint(0, bounds.num_slots - length)
        record.sections[RUNS] += [start] if record.unit else [start, length]
        total += length
        if total == most:
            break
    record.rows = total


def _gathers(rng: Random, bounds: Bounds, record: Grown) -> None:
    runs = 0
    for _ in range(rng.randint(1, 3)):
        rows, first = 0, runs
        for _ in range(rng.randint(1, 3)):
            length = rng.randint(1, 8)
            record.sections[SPAN_RUNS] += [rng.randint(0, bounds.num_slots - length), length]
            rows += length
            runs += 1
        if rows > bounds.num_slots:
            record.sections[SPAN_RUNS] = record.sections[SPAN_RUNS][: 2 * first]
            runs = first
            continue
        record.sections[SPANS] += [first, runs - first, rows, 0]
    spans, moved = len(record.sections[SPANS]) // 4, 0
    for span in [*range(spans), *(rng.randrange(spans) for _ in range(rng.randint(0, 2)) if spans)]:
        key = rng.choice(sorted(bounds.keys))
        rows = record.sections[SPANS][span * 4 + 2]
        if moved + rows * bounds.keys[key] > bounds.arena_bytes // 2:
            key = min(bounds.keys, key=lambda key: bounds.keys[key])
        size = rows * bounds.keys[key]
        moved += size
        offset = rng.randrange(0, bounds.arena_bytes - size + 1, 8)
        record.sections[GATHERS] += [span, key, rng.randrange(bounds.max_results), 0, offset & 0xFFFFFFFF, offset >> 32]
