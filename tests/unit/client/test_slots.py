"""Runs of a batch and of a hit, held against counting slot by slot."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagecache.errors import SlotMismatchError
from stagecache.slots import batch_runs, count_slots, decode_slots, few_runs, merge_runs, span_runs
from stagecache_wire.records import expand_runs

NUM_BLOCKS = 40


@st.composite
def batches(draw: st.DrawFn) -> tuple[np.ndarray, list[int], list[int], int]:
    """Block table, first positions, counts (some 0) and block size, all inside the table."""
    size = draw(st.integers(1, 7))
    width = draw(st.integers(1, 6))
    requests = draw(st.integers(1, 6))
    table = draw(
        st.lists(
            st.lists(st.integers(0, NUM_BLOCKS - 1), min_size=width, max_size=width),
            min_size=requests,
            max_size=requests,
        )
    )
    first, counts = [], []
    for _ in range(requests):
        start = draw(st.integers(0, width * size - 1))
        first.append(start)
        counts.append(draw(st.integers(0, width * size - start)))
    return np.array(table, np.int32), first, counts, size


def slot_of(blocks: list[int], position: int, size: int) -> int:
    return blocks[position // size] * size + position % size


@given(batches())
def test_runs_of_a_batch_name_each_rows_slot_in_order(batch: tuple[np.ndarray, list[int], list[int], int]) -> None:
    table, first, counts, size = batch
    runs = batch_runs(table, np.array(first), np.array(counts), size, NUM_BLOCKS)
    expected = [
        slot_of(table[row].tolist(), position, size)
        for row in range(len(first))
        for position in range(first[row], first[row] + counts[row])
    ]
    assert runs.dtype == np.uint32
    assert expand_runs(runs).tolist() == expected
    assert count_slots(runs) == len(expected)
    joined = [(a, b) for a, b in zip(runs.tolist(), runs.tolist()[1:], strict=False) if a[0] + a[1] == b[0]]
    assert not joined, "runs that follow each other are one"


@given(batches())
def test_a_decode_step_names_one_slot_a_request(batch: tuple[np.ndarray, list[int], list[int], int]) -> None:
    table, first, _, size = batch
    slots = decode_slots(table, np.array(first), size, NUM_BLOCKS)
    assert slots.tolist() == [slot_of(table[row].tolist(), at, size) for row, at in enumerate(first)]
    assert count_slots(slots) == len(first)


@given(st.lists(st.integers(0, NUM_BLOCKS - 1), min_size=1, max_size=8), st.integers(1, 7), st.data())
def test_runs_of_a_span_name_its_positions(blocks: list[int], size: int, data: st.DataObject) -> None:
    high = data.draw(st.integers(0, len(blocks) * size))
    low = data.draw(st.integers(0, high))
    runs = np.frombuffer(span_runs(blocks, low, high, size), np.uint32).reshape(-1, 2)
    expected = [slot_of(blocks, at, size) for at in range(low, high)]
    if expected:
        assert expand_runs(runs).tolist() == expected
    else:
        assert count_slots(runs) == 0


def test_runs_of_a_long_span_name_its_positions() -> None:
    blocks = [(7 * at) % 1009 for at in range(600)]
    runs = np.frombuffer(span_runs(blocks, 5, 600 * 4 - 3, 4), np.uint32).reshape(-1, 2)
    assert expand_runs(runs).tolist() == [slot_of(blocks, at, 4) for at in range(5, 600 * 4 - 3)]


@pytest.mark.parametrize("blocks", [[3, -1, 5], [*range(0, 1200, 2), -1]])
def test_a_block_that_no_slot_can_have_is_refused(blocks: list[int]) -> None:
    """H3: the planner refuses a hit by it."""
    with pytest.raises(OverflowError):
        span_runs(blocks, 0, 4 * len(blocks), 4)


@given(batches())
def test_a_small_batch_has_the_runs_of_any_batch(batch: tuple[np.ndarray, list[int], list[int], int]) -> None:
    table, first, counts, size = batch
    runs = batch_runs(table, np.array(first), np.array(counts), size, NUM_BLOCKS)
    assert few_runs(table, first, counts, size, NUM_BLOCKS).tolist() == runs.tolist()


@given(st.lists(st.tuples(st.integers(0, 100), st.integers(1, 9)), max_size=12))
def test_merged_runs_name_the_same_slots_in_the_same_order(pairs: list[tuple[int, int]]) -> None:
    starts = np.array([start for start, _ in pairs], np.int64)
    lengths = np.array([length for _, length in pairs], np.int64)
    expected = [slot for start, length in pairs for slot in range(start, start + length)]
    merged = merge_runs(starts, lengths)
    assert expand_runs(merged).tolist() == expected
    assert len(merged) <= len(pairs)


def test_contiguous_blocks_are_one_run_whatever_they_are_many() -> None:
    table = np.arange(32, dtype=np.int32)[None]
    assert batch_runs(table, np.array([3]), np.array([2048 - 3]), 64, 64).tolist() == [[3, 2045]]


@pytest.mark.parametrize("bad", [-1, NUM_BLOCKS, 1 << 30])
def test_a_block_outside_the_cache_is_refused(bad: int) -> None:
    """W6"""
    table = np.array([[0, bad]], np.int64)
    with pytest.raises(SlotMismatchError, match="block ids"):
        batch_runs(table, np.array([0]), np.array([8]), 4, NUM_BLOCKS)
    with pytest.raises(SlotMismatchError, match="block ids"):
        decode_slots(table, np.array([5]), 4, NUM_BLOCKS)
    assert count_slots(batch_runs(table, np.array([0]), np.array([4]), 4, NUM_BLOCKS)) == 4, (
        "not touched, not looked at"
    )


def test_a_position_beyond_the_table_is_refused() -> None:
    """W6"""
    table = np.zeros((1, 2), np.int32)
    with pytest.raises(SlotMismatchError, match="position 8"):
        batch_runs(table, np.array([7]), np.array([2]), 4, NUM_BLOCKS)
    with pytest.raises(SlotMismatchError, match="position 8"):
        decode_slots(table, np.array([8]), 4, NUM_BLOCKS)


def test_a_batch_without_tokens_has_no_runs() -> None:
    runs = batch_runs(np.zeros((2, 1), np.int32), np.array([0, 0]), np.array([0, -3]), 4, NUM_BLOCKS)
    assert (runs.shape, count_slots(runs)) == ((0, 2), 0)
