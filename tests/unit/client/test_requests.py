"""R3: how far a request's rows were handed out, over comebacks and in any order of consumption."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from stagecache.requests import NO_END, RequestTable

SIZE = 4
BLOCKS = [7, 3, 9, 1, 5, 2]


@dataclass
class Step:
    """A saved step of the one request: it would hand out [start, end)."""

    row: int
    period: int
    start: int
    end: int


actions = st.one_of(
    st.tuples(st.just("step"), st.integers(1, 6), st.just(0)),
    st.tuples(st.just("preempted"), st.integers(0, 4), st.integers(1, 6)),
    st.tuples(st.just("again"), st.integers(0, 20), st.integers(1, 6)),
    st.tuples(st.just("consume"), st.integers(0, 5), st.integers(0, 3)),
)


@given(st.lists(actions, max_size=24))
def test_positions_go_out_once_but_where_a_continuation_asks_again(
    history: list[tuple[str, int, int]],
) -> None:
    """Held against the plain rule: what another period of the request handed out is not handed out again, except, to a
    newer period, from where a continuation (not a preemption) between the two began."""
    table = RequestTable()
    state = table.start("r", list(BLOCKS))
    computed = entering = 0
    open_steps: list[Step] = []
    caps: list[int | None] = [None]
    handed: list[set[int]] = [set()]

    def save(count: int) -> None:
        nonlocal computed, entering
        end = min(computed + count, len(BLOCKS) * SIZE)
        open_steps.append(Step(state.period.row, len(caps) - 1, entering, end))
        computed = entering = end

    def taken(period: int) -> set[int]:
        found = set().union(*handed[period + 1 :])
        for earlier in range(period):
            cap = min((cap for cap in caps[earlier + 1 : period + 1] if cap is not None), default=NO_END)
            found |= {position for position in handed[earlier] if position < cap}
        return found

    for kind, a, b in history:
        if kind == "step":
            save(a)
        elif kind == "consume" and open_steps:
            step = open_steps.pop(a % len(open_steps))
            if b == 0:
                continue  # discarded: it moves nothing
            low, high = windows(table, step.row)
            begin = max(step.start, low)
            end = max(begin, min(step.end, high))
            assert taken(step.period).isdisjoint(range(begin, end))
            handed[step.period] |= set(range(begin, end))
            if end > begin:
                table.handed_out(step.row, begin, end)
        elif kind in ("preempted", "again"):
            hit = min(a * SIZE, computed // SIZE * SIZE) if kind == "preempted" else min(a, computed)
            state.preempted = kind == "preempted"
            low = table.comeback(state, list(BLOCKS), hit, SIZE, 0)
            caps.append(None if kind == "preempted" else hit)
            handed.append(set())
            assert low <= max([0, *(position + 1 for positions in handed for position in positions)])
            assert kind == "preempted" or low <= hit
            computed, entering = hit, 0
            save(b)


def windows(table: RequestTable, row: int) -> tuple[int, int]:
    period = table.period_of(row)
    return table.low(period), table.high(period)


def test_a_request_that_never_came_back_is_not_clipped() -> None:
    table = RequestTable()
    row = table.start("r", [0]).period.row
    table.handed_out(row, 4, 8)
    assert windows(table, row) == (0, NO_END)
    assert table.chained == 0


def test_a_continuation_is_cut_to_where_it_begins() -> None:
    """`a@0+8 delivered, again @8+4` gives 8..11; again at 5 gives from 5."""
    table = RequestTable()
    state = table.start("r", [0, 1])
    table.handed_out(state.period.row, 0, 8)
    assert table.comeback(state, [0, 1, 2], 8, SIZE, 1) == 8
    table.handed_out(state.period.row, 8, 12)
    assert table.comeback(state, [0, 1, 2], 5, SIZE, 2) == 5


def test_a_preempted_request_is_not_cut() -> None:
    """`a@0+8 delivered, preempted, resumed hit 4 @4+6` gives 8, 9."""
    table = RequestTable()
    state = table.start("r", [0, 1])
    table.handed_out(state.period.row, 0, 8)
    state.preempted = True
    assert table.comeback(state, [4, 5, 6], 4, SIZE, 1) == 8
    assert not state.preempted


def test_exchanged_blocks_are_a_replaced_prompt() -> None:
    table = RequestTable()
    state = table.start("r", [0, 1])
    old = state.period.row
    table.handed_out(old, 0, 8)
    assert table.comeback(state, [0, 9], 8, SIZE, 1) == 0
    assert windows(table, old) == (0, NO_END), "old and new do not cut each other"


def test_blocks_beyond_the_hit_may_change() -> None:
    table = RequestTable()
    state = table.start("r", [0, 1, 2])
    table.handed_out(state.period.row, 0, 4)
    assert table.comeback(state, [0, 8, 9], 4, SIZE, 1) == 4


def test_an_older_step_ends_where_a_newer_period_began() -> None:
    table = RequestTable()
    state = table.start("r", [0, 1])
    old = state.period.row
    state.preempted = True
    table.comeback(state, [0, 1], 4, SIZE, 1)
    table.handed_out(state.period.row, 2, 6)
    assert windows(table, old) == (0, 2)


def test_rows_are_reused_only_when_no_open_step_needs_them() -> None:
    table = RequestTable()
    row = table.start("a", []).period.row
    table.finish("a", last_step_id=5)
    table.reclaim(5)
    assert table.period_of(row) is not None, "step 5 is not consumed yet"
    table.reclaim(6)
    assert table.start("b", []).period.row == row
    assert table.delivered[row] == 0


def test_the_table_grows_and_stays_small() -> None:
    """Thousands of requests, sixty at once: the rows of those that ended serve again."""
    table = RequestTable()
    for number in range(3000):
        state = table.start(f"r{number}", [0])
        state.preempted = number % 3 == 0
        if number % 5 == 0:
            table.comeback(state, [0], 0, SIZE, number)
        if number >= 60:
            table.finish(f"r{number - 60}", number)
        table.reclaim(number)
    assert len(table.live) == 60
    assert len(table.delivered) <= 256
    assert table.chained == sum(len(state.period.chain) > 1 for state in table.live.values())


def test_growth_keeps_what_was_delivered() -> None:
    table = RequestTable()
    rows = [table.start(f"r{number}", []).period.row for number in range(200)]
    table.handed_out_all(np.array(rows), np.arange(200))
    more = [table.start(f"s{number}", []).period.row for number in range(200)]
    assert len({*rows, *more}) == 400
    assert table.delivered[rows].tolist() == list(range(200))


def test_a_request_that_ends_is_gone_at_once() -> None:
    table = RequestTable()
    version = table.version
    table.start("a", [1])
    assert table.finish("a", 0) is not None
    assert table.finish("a", 0) is None
    assert "a" not in table.live
    assert table.version > version


def test_acks_move_what_was_handed_out_and_no_further() -> None:
    table = RequestTable(explicit_acks=True)
    state = table.start("a", [0, 1])
    table.handed_out(state.period.row, 0, 6)
    assert int(table.delivered[state.period.row]) == 0
    table.ack("a", 4)
    table.ack("a", 2)
    assert int(table.delivered[state.period.row]) == 4
    table.ack("a", 100)
    assert int(table.delivered[state.period.row]) == 6
    table.ack("gone", 5)
    assert table.comeback(state, [0, 1], 8, SIZE, 1) == 6
