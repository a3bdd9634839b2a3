"""Reads a scheduler output: who ends, who comes, who comes back, and which hits that makes (H2, H3, R1 to R3)."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from stagecache.errors import HitNotCoveredError, StageCacheError
from stagecache.hits import Hit
from stagecache.requests import RequestState, RequestTable
from stagecache.slots import span_runs
from stagecache.step import group_zero
from stagecache_wire.geometry import Geometry

logger = logging.getLogger("stagecache")


@dataclass(slots=True)
class StepPlan:
    """One step between new_step_starts and its save.

    source: the scheduler output. ended: requests that finished or were preempted, whose open rows are to be written.
    error: raised once everything else of the step was noted. publish: (block id, hash) pairs that its save makes full.
    """

    source: Any
    scheduled: dict[str, int]
    tokens: int
    ended: list[str] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)
    replaced: list[str] = field(default_factory=list)
    hits: list[Hit] = field(default_factory=list)
    error: StageCacheError | None = None
    publish: Sequence[tuple[int, bytes]] = ()


class StepPlanner:
    """Turns scheduler outputs into plans, and keeps the request table. Callers hold the cache's lock."""

    def __init__(self, requests: RequestTable, geometry: Geometry) -> None:
        self._requests = requests
        self._geometry = geometry

    def plan(self, source: Any, last_step_id: int, *, again: bool = False) -> StepPlan:
        """Note what a scheduler output says. last_step_id: id of the newest step saved. again: it may have been noted
        already, in part.
        """
        scheduled: dict[str, int] = source.num_scheduled_tokens
        plan = StepPlan(source, scheduled, int(source.total_num_scheduled_tokens))
        requests = self._requests
        for req_id in source.finished_req_ids or ():
            plan.ended.append(req_id)
            plan.finished.append(req_id)
            requests.finish(req_id, last_step_id)
        known = getattr(source, "stagecache_requests", None)
        if known is not None:
            self._finish_unknown(plan, known, last_step_id)
        for req_id in getattr(source, "preempted_req_ids", None) or ():
            state = requests.live.get(req_id)
            if state is not None:
                state.preempted = True
                plan.ended.append(req_id)
        for request in source.scheduled_new_reqs or ():
            self._new(plan, request, last_step_id)
        cached = source.scheduled_cached_reqs
        if cached is not None and cached.req_ids:
            self._cached(plan, cached, last_step_id, again=again)
        return plan

    def catch_up(self, missed: Sequence[Any], plan: StepPlan, last_step_id: int) -> None:
        """Note what the outputs of steps say that were interrupted before all of it was noted: who ended goes into
        ``plan``; their hits are nobody's any more. One that cannot be read is left out.
        """
        for source in missed:
            try:
                found = self.plan(source, last_step_id, again=True)
            except Exception as error:
                logger.warning("stagecache: a scheduler output cannot be read: %r", error)
                continue
            plan.ended += found.ended
            plan.finished += found.finished
            plan.replaced += found.replaced

    def _finish_unknown(self, plan: StepPlan, known: Iterable[str], last_step_id: int) -> None:
        """The scheduler has named all requests that it knows: others have ended, in an output that was lost."""
        for req_id in self._requests.live.keys() - set(known):
            plan.ended.append(req_id)
            plan.finished.append(req_id)
            self._requests.finish(req_id, last_step_id)

    def _new(self, plan: StepPlan, request: Any, last_step_id: int) -> None:
        req_id = request.req_id
        computed = int(request.num_computed_tokens or 0)
        blocks = group_zero(request.block_ids)
        state = self._requests.live.get(req_id)
        if state is None:
            state = self._requests.start(req_id, blocks)
            self._hit(plan, state, 0, computed, aligned=True)
        else:
            self._comeback(plan, state, blocks, computed, last_step_id, aligned=state.preempted)

    def _cached(self, plan: StepPlan, cached: Any, last_step_id: int, *, again: bool) -> None:
        live = self._requests.live
        resumed = cached.resumed_req_ids
        if not resumed and not any(cached.new_block_ids):
            return
        for index, new_blocks in enumerate(cached.new_block_ids):
            req_id = cached.req_ids[index]
            if req_id in resumed:
                state = live.get(req_id)
                blocks = group_zero(new_blocks)
                computed = int(cached.num_computed_tokens[index])
                if state is None:
                    state = self._requests.start(req_id, blocks)
                    self._hit(plan, state, 0, computed, aligned=True)
                else:
                    state.preempted = True
                    self._comeback(plan, state, blocks, computed, last_step_id, aligned=True)
            elif new_blocks and req_id in live:
                added, blocks = group_zero(new_blocks), live[req_id].blocks
                blocks.extend([block for block in added if block not in blocks] if again else added)

    def _comeback(
        self, plan: StepPlan, state: RequestState, blocks: list[int], computed: int, last_step_id: int, *, aligned: bool
    ) -> None:
        if not state.whole or state.blocks[: len(blocks)] != blocks[: len(state.blocks)]:
            plan.replaced.append(state.req_id)
        low = self._requests.comeback(state, blocks, computed, self._geometry.block_size, last_step_id)
        self._hit(plan, state, low, computed, aligned=aligned)

    def _hit(self, plan: StepPlan, state: RequestState, low: int, high: int, *, aligned: bool) -> None:
        """Note that positions [low, high) come from the pool; ``aligned``: high must end a block (H3)."""
        if high <= 0:
            return
        size, req_id = self._geometry.block_size, state.req_id
        count = plan.scheduled.get(req_id, 0)
        if count < 0:
            plan.error = StageCacheError(f"request {req_id}: a hit of {high} tokens with {count} scheduled tokens (S4)")
            return
        if aligned and high % size:
            plan.error = HitNotCoveredError(
                f"request {req_id}: a hit of {high} tokens does not end a block of {size}.",
                remedy="prefix_match_unit must equal block_size.",
            )
            return
        if len(state.blocks) * size < high:
            plan.error = HitNotCoveredError(
                f"request {req_id}: a hit of {high} tokens came with {len(state.blocks)} blocks of {size}.",
                remedy="The runner must pass the request's block ids with the hit.",
            )
            return
        blocks = state.blocks[: -(-high // size)]
        try:
            # Negative ids are found by their runs, which no word can hold: a look at each id less.
            inside = max(blocks) < self._geometry.num_blocks
            runs = span_runs(blocks, low, high, size) if inside else None
        except OverflowError:
            runs = None
        if runs is None:
            plan.error = HitNotCoveredError(
                f"request {req_id}: a hit names a block outside the cache of {self._geometry.num_blocks} blocks."
            )
            return
        if low < high:
            plan.hits.append(Hit(req_id, low, high, count, blocks, runs))
