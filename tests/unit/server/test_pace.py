"""When a consumer looks by itself: once a step where steps are regular, ever less where none comes, then never."""

from __future__ import annotations

import pytest

from stagecached.pace import FIRST_LOOK_S, LONGEST_LOOK_S, WARM_S, Pace


def looks_until(pace: Pace, now: float, end: float) -> list[float]:
    """Times of looks that find nothing, until ``end`` or until it sleeps."""
    looks = []
    while now < end and (wait_s := pace.next_look(now)) is not None:
        now += wait_s
        looks.append(now)
    return looks


@pytest.mark.parametrize("between_s", [0.002, 0.005, 0.01, 0.015])
def test_one_look_a_step_finds_regular_steps_soon(between_s: float) -> None:
    pace, now, late = Pace(0), 0.0, []
    looks = 0
    for step in range(1, 101):
        published_at = step * between_s
        while now < published_at:
            wait_s = pace.next_look(now)
            now = max(published_at, now) if wait_s is None else now + wait_s
            looks += 1
        pace.done(step, published_at, now)
        late.append(now - published_at)
    assert looks <= 115
    assert max(late[10:]) <= 0.3 * between_s


def test_many_records_at_once_count_each() -> None:
    pace = Pace(0)
    pace.done(1, 10.0, 10.0)
    pace.done(11, 10.1, 10.1)
    assert pace.next_look(10.1) == pytest.approx(0.0125)


def test_an_idle_consumer_looks_ever_less_and_then_sleeps() -> None:
    pace = Pace(0)
    pace.done(1, 5.0, 5.0)
    pace.done(2, 5.002, 5.002)
    looks = looks_until(pace, 5.002, 99.0)
    assert len(looks) <= 10
    waits = [after - before for before, after in zip([5.002, *looks], looks, strict=False)]
    assert waits == sorted(waits)
    assert waits[0] >= FIRST_LOOK_S
    assert waits[-1] <= LONGEST_LOOK_S + 1e-9
    assert 5.002 + WARM_S <= looks[-1] < 5.002 + WARM_S + LONGEST_LOOK_S + 1e-9
    assert pace.next_look(looks[-1]) is None


def test_before_any_record_it_sleeps() -> None:
    assert Pace(7).next_look(0.0) is None
    pace = Pace(7)
    pace.done(7, 3.0, 3.0)
    assert pace.next_look(3.0) is None


def test_a_first_record_after_long_is_no_pace() -> None:
    pace = Pace(0)
    pace.done(1, 1000.0, 1000.0)
    assert pace.next_look(1000.0) == LONGEST_LOOK_S
