"""Keys that the daemon remembers of (model, stage) are a hint: the first rows of the session decide (K3)."""

from __future__ import annotations

from typing import Any

import torch

from stagecache import StageCache
from stagecache.step import NewRequest, SchedulerStep
from tests.integration.test_worked_example import GEOMETRY, OneRequest


def attach(daemon: Any, view: OneRequest) -> StageCache:
    return StageCache.attach(
        socket=daemon.socket, model="m", stage="memory", geometry=GEOMETRY, view=view, open_remembered_keys=True
    )


def prefill(
    cache: StageCache, view: OneRequest, req_id: str, key: torch.Tensor, computed: int, blocks: list[int]
) -> Any:
    """One step whose rows of key ``k`` are ``key``. Returns what the request gets of it."""
    count = len(key)
    cache.new_step_starts(SchedulerStep({req_id: count}, [NewRequest(req_id, computed, blocks)]))
    view.set(req_id, computed, blocks)
    step = cache.save_outputs(torch.zeros(count, 2), {"k": key}, num_tokens_unpadded=count, num_tokens_padded=count)
    return cache.materialize(step, [req_id]).mm_outputs["k"][req_id]


def test_a_remembered_key_is_open_at_attach_and_costs_no_call(daemon: Any) -> None:
    view = OneRequest()
    first = attach(daemon, view)
    prefill(first, view, "a", torch.arange(6), 0, [0, 1])
    first.close()
    second = attach(daemon, view)
    try:
        assert "k" in {key.schema.name for key in second.session.keys}
        calls = second.session.rpc.calls
        assert torch.equal(prefill(second, view, "b", torch.arange(6), 0, [0, 1]), torch.arange(6))
        assert second.session.rpc.calls == calls
    finally:
        second.close()


def test_a_remembered_key_of_another_shape_gives_way_to_the_rows_of_this_session(daemon: Any) -> None:
    """Also in the very step that hits: what was gathered for the old schema is dropped."""
    view = OneRequest()
    first = attach(daemon, view)
    prefill(first, view, "a", torch.arange(6), 0, [0, 1])
    first.close()
    second = attach(daemon, view)
    try:
        rows = torch.arange(24, dtype=torch.float32).view(6, 4)
        assert torch.equal(prefill(second, view, "b", rows, 0, [2, 3]), rows)
        merged = prefill(second, view, "c", rows[4:], 4, [2, 4])
        assert torch.equal(merged, rows), "the rows of the new schema are kept and hit"
    finally:
        second.close()
    third = attach(daemon, view)
    try:
        (key,) = (key for key in third.session.keys if key.schema.name == "k")
        assert key.schema.row_shape == (4,), "the memory has learned the new schema"
    finally:
        third.close()
