"""Mutations of a log record, from its meaning down to its bits. Each is named, so that a finding says what was done."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from stagecache_wire.records import KEY_MASK
from tests.fuzz.grown import CLAIMS, GATHERS, HASHES, KEYS, RESET, RUNS, SPAN_RUNS, SPANS, WIDTHS, Bounds, Grown

U32, U64 = (1 << 32) - 1, (1 << 64) - 1

EDGES_32 = (
    0,
    1,
    2,
    3,
    7,
    8,
    255,
    256,
    (1 << 16) - 1,
    1 << 16,
    (1 << 24) - 1,
    1 << 24,
    (1 << 31) - 1,
    1 << 31,
    U32 - 1,
    U32,
)
EDGES_64 = (*EDGES_32, 1 << 32, (1 << 53) + 1, (1 << 61) - 1, 1 << 62, (1 << 63) - 1, 1 << 63, U64 - 1, U64)


@dataclass
class Case:
    """One record as it goes into the log.

    head: how far ``head`` is beyond the record's sequence; 0 where it is published as it should be. over: where not 0,
    the payload begins so many bytes before the ring's end, and goes on behind it. done: names of the mutations.
    """

    words: list[int]
    payload: bytes
    head: int = 0
    over: int = 0
    position: int | None = None
    done: tuple[str, ...] = ()


def changed(rng: Random, value: int, edges: tuple[int, ...], limit: int) -> int:
    """A number near ``value``, or one that programs stumble over."""
    how = rng.randrange(5)
    if how == 0:
        return value ^ 1 << rng.randrange(limit.bit_length())
    if how == 1:
        return (value + rng.choice((-1, 1, 2, -2, 8, 64))) & limit
    if how == 2:
        return rng.choice(edges)
    if how == 3:
        return (rng.choice(edges) + rng.randint(-2, 2)) & limit
    return rng.randrange(limit + 1)


# ---- of the meaning: the record stays well-formed


def number_in_section(rng: Random, record: Grown, bounds: Bounds) -> None:
    index = rng.choice([index for index in range(7) if record.sections[index]] or [KEYS])
    section = record.sections[index]
    if section:
        at = rng.randrange(len(section))
        wide = index == CLAIMS
        section[at] = changed(rng, section[at], EDGES_64 if wide else EDGES_32, U64 if wide else U32)


def near_a_limit(rng: Random, record: Grown, bounds: Bounds) -> None:
    """A number of a section becomes a limit of the geometry, or the next to it."""
    limits = (bounds.num_slots, bounds.num_blocks, bounds.capacity, bounds.depth, bounds.max_results, len(bounds.keys))
    index = rng.choice([index for index in (RUNS, SPANS, SPAN_RUNS, GATHERS) if record.sections[index]] or [KEYS])
    section = record.sections[index]
    if section:
        section[rng.randrange(len(section))] = (rng.choice(limits) + rng.randint(-1, 1)) & U32


def item_twice(rng: Random, record: Grown, bounds: Bounds) -> None:
    index = rng.choice([index for index in range(7) if record.sections[index]] or [KEYS])
    section, width = record.sections[index], _width(record, index)
    if section:
        at = rng.randrange(max(1, len(section) // width)) * width
        section += section[at : at + width] * rng.choice((1, 1, 1, 2, 40))


def item_gone(rng: Random, record: Grown, bounds: Bounds) -> None:
    index = rng.choice([index for index in range(7) if record.sections[index]] or [KEYS])
    section, width = record.sections[index], _width(record, index)
    if section:
        at = rng.randrange(max(1, len(section) // width)) * width
        del section[at : at + width]


def section_of_another(rng: Random, record: Grown, bounds: Bounds) -> None:
    """A section that the kind does not have, or has in another form."""
    index = rng.randrange(7)
    if record.sections[index] and rng.random() < 0.5:
        record.sections[index] = []
    else:
        record.sections[index] += [rng.randrange(4) for _ in range(_width(record, index))]


def other_kind(rng: Random, record: Grown, bounds: Bounds) -> None:
    record.kind = rng.randint(1, 9)


def other_rows(rng: Random, record: Grown, bounds: Bounds) -> None:
    record.rows = changed(rng, record.rows, EDGES_64, U64)


def other_page(rng: Random, record: Grown, bounds: Bounds) -> None:
    record.page = rng.choice((bounds.depth, changed(rng, record.page, EDGES_64, U64)))


def other_key(rng: Random, record: Grown, bounds: Bounds) -> None:
    """A key that is not open, of a mode that is none, or named again."""
    section = record.sections[KEYS]
    if section and rng.random() < 0.7:
        at = rng.randrange(len(section))
        section[at] = rng.choice((section[at] & KEY_MASK | rng.randrange(256) << 24, section[0], section[at] ^ 7))
    else:
        section.append(rng.choice((rng.randrange(4) | rng.randint(0, 4) << 24, rng.randrange(U32 + 1))))


def runs_with_their_rows(rng: Random, record: Grown, bounds: Bounds) -> None:
    """More slots, and the count of rows that belongs to them: too many for the page or for the cache."""
    for _ in range(rng.choice((1, 4, 20))):
        length = 1 if record.unit else rng.randint(1, 8)
        start = rng.randint(0, max(0, bounds.num_slots - length))
        record.sections[RUNS] += [start] if record.unit else [start, length]
        record.rows = (record.rows + length) & U64
        if record.sections[CLAIMS]:
            record.sections[CLAIMS].append(record.sections[CLAIMS][0])
        if record.sections[HASHES]:
            record.sections[HASHES] += record.sections[HASHES][:8]


def unit_or_not(rng: Random, record: Grown, bounds: Bounds) -> None:
    record.unit = not record.unit


def old_claim(rng: Random, record: Grown, bounds: Bounds) -> None:
    section = record.sections[CLAIMS]
    if section:
        section[rng.randrange(len(section))] = rng.choice((0, 1, U64, 1 << 62, 1 << 40))


def far_extent(rng: Random, record: Grown, bounds: Bounds) -> None:
    section = record.sections[GATHERS]
    if section:
        at = rng.randrange(max(1, len(section) // 6)) * 6
        offset = (bounds.arena_bytes + rng.choice((-8, -1, 0, 8, 1 << 40))) & U64
        section[at + 4 : at + 6] = [offset & U32, offset >> 32]


def span_with_its_rows(rng: Random, record: Grown, bounds: Bounds) -> None:
    """A span over more runs, with the rows that belong to it; perhaps of nobody, perhaps longer than the cache."""
    runs, spans = record.sections[SPAN_RUNS], record.sections[SPANS]
    if not runs:
        return
    first = rng.randrange(max(1, len(runs) // 2))
    if rng.random() < 0.5:
        runs += [0, bounds.num_slots] * rng.randint(1, 2)
    count = len(runs) // 2 - first
    rows = sum(runs[1::2][first : first + count]) & U32
    if spans and rng.random() < 0.7:
        at = rng.randrange(max(1, len(spans) // 4)) * 4
        spans[at : at + 4] = [first, count, rows, 0]
    else:
        spans += [first, count, rows, 0]


def many_gathers(rng: Random, record: Grown, bounds: Bounds) -> None:
    """The same rows again and again: more bytes than the arena has."""
    section = record.sections[GATHERS]
    if section:
        at = rng.randrange(max(1, len(section) // 6)) * 6
        section += section[at : at + 6] * rng.choice((1, 3, 12, 70))


# ---- of the form: counts, lengths and bits do not fit together


def entry_word(rng: Random, case: Case) -> None:
    at = rng.randrange(8)
    case.words[at] = changed(rng, case.words[at], EDGES_64, U64)


def a_count(rng: Random, case: Case) -> None:
    at = rng.choice((1, 6, 7))
    shift, limit = rng.choice(((0, 0xFF), (8, 0xFF), (16, (1 << 48) - 1)) if at == 1 else ((0, U32), (32, U32)))
    value = changed(rng, case.words[at] >> shift & limit, EDGES_32, limit) & limit
    case.words[at] = case.words[at] & ~(limit << shift) & U64 | value << shift


def payload_bits(rng: Random, case: Case) -> None:
    raw = bytearray(case.payload)
    for _ in range(rng.randint(1, 4)):
        if raw:
            raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
    case.payload = bytes(raw)


def payload_cut(rng: Random, case: Case) -> None:
    case.payload = case.payload[: rng.randrange(len(case.payload) + 1)]
    if rng.random() < 0.5:
        case.words[3] = len(case.payload)


def payload_longer(rng: Random, case: Case) -> None:
    case.payload += rng.randbytes(rng.choice((1, 4, 8, 16, 256)))
    case.words[3] = len(case.payload)


def other_position(rng: Random, case: Case) -> None:
    case.position = changed(rng, 0, EDGES_64, U64)


def over_the_end(rng: Random, case: Case) -> None:
    """Up to 512 bytes of what stands behind the ring, the result table, would be taken for a payload."""
    if len(case.payload) > 8:
        case.over = max(8, len(case.payload) // 8 * 8 - rng.randrange(8, 512, 8))


def sequence_of_another(rng: Random, case: Case) -> None:
    case.words[0] = changed(rng, case.words[0], EDGES_64, U64)


def head_elsewhere(rng: Random, case: Case) -> None:
    case.head = rng.choice((1, 2, 1022, 1023, 1024, 1025, 1 << 32, 1 << 62, 1 << 63, -1, -2))


MEANING: tuple[Callable[[Random, Grown, Bounds], None], ...] = (
    number_in_section,
    near_a_limit,
    item_twice,
    item_gone,
    section_of_another,
    other_kind,
    other_rows,
    other_page,
    other_key,
    runs_with_their_rows,
    unit_or_not,
    old_claim,
    far_extent,
    span_with_its_rows,
    many_gathers,
)
FORM: tuple[Callable[[Random, Case], None], ...] = (
    entry_word,
    a_count,
    payload_bits,
    payload_cut,
    payload_longer,
    other_position,
    over_the_end,
    sequence_of_another,
    head_elsewhere,
)


def mutate(rng: Random, grown: Grown, bounds: Bounds, sequence: int) -> Case:
    """One to three mutations of a valid record, most of its meaning: those get past the first checks."""
    record, done = grown.copy(), [grown.name]
    for _ in range(rng.choice((0, 1, 1, 1, 2, 3))):
        change = other_rows if record.kind == RESET and rng.random() < 0.5 else rng.choice(MEANING)
        change(rng, record, bounds)
        done.append(change.__name__)
    case = Case(*record.encode(sequence))
    if len(done) == 1 or rng.random() < 0.15:
        for _ in range(rng.choice((1, 1, 2))):
            distort = rng.choice(FORM)
            distort(rng, case)
            done.append(distort.__name__)
    case.done = tuple(done)
    return case


def _width(record: Grown, index: int) -> int:
    return 1 if index == RUNS and record.unit else WIDTHS[index]
