"""The chain of a write's states, and what a stuck one looks like."""

from __future__ import annotations

import itertools

import pytest

from stagecache.writes import IllegalTransitionError, Write, WriteState

CHAIN = [
    WriteState.PENDING,
    WriteState.QUEUED,
    WriteState.COPYING,
    WriteState.HOST_READY,
    WriteState.WRITTEN,
]


def at(state: WriteState) -> Write:
    """A write that went all the way to ``state``."""
    write = Write("step 1")
    if state is WriteState.FAILED:
        write.advance(state, cause="broke")
        return write
    for later in CHAIN[1 : CHAIN.index(state) + 1]:
        write.advance(later)
    return write


@pytest.mark.parametrize(("now", "to"), list(itertools.product(WriteState, WriteState)))
def test_a_write_goes_one_step_along_the_chain_or_fails(now: WriteState, to: WriteState) -> None:
    """W4"""
    legal = (to == now + 1 and to in CHAIN) or (to is WriteState.FAILED and now < WriteState.WRITTEN)
    write = at(now)
    if legal:
        write.advance(to)
        assert write.state is to
    else:
        with pytest.raises(IllegalTransitionError, match="step 1"):
            write.advance(to)
        assert write.state is now


def test_written_is_seen_from_what_the_daemon_consumed() -> None:
    """W4: derived, so also after a restart."""
    write = at(WriteState.COPYING)
    write.advance(WriteState.HOST_READY, sequence=5)
    assert not write.settled(4)
    assert write.settled(5)
    assert write.state is WriteState.WRITTEN
    assert at(WriteState.FAILED).settled(0)
