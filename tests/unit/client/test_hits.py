"""Gathers: how hits become records, and which part of a span a reader needs whole."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagecache.arena import Arena
from stagecache.errors import UnreadableHitError
from stagecache.hits import Hit, HitReader
from stagecache.policy import HIDDEN_KEY
from stagecache.slots import span_runs
from stagecache_wire.geometry import KeySchema
from stagecache_wire.records import GATHER_DTYPE, decode, encode, expand_runs
from stagecache_wire.results import Result
from tests.unit.client.key_kit import staged

SIZE = 4
HIDDEN = staged(0, KeySchema(HIDDEN_KEY, "float32", (2,)))
OTHER = staged(1, KeySchema("other", "uint8", (3,)))
RESULTS = 64


class Session:
    """What a reader needs of a session: the result table and the wait."""

    def __init__(self) -> None:
        self.results: dict[int, Result] = {}
        self.waited: list[int] = []
        self.control = SimpleNamespace(result=self.results.__getitem__, is_whole=self.is_whole)

    def is_whole(self, index: int, sequence: int) -> bool:
        result = self.results[index]
        return result.sequence == sequence and not result.unknown + result.absent + result.pending

    def wait_consumed(self, sequence: int, timeout_s: float, what: str, whose: str) -> None:
        self.waited.append(sequence)


def reader_of(arena_bytes: int = 1 << 16, results: int = RESULTS) -> tuple[HitReader, Session, Arena]:
    session, arena = Session(), Arena(np.zeros(arena_bytes, np.uint8))
    return HitReader(session, arena, SIZE, results), session, arena  # type: ignore[arg-type]


def hit_of(req_id: str, low: int, high: int, blocks: list[int], tail: int = 1) -> Hit:
    return Hit(req_id, low, high, tail, blocks, span_runs(blocks, low, high, SIZE))


spans = st.lists(
    st.lists(st.integers(0, 31), min_size=1, max_size=5).flatmap(
        lambda blocks: st.tuples(st.just(blocks), st.integers(1, len(blocks) * SIZE))
    ),
    min_size=1,
    max_size=6,
)


@given(spans)
def test_a_record_names_each_span_once_and_each_gather_its_own_extent(wanted: list[tuple[list[int], int]]) -> None:
    reader, _, _ = reader_of()
    hits = [hit_of(f"r{index}", 0, high, blocks) for index, (blocks, high) in enumerate(wanted)]
    planned = reader.plan(hits, [HIDDEN, OTHER])
    ((packed, part),) = reader.records(planned)
    record = decode(*encode(packed))
    assert part == planned
    assert len(record.spans) == len(hits)
    for hit, (first, count, rows, _) in zip(hits, record.spans.tolist(), strict=True):
        slots = expand_runs(record.span_runs[first : first + count]).tolist()
        assert slots == [hit.blocks[at // SIZE] * SIZE + at % SIZE for at in range(hit.high)]
        assert rows == hit.rows
    taken: list[tuple[int, int]] = []
    for (hit, gather), entry in zip(planned, record.gathers.tolist(), strict=True):
        span, key_id, result, zero, offset = entry
        assert (hits[span], key_id, zero) == (hit, gather.key.key_id, 0)
        assert gather.extent is not None
        assert gather.extent.size >= (hit.rows + hit.tail) * gather.key.schema.row_bytes
        assert all(offset >= end or offset + gather.extent.size <= start for start, end in taken)
        taken.append((offset, offset + gather.extent.size))
        assert 1 <= result < RESULTS, "entry 0 is for pieces"
    assert len({entry[2] for entry in record.gathers.tolist()}) == len(planned)


def test_a_hit_is_planned_once_a_key_and_again_for_a_new_one() -> None:
    reader, _, _ = reader_of()
    hit = hit_of("a", 0, 8, [1, 2])
    assert [gather.key for _, gather in reader.plan([hit], [HIDDEN])] == [HIDDEN]
    assert [gather.key for _, gather in reader.plan([hit], [HIDDEN, OTHER])] == [OTHER]


def test_many_gathers_are_several_records() -> None:
    reader, _, arena = reader_of(1 << 20, 2048)
    hits = [hit_of(f"r{index}", 0, 4, [index % 32]) for index in range(400)]
    planned = reader.plan(hits, [HIDDEN, OTHER])
    records = [(decode(*encode(packed)), part) for packed, part in reader.records(planned)]
    assert [len(record.gathers) for record, _ in records] == [512, 288]
    assert [pair for _, part in records for pair in part] == planned
    for record, _ in records:
        assert record.gathers.dtype == GATHER_DTYPE
        assert {int(span) for span in record.gathers["span"]} == set(range(len(record.spans)))
    reader.release(gather for _, gather in planned)
    assert arena.used_bytes == 0


def test_what_has_no_extent_or_no_result_is_not_in_a_record() -> None:
    reader, _, _ = reader_of(results=2)
    first, second = hit_of("a", 0, 4, [1]), hit_of("b", 0, 4, [2])
    planned = reader.plan([first, second], [HIDDEN])
    ((_, part),) = reader.records(planned)
    assert [hit for hit, _ in part] == [first]
    reader, _, _ = reader_of()
    huge = hit_of("a", 0, 4, [1], tail=1 << 14)
    assert reader.records(reader.plan([huge], [HIDDEN])) == []


def test_release_gives_extents_and_results_back_once() -> None:
    reader, _, arena = reader_of(results=3)
    planned = reader.plan([hit_of("a", 0, 4, [1])], [HIDDEN, OTHER])
    for _ in range(2):
        reader.release(gather for _, gather in planned)
    assert arena.used_bytes == 0
    again = reader.plan([hit_of("b", 0, 4, [1])], [HIDDEN, OTHER])
    assert len({gather.result for _, gather in again}) == 2


def answered(key: Any, **found: int) -> tuple[HitReader, Hit, Any]:
    """A hit on positions 4 to 11 whose record 9 was done with this result."""
    reader, session, _ = reader_of()
    hit = hit_of("a", 4, 12, [7, 3, 5])
    ((_, gather),) = reader.plan([hit], [key])
    reader.logged([(hit, gather)], 9)
    found = {"unknown_first": 8, "unknown_end": 0, "absent_first": 8, "absent_end": 0, **found}
    session.results[gather.result] = Result(9, key.key_id, 0, 8, **found)
    return reader, hit, gather


@pytest.mark.parametrize(
    ("found", "needed", "readable"),
    [
        ({}, (0, 99), True),
        ({"unknown": 1, "unknown_first": 2, "unknown_end": 3}, (0, 99), False),
        ({"unknown": 1, "unknown_first": 2, "unknown_end": 3}, (7, 99), True),
        ({"unknown": 1, "unknown_first": 2, "unknown_end": 3}, (6, 99), False),
        ({"unknown": 1, "unknown_first": 2, "unknown_end": 3}, (0, 6), True),
        ({"unknown": 1, "unknown_first": 2, "unknown_end": 3}, (0, 7), False),
        ({"pending": 1, "unknown_first": 0, "unknown_end": 1}, (4, 99), False),
        ({"absent": 1, "absent_first": 7, "absent_end": 8}, (0, 99), False),
        ({"absent": 1, "absent_first": 7, "absent_end": 8}, (0, 11), True),
    ],
)
def test_hidden_rows_that_are_needed_must_be_there(
    found: dict[str, int], needed: tuple[int, int], readable: bool
) -> None:
    """H4; only rows that would be handed out can make a hit unreadable."""
    reader, hit, gather = answered(HIDDEN, **found)
    if readable:
        assert len(reader.read(hit, gather, needed, 1.0)) == (hit.rows + hit.tail) * 8
        return
    with pytest.raises(UnreadableHitError) as caught:
        reader.read(hit, gather, needed, 1.0)
    assert (caught.value.req_id, caught.value.key) == ("a", HIDDEN_KEY)
    assert caught.value.slots
    assert all(slot // SIZE in hit.blocks for slot in caught.value.slots)


def test_absent_rows_of_another_key_are_zeros_and_no_error() -> None:
    """H5"""
    reader, hit, gather = answered(OTHER, absent=3, absent_first=0, absent_end=3)
    assert len(reader.read(hit, gather, (0, 99), 1.0)) == (hit.rows + hit.tail) * 3
    reader, hit, gather = answered(OTHER, unknown=1, unknown_first=0, unknown_end=1)
    with pytest.raises(UnreadableHitError, match="other"):
        reader.read(hit, gather, (0, 99), 1.0)


def test_the_error_names_request_key_and_slots() -> None:
    """H4"""
    reader, hit, gather = answered(HIDDEN, unknown=2, unknown_first=1, unknown_end=6)
    with pytest.raises(UnreadableHitError, match=r"request a .*2 unknown.*positions 5 and 9.*slots 13 to 21") as caught:
        reader.read(hit, gather, (0, 99), 1.0)
    assert "stagecache reset" in str(caught.value)


def test_a_result_of_another_record_gives_no_rows() -> None:
    reader, hit, gather = answered(HIDDEN)
    gather.sequence = 10
    with pytest.raises(Exception, match="record 9, expected 10"):
        reader.read(hit, gather, (0, 99), 1.0)


def test_an_error_that_was_noted_is_raised_instead_of_a_wait() -> None:
    reader, hit, gather = answered(HIDDEN)
    gather.error = UnreadableHitError("gone", req_id="a", key="k", slots=())
    with pytest.raises(UnreadableHitError, match="gone"):
        reader.read(hit, gather, (0, 99), 1.0)
