"""Leases hold spans: no eviction while held, most recently used after."""

from __future__ import annotations

import pytest

from stagecached.index import BlockPool, LeaseTable

HASHES = [bytes([i]) * 32 for i in range(6)]


@pytest.fixture
def leases() -> LeaseTable:
    """Blocks 0 to 3 hold HASHES 0 to 3 and are free, block 0 evicted first; 4 and 5 are bare."""
    pool = BlockPool(6)
    blocks = pool.get_new_blocks(4)
    pool.cache_full_blocks(blocks, HASHES[:4])
    pool.free_blocks(blocks)
    return LeaseTable(pool)


def free_ids(leases: LeaseTable) -> list[int]:
    return [block.block_id for block in leases.pool.queue]


def test_a_leased_block_is_never_evicted(leases: LeaseTable) -> None:
    leases.acquire("s", "r", HASHES[:2])
    taken = leases.pool.get_new_blocks(4)
    assert [block.block_id for block in taken] == [4, 5, 2, 3]
    assert [block.block_id for block in leases.span("s", "r")] == [0, 1]
    assert leases.pool.get_cached_block(HASHES[0]) is not None


def test_a_released_span_is_evicted_last_and_its_tail_first(leases: LeaseTable) -> None:
    assert free_ids(leases) == [4, 5, 0, 1, 2, 3]
    leases.acquire("s", "r", HASHES[:2])
    assert leases.release("s", "r")
    assert free_ids(leases) == [4, 5, 2, 3, 1, 0]


def test_a_span_is_the_cached_prefix_and_no_more(leases: LeaseTable) -> None:
    assert len(leases.acquire("s", "r", HASHES)) == 4
    assert len(leases.acquire("s", "r", HASHES, max_blocks=1)) == 1
    assert leases.acquire("s", "r", [HASHES[5], HASHES[0]]) == []
    assert len(leases) == 0


def test_acquiring_again_replaces_the_span_and_counts_once(leases: LeaseTable) -> None:
    for _ in range(3):
        leases.acquire("s", "r", HASHES[:3])
    assert [block.ref_cnt for block in leases.pool.blocks[:3]] == [1, 1, 1]
    leases.acquire("s", "r", HASHES[:1])
    assert [block.ref_cnt for block in leases.pool.blocks[:3]] == [1, 0, 0]


def test_releasing_twice_is_legal(leases: LeaseTable) -> None:
    leases.acquire("s", "r", HASHES[:1])
    assert leases.release("s", "r")
    assert not leases.release("s", "r")
    assert not leases.release("unknown", "r")


def test_leases_end_with_their_session_and_no_other(leases: LeaseTable) -> None:
    leases.acquire("s", "a", HASHES[:2])
    leases.acquire("s", "b", HASHES[:3])
    leases.acquire("t", "a", HASHES[:1])
    assert leases.release_session("s") == 2
    assert leases.release_session("s") == 0
    assert [block.ref_cnt for block in leases.pool.blocks[:3]] == [1, 0, 0]
    assert len(leases) == 1


def test_several_leases_on_one_block_are_counted(leases: LeaseTable) -> None:
    leases.acquire("s", "a", HASHES[:1])
    leases.acquire("t", "a", HASHES[:1])
    leases.release("s", "a")
    assert 0 not in free_ids(leases)
    leases.release("t", "a")
    assert free_ids(leases)[-1] == 0
