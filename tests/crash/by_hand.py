"""Single steps on a load's cache, beside those of its workload: on blocks that the workload leaves alone."""

from __future__ import annotations

from typing import Any

import torch

from stagecache.step import CachedRequests, NewRequest, SchedulerStep
from tests.crash.load import Load
from tests.crash.workload import Part, Step


def begin(load: Load, parts: list[Part], *, new: bool = True, finished: tuple[str, ...] = ()) -> None:
    """new_step_starts of a step in which these requests arrive, or go on."""
    plan = SchedulerStep({part.req_id: part.count for part in parts if part.count}, finished_req_ids=set(finished))
    if new:
        plan.scheduled_new_reqs = [NewRequest(part.req_id, part.hit, (list(part.blocks),)) for part in parts]
    else:
        ids = [part.req_id for part in parts]
        plan.scheduled_cached_reqs = CachedRequests(ids, set(), [None] * len(ids), [part.first for part in parts])
    load.steps += 1
    load.unsaved = None
    load.cache.new_step_starts(plan)
    load.view.show(Step(plan, parts))


def hidden_of(load: Load, n: int) -> torch.Tensor:
    """float32 [n, 3]: row i of the step holds ``step * 100 + i``."""
    return (load.steps * 100 + torch.arange(n, dtype=torch.float32))[:, None].expand(n, 3).contiguous()


def save(
    load: Load,
    parts: list[Part],
    *,
    new: bool = True,
    finished: tuple[str, ...] = (),
    hidden: torch.Tensor | None = None,
    outputs: dict[str, Any] | None = None,
) -> int:
    """A whole step up to its save, with ``hidden_of`` where no hidden states are given; its id."""
    begin(load, parts, new=new, finished=finished)
    n = sum(part.count for part in parts)
    return load.cache.save_outputs(
        hidden_of(load, n) if hidden is None else hidden,
        outputs or {},
        num_tokens_unpadded=n,
        num_tokens_padded=n,
    )


def read(load: Load, step_id: int, req_id: str) -> list[float]:
    """First element of each hidden row that the step gives a request."""
    states = load.cache.materialize(step_id, [req_id]).hidden_states
    assert states is not None
    return states[req_id][:, 0].tolist()
