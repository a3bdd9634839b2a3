"""W4: one chain of states, one step at a time."""

from __future__ import annotations

from itertools import product

import pytest

from stagecache.writes import IllegalTransitionError, Write, WriteState

CHAIN = (WriteState.PENDING, WriteState.QUEUED, WriteState.COPYING, WriteState.HOST_READY, WriteState.WRITTEN)


def in_state(state: WriteState) -> Write:
    write = Write("step 7")
    if state is WriteState.FAILED:
        write.advance(state)
        return write
    for step in CHAIN[1 : CHAIN.index(state) + 1]:
        write.advance(step, sequence=9 if step is WriteState.HOST_READY else 0)
    return write


def is_allowed(now: WriteState, to: WriteState) -> bool:
    if to is WriteState.FAILED:
        return now not in (WriteState.WRITTEN, WriteState.FAILED)
    return now in CHAIN[:-1] and to is CHAIN[CHAIN.index(now) + 1]


@pytest.mark.parametrize(("now", "to"), list(product(WriteState, WriteState)), ids=lambda state: state.name)
def test_only_the_next_state_and_failure_are_allowed(now: WriteState, to: WriteState) -> None:
    write = in_state(now)
    if is_allowed(now, to):
        write.advance(to, cause="why")
        assert write.state is to
        assert (write.cause == "why") == (to is WriteState.FAILED)
    else:
        with pytest.raises(IllegalTransitionError, match=f"step 7.*{now.name}"):
            write.advance(to)
        assert write.state is now


def test_a_write_is_settled_once_the_daemon_has_consumed_its_record() -> None:
    write = in_state(WriteState.HOST_READY)
    assert not write.settled(8)
    assert write.state is WriteState.HOST_READY
    assert write.settled(9)
    assert write.state is WriteState.WRITTEN
    assert write.settled(0), "and stays so"


@pytest.mark.parametrize("state", [WriteState.PENDING, WriteState.QUEUED, WriteState.COPYING])
def test_a_write_without_a_record_is_never_settled(state: WriteState) -> None:
    write = in_state(state)
    assert not write.settled(1 << 40)
    assert write.state is state


def test_a_failed_write_is_settled() -> None:
    assert in_state(WriteState.FAILED).settled(0)
