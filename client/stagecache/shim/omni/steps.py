"""Scheduler outputs in every form that vLLM-Omni gives its manager, as the one form that the cache reads.

0.30.0 passes the engine's scheduler output. 0.32.0rc1 passes a ``PrefixCacheStep`` that its adapter made of it; that
step has neither preemptions nor block ids of requests that go on, so the hooked runner's adapter
(``stagecache.shim.omni.adapter``) leaves the scheduler output on the step, and only callers with a bare step get the
translation here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stagecache.step import CachedRequests, NewRequest, SchedulerStep

_FIELDS = (
    "num_scheduled_tokens",
    "total_num_scheduled_tokens",
    "scheduled_new_reqs",
    "scheduled_cached_reqs",
    "finished_req_ids",
)


@dataclass
class OmniStep(SchedulerStep):
    """A step whose negative counts are nothing to do (S4)."""

    stagecache_epoch: int | None = None
    """Of the scheduler-side shim; None where there is none."""

    @property
    def total_num_scheduled_tokens(self) -> int:
        """Tokens of the step."""
        return sum(max(0, count) for count in self.num_scheduled_tokens.values())


def is_prefix_cache_step(step: Any) -> bool:
    """Whether this is 0.32.0rc1's translated step rather than a scheduler output."""
    return hasattr(step, "events") and hasattr(step, "scheduled_tokens")


class StepReader:
    """Makes scheduler outputs of what a manager is given; follows the positions that bare steps leave out."""

    def __init__(self) -> None:
        self._ends: dict[str, int] = {}

    def read(self, step: Any) -> Any:
        """The scheduler output of a step; vLLM's own object goes through as it is."""
        if is_prefix_cache_step(step):
            output = getattr(step, "scheduler_output", None)
            return self._from_events(step) if output is None else output
        if all(hasattr(step, name) for name in _FIELDS) and min(step.num_scheduled_tokens.values(), default=0) >= 0:
            return step
        return _completed(step)

    def _from_events(self, step: Any) -> OmniStep:
        counts = {req_id: int(count) for req_id, count in step.scheduled_tokens}
        output = OmniStep(counts)
        cached = output.scheduled_cached_reqs
        for event in step.events:
            kind, req_id = event.kind.value, event.req_id
            blocks = list(event.block_ids[0]) if event.block_ids else []
            if kind in ("finished", "aborted"):
                output.finished_req_ids.add(req_id)
                self._ends.pop(req_id, None)
            elif kind == "started":
                output.scheduled_new_reqs.append(NewRequest(req_id, event.hit_end, blocks))
                self._ends[req_id] = event.hit_end
            elif kind == "resumed":
                _add_cached(cached, req_id, event.hit_end, blocks)
                cached.resumed_req_ids.add(req_id)
                self._ends[req_id] = event.hit_end
        for req_id in step.extended_req_ids:
            _add_cached(cached, req_id, self._ends.get(req_id, 0), None)
        for req_id, count in counts.items():
            if req_id in self._ends:
                self._ends[req_id] += max(0, count)
        return output


def _add_cached(cached: CachedRequests, req_id: str, computed: int, blocks: list[int] | None) -> None:
    cached.req_ids.append(req_id)
    cached.new_block_ids.append(blocks)
    cached.num_computed_tokens.append(computed)


def _completed(output: Any) -> OmniStep:
    """A scheduler output that lacks fields, as vLLM-Omni's manager takes them too, with the missing ones empty."""
    counts: Mapping[str, int] = getattr(output, "num_scheduled_tokens", None) or {}
    completed = OmniStep(
        {req_id: int(count) for req_id, count in counts.items()},
        list(getattr(output, "scheduled_new_reqs", None) or ()),
        getattr(output, "scheduled_cached_reqs", None) or CachedRequests(),
        set(getattr(output, "finished_req_ids", None) or ()),
        getattr(output, "preempted_req_ids", None),
    )
    completed.stagecache_epoch = getattr(output, "stagecache_epoch", None)
    return completed
