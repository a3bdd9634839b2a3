"""A materialize that is interrupted anywhere, as Ctrl-C does it: pages, extents, entries and request rows come back.
And no step enters a condition, where an interrupt may leave a lock that nobody gives back.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest
import torch

from stagecache import StageCache, rpc
from stagecache.arena import Arena
from stagecache.entries import Entries
from stagecache.interrupts import Latch, Wakeups
from stagecache.pages import PageUse
from stagecache.step import NewRequest, SchedulerStep
from tests.integration.test_session_ends import prefill
from tests.integration.test_worked_example import GEOMETRY, OneRequest
from tests.interrupts import Interrupter


@pytest.fixture
def cache(daemon: Any) -> Iterator[tuple[StageCache, OneRequest]]:
    view = OneRequest()
    made = StageCache.attach(socket=daemon.socket, model="m", stage="interrupted", geometry=GEOMETRY, view=view)
    yield made, view
    made.close()


def hit_step(cache: StageCache, view: OneRequest, req_id: str, ended: str) -> int:
    """A step that hits block 0, with hidden states and another key; another request ends in it."""
    cache.new_step_starts(SchedulerStep({req_id: 4}, [NewRequest(req_id, 4, [0, 1])], finished_req_ids={ended}))
    view.set(req_id, 4, [0, 1])
    rows = torch.arange(4, 8, dtype=torch.float32)[:, None].expand(4, 2)
    return cache.save_outputs(rows, {"other": rows.clone()}, num_tokens_unpadded=4, num_tokens_padded=4)


def test_whatever_interrupts_a_materialize_everything_comes_back(cache: tuple[StageCache, OneRequest]) -> None:
    """W7, S3: and the rows of the next step are right."""
    interrupt_everywhere(*cache)


def forget_extents(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Arena, "_drop", lambda self, ref: None)


def forget_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    give_back = Entries._drop
    monkeypatch.setattr(Entries, "_drop", lambda self, ref: give_back(self, ref) if ref() is not None else None)


def forget_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PageUse, "over", property(lambda use: use.handed_out))


@pytest.mark.parametrize("forget", [forget_extents, forget_entries, forget_pages])
def test_what_does_not_come_back_is_noticed(
    cache: tuple[StageCache, OneRequest],
    monkeypatch: pytest.MonkeyPatch,
    forget: Callable[[pytest.MonkeyPatch], None],
) -> None:
    """The control: where only the release itself gives things back, an interrupt in it keeps them."""
    forget(monkeypatch)
    with pytest.raises(AssertionError, match=r"\.py:\d+ "):
        interrupt_everywhere(*cache)


def interrupt_everywhere(made: StageCache, view: OneRequest) -> None:
    """
    Raises:
        AssertionError: something did not come back; the text says where the interrupt was.
    """
    rows = torch.arange(4, dtype=torch.float32)[:, None].expand(4, 2)
    made.discard_step(prefill(made, view, "a", 0, [0], other=rows.clone()))
    ended, total = "a", 0
    counter = Interrupter(0)
    step = hit_step(made, view, "count", ended)
    assert not counter.run(lambda: made.materialize(step, ["count"]))
    ended = "count"
    assert counter.seen > 100, "the interrupt has many places to be"
    places = set()
    for nth in range(1, counter.seen + 1):
        req_id = f"r{nth}"
        step = hit_step(made, view, req_id, ended)
        interrupter = Interrupter(nth)
        total += interrupter.run(lambda step=step, req_id=req_id: made.materialize(step, [req_id]))
        places.add(interrupter.where)
        ended = req_id
        if step in made._steps:  # it came before the step was taken: nothing has happened
            made.discard_step(step)
        assert made._arena.leases == 0, interrupter.where
        assert made._hits.entries.taken == 0, interrupter.where
        made._arena.collect()
        assert made._arena.used_bytes == made._arena.leased_bytes == 0, interrupter.where
        assert made._saver.pages.unconsumed() == [], interrupter.where
        if nth % 16 == 0:
            check = hit_step(made, view, f"check{nth}", ended)
            ended = f"check{nth}"
            outputs = made.materialize(check, [ended])
            assert outputs.hidden_states is not None
            for tensors in (outputs.hidden_states, outputs.mm_outputs["other"]):
                assert tensors[ended][:, 0].tolist() == list(range(8)), interrupter.where
            del outputs, tensors
    assert total > 0.9 * counter.seen
    assert len(places) > 50
    made.discard_step(hit_step(made, view, "last", ended))
    assert len(made._requests.live) == 1
    assert not made._requests.retired, "rows of the request table are reused"
    assert gc.garbage == []


def conditions_entered(call: Callable[[], object]) -> int:
    """How often this thread enters a condition in ``call``."""
    entered = 0

    def profile(frame: FrameType, event: str, _: Any) -> None:
        nonlocal entered
        entered += event == "call" and frame.f_code is threading.Condition.__enter__.__code__

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return entered


def steps_with_a_new_key(made: StageCache, view: OneRequest) -> None:
    """The key is opened by a call; the hit is waited for."""
    made.discard_step(prefill(made, view, "a", 0, [0], other=torch.zeros(4, 2)))
    made.materialize(hit_step(made, view, "b", "a"), ["b"])


def test_the_engine_thread_enters_no_condition(cache: tuple[StageCache, OneRequest]) -> None:
    """Neither of the client nor of gRPC: locked for good, it would stop the watch of the session, and every call."""
    assert conditions_entered(lambda: steps_with_a_new_key(*cache)) == 0


def test_a_call_on_the_engine_thread_itself_is_noticed(
    cache: tuple[StageCache, OneRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control."""
    monkeypatch.setattr(rpc, "uninterrupted", lambda call: call())
    assert conditions_entered(lambda: steps_with_a_new_key(*cache)) > 0


def test_waits_of_the_client_enter_no_condition() -> None:
    latch, wakeups, event = Latch(), Wakeups(), threading.Event()
    assert conditions_entered(lambda: latch.wait(0.001)) == 0
    assert conditions_entered(latch.set) == 0
    assert conditions_entered(lambda: wakeups.sleeper()(0.001)) == 0
    assert conditions_entered(wakeups.wake) == 0
    assert conditions_entered(lambda: event.wait(0.001)) > 0, "the control"
