"""Hash to blocks: duplicates kept in order, the first handed out."""

from __future__ import annotations

from itertools import permutations, takewhile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagecached.index import Block, BlockAlreadyCached, BlockHashMap

A, B, C = (bytes([i]) * 32 for i in range(3))


def held(cached: BlockHashMap, block_hash: bytes) -> list[int]:
    return [block.block_id for block in cached.blocks_of(block_hash)]


def test_the_first_of_several_blocks_is_handed_out() -> None:
    cached, blocks = BlockHashMap(), [Block(i) for i in range(3)]
    for block in blocks:
        cached.insert(block, A)
    assert cached.get(A) is blocks[0]
    assert held(cached, A) == [0, 1, 2]
    assert len(cached) == 1


@pytest.mark.parametrize(("removed", "left"), [(0, [1, 2]), (1, [0, 2]), (2, [0, 1])])
def test_removing_one_duplicate_leaves_the_others_in_order(removed: int, left: list[int]) -> None:
    cached, blocks = BlockHashMap(), [Block(i) for i in range(3)]
    for block in blocks:
        cached.insert(block, A)
    assert cached.remove(blocks[removed])
    assert held(cached, A) == left
    assert blocks[removed].block_hash is None


def test_the_last_block_of_a_hash_takes_the_hash_with_it() -> None:
    cached, block = BlockHashMap(), Block(0)
    cached.insert(block, A)
    assert cached.remove(block)
    assert A not in cached
    assert not cached.remove(block)


def test_a_block_has_one_hash_at_a_time() -> None:
    cached, block = BlockHashMap(), Block(0)
    cached.insert(block, A)
    with pytest.raises(BlockAlreadyCached):
        cached.insert(block, B)


def test_a_prefix_ends_at_the_first_miss_and_at_the_limit() -> None:
    cached, blocks = BlockHashMap(), [Block(i) for i in range(2)]
    cached.insert(blocks[0], A)
    cached.insert(blocks[1], C)
    assert cached.prefix([A, B, C], 3) == [blocks[0]]
    assert cached.prefix([A, C], 1) == [blocks[0]]
    assert cached.prefix([A, C], 9) == blocks
    assert cached.prefix([A], 0) == cached.prefix([], 1) == []


def test_a_prefix_follows_another_request_where_it_branches_off() -> None:
    cached, blocks = BlockHashMap(), [Block(i) for i in range(4)]
    cached.insert(blocks[0], A)
    cached.insert(blocks[1], B, blocks[0])
    cached.insert(blocks[2], C, blocks[0])
    assert cached.prefix([A, B], 2) == [blocks[0], blocks[1]]
    assert cached.prefix([A, C], 2) == [blocks[0], blocks[2]]


def test_a_block_that_was_reused_is_not_followed() -> None:
    cached, blocks = BlockHashMap(), [Block(i) for i in range(3)]
    cached.insert(blocks[0], A)
    cached.insert(blocks[1], B, blocks[0])
    cached.remove(blocks[1])
    assert cached.prefix([A, B], 2) == [blocks[0]]
    cached.insert(blocks[1], C)
    cached.insert(blocks[2], B)
    assert cached.prefix([A, B], 2) == [blocks[0], blocks[2]]


def test_a_duplicate_is_followed_only_once_it_is_the_first() -> None:
    cached, blocks = BlockHashMap(), [Block(i) for i in range(4)]
    cached.insert(blocks[0], A)
    cached.insert(blocks[1], B, blocks[0])
    cached.insert(blocks[2], B, blocks[0])
    assert cached.prefix([A, B], 2) == [blocks[0], blocks[1]]
    cached.remove(blocks[1])
    cached.insert(blocks[1], B, blocks[0])
    assert cached.prefix([A, B], 2) == [blocks[0], blocks[2]]


def test_clear_forgets_every_duplicate() -> None:
    cached, blocks = BlockHashMap(), [Block(i) for i in range(3)]
    for block, block_hash in zip(blocks, (A, A, B), strict=True):
        cached.insert(block, block_hash)
    assert cached.clear() == 3
    assert len(cached) == 0
    for block in blocks:
        cached.insert(block, A)
    assert held(cached, A) == [0, 1, 2]


@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from([A, B, C]), st.none() | st.integers(0, 5))))
def test_it_behaves_as_a_dict_of_lists(moves: list[tuple[int, bytes, int | None]]) -> None:
    """Whatever it was told about what lies behind what."""
    cached, blocks = BlockHashMap(), [Block(i) for i in range(6)]
    model: dict[bytes, list[int]] = {A: [], B: [], C: []}
    for block_id, block_hash, after in moves:
        old = blocks[block_id].block_hash
        if old is None:
            cached.insert(blocks[block_id], block_hash, None if after is None else blocks[after])
            model[block_hash].append(block_id)
        else:
            cached.remove(blocks[block_id])
            model[old].remove(block_id)
        assert {key: held(cached, key) for key in model} == model
        assert len(cached) == sum(map(bool, model.values()))
        for order in permutations(model):
            firsts = [model[key][0] for key in takewhile(model.__getitem__, order)]
            assert [block.block_id for block in cached.prefix(order, 3)] == firsts
