"""The batch of a step: whose rows are where, and what is refused before anything is copied."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagecache.batch import BatchReader, scheduled_runs, start_positions
from stagecache.errors import SlotMismatchError, StepTooLargeError
from stagecache.requests import RequestTable
from stagecache.step import CachedRequests, NewRequest
from stagecache_wire.geometry import Geometry
from stagecache_wire.records import expand_runs

GEOMETRY = Geometry(32, 4, 16).checked()


class View:
    """A batch as the runner holds it: arrays that are longer than the batch."""

    def __init__(self) -> None:
        self.ids: list[str] = []
        self.first = np.zeros(8, np.int32)
        self.table = np.full((8, 4), 31, np.int32)

    def set(self, *rows: tuple[str, int, list[int]]) -> None:
        self.ids = [row[0] for row in rows]
        for index, (_, first, blocks) in enumerate(rows):
            self.first[index] = first
            self.table[index, : len(blocks)] = blocks

    def req_ids(self) -> list[str]:
        return self.ids

    def num_computed(self) -> np.ndarray[Any, Any]:
        return self.first

    def block_table(self) -> np.ndarray[Any, Any]:
        return self.table


@pytest.fixture
def view() -> View:
    return View()


@pytest.fixture
def requests() -> RequestTable:
    return RequestTable()


@pytest.fixture
def reader(view: View, requests: RequestTable) -> BatchReader:
    return BatchReader(view, GEOMETRY, requests)


def test_a_decode_step_has_a_row_a_request(view: View, reader: BatchReader) -> None:
    view.set(("a", 5, [3, 4]), ("b", 0, [9]))
    batch = reader.read({"a": 1, "b": 1}, 2, 2)
    assert (batch.counts, batch.offsets, batch.runs.tolist()) == (None, None, [17, 36])
    assert (batch.span(1), batch.spans()) == ((1, 2), [(0, 1), (1, 2)])
    assert (batch.first.tolist(), batch.ends.tolist()) == ([5, 0], [6, 1])


def test_a_mixed_step_has_rows_in_batch_order(view: View, reader: BatchReader) -> None:
    view.set(("a", 5, [3, 4]), ("idle", 2, [1]), ("b", 0, [9, 8]))
    batch = reader.read({"b": 5, "a": 1}, 6, 6)
    assert (batch.counts, batch.spans()) == ([1, 0, 5], [(0, 1), (1, 1), (1, 6)])
    assert batch.slots().tolist() == [17, 36, 37, 38, 39, 32]
    assert list(batch.ends) == [6, 2, 5]


def test_as_many_tokens_as_requests_is_not_yet_a_decode_step(view: View, reader: BatchReader) -> None:
    view.set(("a", 0, [3]), ("b", 4, [9, 8]))
    batch = reader.read({"a": 2}, 2, 2)
    assert (batch.counts, batch.slots().tolist()) == ([2, 0], [12, 13])
    batch = reader.read({"a": 1, "ghost": 1}, 1, 1)
    assert (batch.counts, batch.slots().tolist()) == ([1, 0], [12])


def test_a_negative_count_counts_as_none(view: View, reader: BatchReader) -> None:
    """S4"""
    view.set(("a", 0, [3]), ("b", 4, [9, 8]))
    assert reader.read({"a": 2, "b": -1}, 2, 2).counts == [2, 0]


@pytest.mark.parametrize(("planned", "tokens"), [(3, 4), (4, 3), (3, 3)])
def test_rows_that_the_slots_do_not_cover_are_refused(
    view: View, reader: BatchReader, planned: int, tokens: int
) -> None:
    """W6: the plan, the batch and the save must agree on the number."""
    view.set(("a", 0, [3]))
    with pytest.raises(SlotMismatchError, match=f"brought {tokens}"):
        reader.read({"a": 2}, planned, tokens)


def test_a_step_beyond_the_page_is_refused(view: View, reader: BatchReader) -> None:
    view.set(("a", 0, [1, 2, 3, 4]))
    assert reader.read({"a": 16}, 16, 16).tokens == 16
    with pytest.raises(StepTooLargeError, match=r"17 tokens.* 16"):
        reader.read({"a": 17}, 17, 17)


def test_a_position_beyond_the_table_is_refused(view: View, reader: BatchReader) -> None:
    view.set(("a", 15, [1, 2, 3, 4]))
    with pytest.raises(SlotMismatchError):
        reader.read({"a": 2}, 2, 2)


def test_a_batch_keeps_its_ids_though_the_live_one_changes(view: View, reader: BatchReader) -> None:
    """materialize may come when the batch is another."""
    view.set(("a", 0, [3]), ("b", 0, [4]))
    batch = reader.read({"a": 1, "b": 1}, 2, 2)
    view.ids.append("c")
    view.ids[0] = "z"
    assert batch.req_ids == ["a", "b"]


def test_the_next_decode_step_uses_the_same_ids_and_rows(
    view: View, reader: BatchReader, requests: RequestTable
) -> None:
    for name in ("a", "b"):
        requests.start(name, [1])
    view.set(("a", 0, [3]), ("b", 0, [4]))
    first = reader.read({"a": 1, "b": 1}, 2, 2)
    view.set(("a", 1, [3]), ("b", 1, [4]))
    second = reader.read({"a": 1, "b": 1}, 2, 2)
    assert second.req_ids is first.req_ids
    assert second.rows is first.rows
    assert second.first.tolist() == [1, 1]
    requests.finish("a", 0)
    row = requests.start("a", [1]).period.row
    assert reader.read({"a": 1, "b": 1}, 2, 2).rows.tolist()[0] == row, "another incarnation of the id"


def test_a_request_that_ran_before_the_attach_gets_a_row(
    view: View, reader: BatchReader, requests: RequestTable
) -> None:
    view.set(("old", 7, [3, 5]))
    assert reader.read({"old": 1}, 1, 1).rows.tolist() == [requests.live["old"].period.row]


@given(st.lists(st.tuples(st.integers(0, 11), st.integers(0, 9)), min_size=1, max_size=4))
def test_lost_slots_are_those_that_the_step_would_have_written(parts: list[tuple[int, int]]) -> None:
    """W8, from the scheduler's plan alone; positions beyond the known blocks are left out."""
    requests = RequestTable()
    scheduled, starts, expected = {}, {}, []
    for index, (start, count) in enumerate(parts):
        name = f"r{index}"
        blocks = [4 * index, 4 * index + 2, 4 * index + 1]
        requests.start(name, blocks)
        scheduled[name], starts[name] = count, start
        expected += [blocks[at // 4] * 4 + at % 4 for at in range(start, min(start + count, 12))]
    runs = scheduled_runs(scheduled, starts, requests, GEOMETRY)
    assert (expand_runs(runs).tolist() if len(runs) else []) == expected


def test_lost_slots_are_told_only_where_all_blocks_are_known() -> None:
    """W8: of a request that ran before the cache heard of it, nobody knows which blocks it writes."""
    requests = RequestTable()
    requests.start("known", [1])
    scheduled = {"known": 2, "nowhere": 1}
    assert expand_runs(scheduled_runs(scheduled, {"known": 1}, requests, GEOMETRY)).tolist() == [5, 6]
    for stranger in ("stranger", "late"):
        requests.start("late", [7], whole=False)
        with pytest.raises(SlotMismatchError, match=stranger):
            scheduled_runs({**scheduled, stranger: 3}, {"known": 1, stranger: 0}, requests, GEOMETRY)


def test_first_positions_are_of_all_that_an_output_names() -> None:
    cached = CachedRequests(["b"], set(), [None], [9])
    assert start_positions([NewRequest("a", 4, [1])], cached) == {"a": 4, "b": 9}
    assert start_positions([], None) == {}
