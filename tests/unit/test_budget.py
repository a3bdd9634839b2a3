"""Admission is arithmetic, done before anything is allocated."""

from __future__ import annotations

import pytest

from stagecache_wire.geometry import Geometry, KeySchema
from stagecache_wire.layout import ControlLayout
from stagecache_wire.v1 import stagecache_pb2 as pb
from stagecached.budget import MIB, Budget, Cost, key_cost, session_cost
from stagecached.refusal import Refusal

GEOMETRY = Geometry(1000, 16, 100, 4, 1 << 20, 64).checked()
PLENTY = 1 << 50


def budget(limit: int = 100 * MIB, free: int = PLENTY) -> Budget:
    return Budget(limit, lambda: free, lambda: None)


def pages(size: int) -> int:
    return -(-size // 4096) * 4096


def test_costs_are_the_sizes_of_the_segments_in_whole_pages() -> None:
    key = key_cost(GEOMETRY, KeySchema("k", "bfloat16", (3,)))
    assert key == Cost(pools=pages(16_000 * 6), staging=4 * pages(100 * 6), tables=pages(16_000 * 8))
    session = session_cost(GEOMETRY)
    control = pages(ControlLayout.of(GEOMETRY).total_bytes)
    assert session == Cost(tables=pages(16_000 * 8), arena=1 << 20, control=control)


def test_all_parts_are_reserved_or_none() -> None:
    account = budget()
    with pytest.raises(Refusal):
        account.reserve("a", "attach", [Cost(pools=60 * MIB), Cost(pools=60 * MIB)])
    assert account.used_bytes == 0
    parts = account.reserve("a", "attach", [Cost(pools=60 * MIB), Cost(arena=40 * MIB)])
    assert account.used_bytes == 100 * MIB
    parts[0].release()
    parts[0].release()
    assert account.used_bytes == 40 * MIB


def test_refusal_shows_the_arithmetic_the_users_and_the_remedy() -> None:
    account = budget()
    account.reserve("model/one", "attach", [Cost(pools=50 * MIB), Cost(arena=10 * MIB)])
    account.reserve("model/two", "attach", [Cost(pools=20 * MIB)])
    cost = Cost(pools=16 * MIB, staging=8 * MIB, tables=4 * MIB, arena=2 * MIB, control=MIB)
    with pytest.raises(Refusal) as caught:
        account.reserve("model/three", "attach of model/three", [cost])
    refusal = caught.value
    assert refusal.reason == pb.REASON_BUDGET_EXCEEDED
    assert refusal.message == (
        "attach of model/three needs 31.0 MiB (pools 16.0 + staging 8.0 + tables 4.0 + arena 2.0 + control 1.0); "
        "of the budget of 100.0 MiB 20.0 are free (model/one uses 60.0, model/two uses 20.0)."
    )
    assert "--memory-budget" in refusal.remedy
    assert refusal.facts["needed_bytes"] == str(31 * MIB)
    assert refusal.facts["budget_free_bytes"] == str(20 * MIB)


def test_exactly_what_is_left_still_fits() -> None:
    account = budget(limit=10)
    account.reserve("a", "x", [Cost(pools=4)])
    account.reserve("b", "x", [Cost(pools=6)])
    with pytest.raises(Refusal):
        account.reserve("c", "x", [Cost(pools=1)])


def test_shared_memory_without_room_is_refused_with_needed_and_free() -> None:
    with pytest.raises(Refusal) as caught:
        budget(free=3 * MIB).reserve("a", "attach of a", [Cost(pools=4 * MIB)])
    assert caught.value.reason == pb.REASON_SHM_FULL
    assert "needs 4.0 MiB" in caught.value.message
    assert "has 3.0 MiB free" in caught.value.message
    assert "--shm-size" in caught.value.remedy
    assert caught.value.facts["shm_free_bytes"] == str(3 * MIB)


def test_what_is_reserved_and_not_yet_allocated_counts_as_taken() -> None:
    account = budget(free=10 * MIB)
    (first,) = account.reserve("a", "x", [Cost(pools=6 * MIB)])
    with pytest.raises(Refusal):
        account.reserve("b", "x", [Cost(pools=6 * MIB)])
    first.settled()  # now /dev/shm itself shows less free; here it still says 10
    account.reserve("b", "x", [Cost(pools=6 * MIB)])


def test_adopted_memory_counts_whatever_the_limit() -> None:
    account = budget(limit=10 * MIB)
    held = account.adopt("old", Cost(pools=30 * MIB))
    assert account.used_bytes == 30 * MIB
    with pytest.raises(Refusal, match=r"old uses 30\.0"):
        account.reserve("new", "x", [Cost(pools=1)])
    held.release()
    account.reserve("new", "x", [Cost(pools=1)])
