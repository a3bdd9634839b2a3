"""What a scheduler output means: who ends, who comes, who comes back, and which hits that makes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from stagecache.errors import HitNotCoveredError, StageCacheError
from stagecache.planner import StepPlan, StepPlanner
from stagecache.requests import RequestTable
from stagecache.step import CachedRequests, NewRequest, SchedulerStep
from stagecache_wire.geometry import Geometry
from stagecache_wire.records import expand_runs

GEOMETRY = Geometry(32, 4, 64).checked()


class Stage:
    """A planner and its table."""

    def __init__(self) -> None:
        self.requests = RequestTable()
        self.planner = StepPlanner(self.requests, GEOMETRY)
        self.step_id = 0

    def plan(self, *new: NewRequest, counts: dict[str, int] | None = None, **fields: Any) -> StepPlan:
        self.step_id += 1
        step = SchedulerStep({request.req_id: 1 for request in new} if counts is None else counts, list(new), **fields)
        return self.planner.plan(step, self.step_id - 1)

    def blocks(self, req_id: str) -> list[int]:
        return self.requests.live[req_id].blocks


@pytest.fixture
def stage() -> Stage:
    return Stage()


def cached(*entries: tuple[str, Any, int], resumed: set[str] | None = None) -> CachedRequests:
    return CachedRequests(
        [entry[0] for entry in entries], resumed or set(), [entry[1] for entry in entries], [e[2] for e in entries]
    )


def spans(plan: StepPlan) -> dict[str, tuple[int, int, int, list[int]]]:
    return {
        hit.req_id: (
            hit.low,
            hit.high,
            hit.tail,
            expand_runs(np.frombuffer(hit.runs, np.uint32).reshape(-1, 2)).tolist(),
        )
        for hit in plan.hits
    }


def test_an_arrival_without_a_hit_makes_none(stage: Stage) -> None:
    """H1"""
    plan = stage.plan(NewRequest("a", 0, [1, 2]))
    assert (plan.hits, plan.error, plan.ended, plan.tokens) == ([], None, [], 1)
    assert stage.blocks("a") == [1, 2]


def test_an_arrival_with_computed_tokens_is_a_hit(stage: Stage) -> None:
    """H2"""
    plan = stage.plan(NewRequest("a", 8, [5, 2, 9]), counts={"a": 3})
    assert spans(plan) == {"a": (0, 8, 3, [20, 21, 22, 23, 8, 9, 10, 11])}
    assert plan.hits[0].blocks == [5, 2]
    assert plan.hits[0].rows == 8


@pytest.mark.parametrize("blocks", [[3, 4], ([3, 4],), ([3, 4], [9, 9]), (3, 4)])
def test_block_ids_are_those_of_group_zero(stage: Stage, blocks: Any) -> None:
    stage.plan(NewRequest("a", 0, blocks))
    assert stage.blocks("a") == [3, 4]


@pytest.mark.parametrize(
    ("computed", "blocks", "match"),
    [
        (6, [1, 2], "end a block of 4"),
        (8, [1], "1 blocks"),
        (8, [], "0 blocks"),
        (4, [32], "outside"),
        (4, [-1], "outside"),
    ],
)
def test_a_hit_that_is_not_covered_is_an_error_of_the_step(
    stage: Stage, computed: int, blocks: list[int], match: str
) -> None:
    """H3; whatever else the step says is noted all the same."""
    stage.plan(NewRequest("old", 0, [7]))
    plan = stage.plan(NewRequest("a", computed, blocks), NewRequest("b", 0, [5]), finished_req_ids={"old"})
    assert isinstance(plan.error, HitNotCoveredError)
    assert match in str(plan.error)
    assert "a" in str(plan.error)
    assert plan.hits == []
    assert sorted(stage.requests.live) == ["a", "b"]


def test_a_hit_with_a_negative_count_is_an_error(stage: Stage) -> None:
    """S4"""
    plan = stage.plan(NewRequest("a", 4, [1]), counts={"a": -1})
    assert type(plan.error) is StageCacheError
    assert stage.plan(NewRequest("b", 0, [1]), counts={"b": -1}).error is None


def test_finish_comes_before_a_start_of_the_same_id(stage: Stage) -> None:
    """R2"""
    stage.plan(NewRequest("a", 0, [1, 2]))
    plan = stage.plan(NewRequest("a", 4, [9]), finished_req_ids={"a"})
    assert (plan.ended, plan.finished) == (["a"], ["a"])
    assert spans(plan)["a"][:2] == (0, 4)
    assert stage.blocks("a") == [9]


def test_preemption_ends_what_is_open_and_keeps_the_request(stage: Stage) -> None:
    stage.plan(NewRequest("a", 0, [1, 2]))
    plan = stage.plan(preempted_req_ids={"a", "stranger"})
    assert (plan.ended, plan.finished) == (["a"], [])
    assert stage.requests.live["a"].preempted


def test_a_continuation_extends_its_blocks(stage: Stage) -> None:
    stage.plan(NewRequest("a", 0, [1]), NewRequest("b", 0, [2]))
    plan = stage.plan(counts={"a": 1, "b": 1}, scheduled_cached_reqs=cached(("a", ([3],), 4), ("b", None, 4)))
    assert (stage.blocks("a"), stage.blocks("b"), plan.hits) == ([1, 3], [2], [])


def test_a_resumed_request_replaces_its_blocks_and_hits(stage: Stage) -> None:
    """R3: not delivered, so all of it; block-aligned (H3)."""
    stage.plan(NewRequest("a", 0, [1, 2]))
    resumed = cached(("a", ([6, 7, 8],), 8), resumed={"a"})
    assert spans(stage.plan(counts={"a": 2}, scheduled_cached_reqs=resumed))["a"][:3] == (0, 8, 2)
    assert stage.blocks("a") == [6, 7, 8]
    odd = cached(("a", ([6, 7, 8],), 6), resumed={"a"})
    assert isinstance(stage.plan(counts={"a": 2}, scheduled_cached_reqs=odd).error, HitNotCoveredError)


def test_a_resumed_request_that_is_not_live_arrives(stage: Stage) -> None:
    plan = stage.plan(counts={"a": 1}, scheduled_cached_reqs=cached(("a", ([3],), 4), resumed={"a"}))
    assert spans(plan)["a"] == (0, 4, 1, [12, 13, 14, 15])


def test_only_what_was_not_delivered_is_a_hit(stage: Stage) -> None:
    """R3"""
    stage.plan(NewRequest("a", 0, [1, 2, 3]))
    stage.requests.handed_out(stage.requests.live["a"].period.row, 0, 6)
    plan = stage.plan(NewRequest("a", 10, [1, 2, 3]), counts={"a": 2})
    assert spans(plan)["a"][:3] == (6, 10, 2), "a continuation may carry any number (H3)"
    stage.requests.handed_out(stage.requests.live["a"].period.row, 6, 12)
    assert stage.plan(NewRequest("a", 10, [1, 2, 3])).hits == [], "all below was delivered"


def test_a_preempted_request_that_comes_as_new_must_be_aligned(stage: Stage) -> None:
    stage.plan(NewRequest("a", 0, [1, 2]))
    stage.plan(preempted_req_ids={"a"})
    assert isinstance(stage.plan(NewRequest("a", 6, [1, 2])).error, HitNotCoveredError)


def test_missing_and_empty_fields_are_nothing(stage: Stage) -> None:
    source = SimpleNamespace(
        num_scheduled_tokens={}, total_num_scheduled_tokens=0, finished_req_ids=None, scheduled_new_reqs=None,
        scheduled_cached_reqs=None,
    )  # fmt: skip
    plan = stage.planner.plan(source, 0)
    assert (plan.tokens, plan.hits, plan.ended) == (0, [], [])
    stage.plan(counts={"x": 1}, scheduled_cached_reqs=cached(("x", ([4],), 0)))
    assert "x" not in stage.requests.live, "blocks of a request that nobody announced"
