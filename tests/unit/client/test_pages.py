"""W2: which page is free is derived from two facts, and a full house says who holds it."""

from __future__ import annotations

import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagecache.pages import FlushPages, PageUse, StepPages
from stagecache.writes import Write, WriteState

DEPTH = 3


class Log:
    """The daemon's progress, as the pages read it."""

    def __init__(self) -> None:
        self.consumed = 0
        self.listened = 0

    def listen(self, slice_s: float) -> None:
        self.listened += 1


def pages_and_log() -> tuple[StepPages, Log]:
    log = Log()
    return StepPages(DEPTH, log), log  # type: ignore[arg-type]


def claimed(pages: StepPages, step_id: int) -> PageUse:
    use = pages.try_claim(step_id)
    assert use is not None
    return use


events = st.lists(st.tuples(st.sampled_from(("claim", "log", "consume", "hand out")), st.integers(0, 9)), max_size=40)


@given(events)
def test_a_page_is_given_again_only_when_handed_out_and_consumed(history: list[tuple[str, int]]) -> None:
    pages, log = pages_and_log()
    holders: dict[int, PageUse] = {}
    sequence = step = 0
    for kind, choice in history:
        uses = list(holders.values())
        if kind == "claim":
            step += 1
            free = [p for p in range(DEPTH) if p not in holders or is_free(holders[p], log)]
            use = pages.try_claim(step)
            assert (use is None) == (not free), "a page was free, or none was"
            if use is not None:
                assert use.page in free
                holders[use.page] = use
        elif kind == "log" and uses:
            use = uses[choice % len(uses)]
            if use.sequence == 0 and not use.handed_out:
                sequence += 1
                use.sequence = sequence
        elif kind == "consume":
            log.consumed = min(sequence, log.consumed + choice % 3)
        elif kind == "hand out" and uses:
            pages.hand_out(uses[choice % len(uses)])


def is_free(use: PageUse, log: Log) -> bool:
    return use.handed_out and use.sequence <= log.consumed


def test_pages_are_used_in_turn() -> None:
    pages, _ = pages_and_log()
    first = claimed(pages, 1)
    pages.hand_out(first)
    assert [claimed(pages, step).page for step in (2, 3, 4)] == [1, 2, 0]


def test_a_step_that_was_never_logged_frees_its_page_when_it_is_consumed() -> None:
    pages, _ = pages_and_log()
    uses = [claimed(pages, step) for step in range(DEPTH)]
    assert pages.try_claim(9) is None
    pages.hand_out(uses[1])
    assert claimed(pages, 9).page == 1


def test_a_full_house_names_its_steps_records_and_writes() -> None:
    pages, log = pages_and_log()
    for step in range(1, 4):
        use = claimed(pages, step)
        use.sequence = 10 + step
        use.write = Write(f"step {step}")
        for state in (WriteState.QUEUED, WriteState.COPYING):
            use.write.advance(state)
        use.write.advance(WriteState.HOST_READY, sequence=use.sequence)
        if step != 2:
            pages.hand_out(use)
    log.consumed = 11
    error = pages.timeout_error(1.5)
    assert (error.unconsumed, error.outstanding) == ((2,), (12, 13))
    for part in ("1.5 s", "3 pages", "[2]", "[12, 13]", "step 3 HOST_READY", "staging_depth"):
        assert part in str(error)
    assert "step 1 " not in str(error), "its write is done"


def test_a_wait_ends_when_a_step_is_handed_out() -> None:
    pages, _ = pages_and_log()
    uses = [claimed(pages, step) for step in range(DEPTH)]
    started = time.monotonic()
    timer = threading.Timer(0.05, pages.hand_out, (uses[0],))
    timer.start()
    while pages.try_claim(9) is None:
        pages.wait(10.0)
    assert time.monotonic() - started < 5.0
    timer.join()


def test_a_wait_for_the_daemon_listens_to_it() -> None:
    pages, log = pages_and_log()
    for step in range(DEPTH):
        use = claimed(pages, step)
        use.sequence = step + 1
        pages.hand_out(use)
    pages.wait(10.0)
    assert log.listened == 1


def test_a_wait_does_not_sleep_where_a_page_is_free() -> None:
    pages, _ = pages_and_log()
    claimed(pages, 1)
    started = time.monotonic()
    pages.wait(30.0)
    assert time.monotonic() - started < 5.0


@given(st.lists(st.booleans(), max_size=30))
def test_a_flush_page_is_taken_again_only_when_its_flush_is_consumed(logs: list[bool]) -> None:
    """A page whose record could not be logged is free at once."""
    pages = FlushPages(2)
    sequence = 0
    owner = [0, 0]
    for logged in logs:
        needed = pages.next_free_at
        page = pages.take()
        assert owner[page] == needed
        if logged:
            sequence += 1
            pages.logged(page, sequence)
            owner[page] = sequence


@pytest.mark.parametrize("depth", [1, 4])
def test_flush_pages_are_used_in_turn(depth: int) -> None:
    pages = FlushPages(depth)
    assert [pages.take() for _ in range(2 * depth)] == [*range(depth), *range(depth)]
