"""Steps in every form that vLLM-Omni gives its manager, and views that know only slots."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from stagecache.errors import SlotMismatchError, StageCacheError
from stagecache.shim.omni.errors import as_omni
from stagecache.shim.omni.steps import StepReader
from stagecache.shim.omni.view import OmniBatchView


def event(kind: str, req_id: str, hit_end: int = 0, blocks: tuple[int, ...] = ()) -> SimpleNamespace:
    return SimpleNamespace(
        kind=SimpleNamespace(value=kind), req_id=req_id, hit_end=hit_end, block_ids=(blocks,) if blocks else ()
    )


def step(*events: SimpleNamespace, extended: tuple[str, ...] = (), **counts: int) -> SimpleNamespace:
    return SimpleNamespace(events=events, scheduled_tokens=tuple(counts.items()), extended_req_ids=extended)


def test_bare_steps_become_scheduler_outputs_with_the_positions_they_leave_out() -> None:
    reader = StepReader()
    first = reader.read(step(event("started", "a", 8, (3, 4)), a=2))
    assert [(new.req_id, new.num_computed_tokens, new.block_ids) for new in first.scheduled_new_reqs] == [
        ("a", 8, [3, 4])
    ]
    assert first.total_num_scheduled_tokens == 2
    second = reader.read(step(extended=("a",), a=1))
    assert second.scheduled_cached_reqs.num_computed_tokens == [10]
    assert second.scheduled_cached_reqs.new_block_ids == [None]
    third = reader.read(step(event("resumed", "a", 4, (7,)), a=3))
    assert third.scheduled_cached_reqs.resumed_req_ids == {"a"}
    assert third.scheduled_cached_reqs.new_block_ids == [[7]]
    assert reader.read(step(extended=("a",), a=1)).scheduled_cached_reqs.num_computed_tokens == [7]


def test_the_end_of_a_request_comes_before_its_new_start() -> None:
    """R2"""
    reader = StepReader()
    reader.read(step(event("started", "a"), a=5))
    again = reader.read(step(event("finished", "a"), event("started", "a", 4, (1,)), a=2))
    assert again.finished_req_ids == {"a"}
    assert reader.read(step(event("aborted", "a"))).finished_req_ids == {"a"}
    assert reader.read(step(extended=("a",), a=1)).scheduled_cached_reqs.num_computed_tokens == [0]


def test_a_scheduler_output_goes_through_as_it_is() -> None:
    output = SimpleNamespace(
        num_scheduled_tokens={"a": 1},
        total_num_scheduled_tokens=1,
        scheduled_new_reqs=[],
        scheduled_cached_reqs=None,
        finished_req_ids=set(),
    )
    assert StepReader().read(output) is output


def test_a_scheduler_output_that_lacks_fields_is_completed() -> None:
    """As vLLM-Omni's manager takes them; what the scheduler's side of the shim added stays."""
    read = StepReader().read(SimpleNamespace(num_scheduled_tokens={"a": 2, "b": -1}, stagecache_epoch=3))
    assert (read.total_num_scheduled_tokens, read.finished_req_ids, read.stagecache_epoch) == (2, set(), 3)
    assert read.scheduled_cached_reqs.req_ids == []


class Slots:
    """A view of two requests at positions 5.. and 0.., with blocks [2, 9] and [4]."""

    block_size = 4

    def __init__(self, slots: list[int]) -> None:
        self.slots = slots

    def batch_req_ids(self) -> list[str]:
        return ["a", "b"]

    def step_slots_cpu(self, req_ids: list[str], num_scheduled: dict[str, int]) -> torch.Tensor:
        return torch.tensor(self.slots)


def begun(slots: list[int]) -> OmniBatchView:
    view = OmniBatchView(4, Slots(slots))
    new = [SimpleNamespace(req_id=req_id, num_computed_tokens=first) for req_id, first in (("a", 5), ("b", 0))]
    view.begin(
        SimpleNamespace(num_scheduled_tokens={"a": 4, "b": 2}, scheduled_new_reqs=new, scheduled_cached_reqs=None)
    )
    return view


def test_slots_alone_give_positions_and_blocks() -> None:
    view = begun([37, 38, 39, 12, 16, 17])
    assert view.req_ids() == ["a", "b"]
    assert view.num_computed().tolist() == [5, 0]
    table = view.block_table()
    assert (table[0, 1], table[0, 2], table[1, 0]) == (9, 3, 4)


@pytest.mark.parametrize("slots", [[37, 38, 39, 13, 16, 17], [37, 38, 39, 12, 16]])
def test_slots_that_do_not_follow_positions_are_refused(slots: list[int]) -> None:
    """W6"""
    with pytest.raises(SlotMismatchError):
        begun(slots).block_table()


def test_a_view_is_needed() -> None:
    with pytest.raises(StageCacheError, match="write_layout"):
        OmniBatchView(4).req_ids()


def test_a_layout_gives_the_batch() -> None:
    view = OmniBatchView(4)
    view.begin(SimpleNamespace(num_scheduled_tokens={"a": 2}, scheduled_new_reqs=(), scheduled_cached_reqs=None))
    writes = [SimpleNamespace(req_id="a", row_start=0, row_end=2)]
    view.use_layout(SimpleNamespace(writes=writes, slots_cpu=np.array([10, 11])))
    assert (view.req_ids(), view.num_computed().tolist(), view.block_table().tolist()) == (["a"], [2], [[2]])


def test_an_error_keeps_its_own_class_text_and_attributes() -> None:
    from vllm_omni.core.prefix_cache import OmniPrefixCacheStagingTimeoutError

    from stagecache.errors import StagingTimeoutError

    error = StagingTimeoutError("full.", unconsumed=[3], outstanding=[], remedy="Consume.")
    assert as_omni(error) is error
    assert isinstance(error, OmniPrefixCacheStagingTimeoutError)
    assert isinstance(error, StagingTimeoutError)
    assert (type(error).__name__, str(error), error.unconsumed) == ("StagingTimeoutError", "full. Consume.", (3,))
