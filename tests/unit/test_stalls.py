"""Time without progress, as far as this process was there to see it."""

from __future__ import annotations

from stagecached.watchdog import Stalls


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_time_adds_up_while_the_mark_stays_and_begins_anew_when_it_moves() -> None:
    clock = Clock()
    stalls = Stalls(1.0, clock)
    seen = []
    for mark in (7, 7, 7, 8, 8):
        clock.now += 1.0
        seen.append(stalls.look({"s": mark})["s"])
    assert seen == [0.0, 1.0, 2.0, 0.0, 1.0]


def test_what_has_no_work_is_forgotten() -> None:
    clock = Clock()
    stalls = Stalls(1.0, clock)
    for marks in ({"s": 1}, {"s": 1}, {}, {"s": 1}):
        clock.now += 1.0
        found = stalls.look(marks)
    assert found == {"s": 0.0}


def test_a_pause_of_the_process_counts_as_two_looks_at_most() -> None:
    clock = Clock()
    stalls = Stalls(1.0, clock)
    stalls.look({"s": 1})
    clock.now += 3600.0
    assert stalls.look({"s": 1}) == {"s": 2.0}
