"""The block pool: references, eviction order and content stay in step."""

from __future__ import annotations

import pytest

from stagecached.index import Block, BlockNotFree, BlockNotHeld, BlockPool, NoFreeBlocks, UnknownBlock


def digest(n: int) -> bytes:
    return n.to_bytes(32, "big")


def free_ids(pool: BlockPool) -> list[int]:
    return [block.block_id for block in pool.queue]


def cached(pool: BlockPool, *numbers: int) -> list[Block]:
    """New blocks that hold these contents, one reference each."""
    blocks = pool.get_new_blocks(len(numbers))
    pool.cache_full_blocks(blocks, [digest(n) for n in numbers])
    return blocks


def test_a_missing_block_comes_from_the_front_and_evicts_its_content() -> None:
    pool = BlockPool(2)
    pool.free_blocks(cached(pool, 1, 2))
    (block,) = pool.get_new_blocks(1)
    assert block.block_id == 0
    assert pool.get_cached_block(digest(1)) is None
    assert pool.get_cached_block(digest(2)) is pool.blocks[1]
    assert pool.num_evictions == 1


def test_a_hit_in_the_queue_leaves_it_and_a_hit_in_use_gets_a_reference() -> None:
    pool = BlockPool(4)
    blocks = cached(pool, 1, 2)
    pool.free_blocks([blocks[1]])
    pool.touch(pool.longest_prefix([digest(1), digest(2)], 2))
    assert [block.ref_cnt for block in blocks] == [2, 1]
    assert free_ids(pool) == [2, 3]


def test_cached_blocks_are_evicted_least_recently_used_first_and_after_those_without_content() -> None:
    pool = BlockPool(4)
    first, second = cached(pool, 1), cached(pool, 2)
    bare = pool.get_new_blocks(2)
    pool.free_blocks(second)
    pool.free_blocks(first)
    pool.free_blocks(bare)
    assert free_ids(pool) == [2, 3, 1, 0]


def test_a_block_held_twice_is_free_after_the_second_free() -> None:
    pool = BlockPool(1)
    blocks = cached(pool, 1)
    pool.touch(blocks)
    pool.free_blocks(blocks)
    assert free_ids(pool) == []
    pool.free_blocks(blocks)
    assert free_ids(pool) == [0]


def test_looking_up_changes_nothing() -> None:
    pool = BlockPool(3)
    pool.free_blocks(cached(pool, 1, 2))
    before = free_ids(pool)
    assert len(pool.longest_prefix([digest(1), digest(2), digest(3)], 3)) == 2
    assert free_ids(pool) == before
    assert all(block.ref_cnt == 0 for block in pool.blocks)


def test_a_block_is_not_freed_more_often_than_held_and_those_before_it_are() -> None:
    pool = BlockPool(3)
    one, two = pool.get_new_blocks(2)
    pool.free_blocks([two])
    with pytest.raises(BlockNotHeld, match="block 1"):
        pool.free_blocks([one, two])
    assert sorted(free_ids(pool)) == [0, 1, 2]


def test_too_large_a_request_changes_nothing() -> None:
    pool = BlockPool(2)
    pool.free_blocks(cached(pool, 1))
    with pytest.raises(NoFreeBlocks):
        pool.get_new_blocks(3)
    assert pool.get_cached_block(digest(1)) is not None
    assert pool.num_free_blocks == 2


def test_evicting_content_leaves_the_block_with_its_holder() -> None:
    pool = BlockPool(2)
    blocks = cached(pool, 1)
    assert pool.evict_blocks([0, 1]) == 1
    assert pool.get_cached_block(digest(1)) is None
    assert blocks[0].ref_cnt == 1
    with pytest.raises(UnknownBlock):
        pool.evict_blocks([2])


def test_reset_forgets_all_content_only_when_nothing_is_held() -> None:
    pool = BlockPool(3, null_block=True)
    blocks = cached(pool, 1, 2)
    assert not pool.reset()
    assert pool.get_cached_block(digest(1)) is blocks[0]
    pool.free_blocks(blocks)
    order = free_ids(pool)
    assert pool.reset()
    assert pool.get_cached_block(digest(1)) is None
    assert free_ids(pool) == order


def test_the_null_block_is_never_handed_out() -> None:
    pool = BlockPool(3, null_block=True)
    assert [block.block_id for block in pool.get_new_blocks(2)] == [1, 2]
    assert pool.usage == 1.0
    with pytest.raises(BlockNotHeld):
        pool.free_blocks([pool.blocks[0]])
    with pytest.raises(BlockNotFree):
        pool.touch([pool.blocks[0]])


def test_hashes_and_blocks_must_pair_up() -> None:
    pool = BlockPool(2)
    with pytest.raises(ValueError, match="1 hashes were given for 2 blocks"):
        pool.cache_full_blocks(pool.get_new_blocks(2), [digest(1)])
    assert len(pool.cached) == 0
