"""The free queue: a doubly linked list through the blocks."""

from __future__ import annotations

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagecached.index import Block, BlockNotFree, FreeBlockQueue, NoFreeBlocks


def ids(queue: FreeBlockQueue) -> list[int]:
    return [block.block_id for block in queue]


def make(n: int) -> tuple[list[Block], FreeBlockQueue]:
    blocks = [Block(i) for i in range(n)]
    return blocks, FreeBlockQueue(blocks)


def test_it_starts_in_the_order_of_its_blocks() -> None:
    _, queue = make(4)
    assert ids(queue) == [0, 1, 2, 3]
    assert len(queue) == 4


def test_popleft_n_takes_the_first_ones_in_order() -> None:
    _, queue = make(5)
    assert [block.block_id for block in queue.popleft_n(3)] == [0, 1, 2]
    assert queue.popleft().block_id == 3
    assert ids(queue) == [4]


def test_a_block_is_removed_from_the_middle_and_from_either_end() -> None:
    blocks, queue = make(5)
    for block_id in (2, 0, 4):
        queue.remove(blocks[block_id])
    assert ids(queue) == [1, 3]


def test_prepend_n_keeps_the_order_given() -> None:
    blocks, queue = make(5)
    taken = queue.popleft_n(3)
    queue.prepend_n([taken[2], taken[0]])
    queue.append_n([taken[1]])
    assert ids(queue) == [2, 0, 3, 4, 1]
    assert blocks[2].block_id == queue.popleft().block_id


def test_an_empty_queue_refuses_and_can_be_filled_again() -> None:
    blocks, queue = make(2)
    queue.popleft_n(2)
    with pytest.raises(NoFreeBlocks):
        queue.popleft()
    queue.append(blocks[1])
    assert ids(queue) == [1]


def test_asking_for_too_many_takes_none() -> None:
    _, queue = make(3)
    with pytest.raises(NoFreeBlocks, match="asked for 4 blocks, 3 are free"):
        queue.popleft_n(4)
    with pytest.raises(ValueError, match="-1 blocks"):
        queue.popleft_n(-1)
    assert ids(queue) == [0, 1, 2]


def test_a_block_outside_the_queue_cannot_be_removed() -> None:
    blocks, queue = make(2)
    queue.popleft()
    with pytest.raises(BlockNotFree):
        queue.remove(blocks[0])
    assert ids(queue) == [1]


def test_moving_blocks_allocates_nothing() -> None:
    blocks, queue = make(1000)

    def churn() -> None:
        for block in blocks[100:900]:
            queue.remove(block)
            queue.append(block)

    churn()
    before = sys.getallocatedblocks()
    churn()
    assert sys.getallocatedblocks() - before < 10


@given(st.lists(st.tuples(st.sampled_from(["pop", "remove", "append", "append_n", "prepend_n"]), st.integers(0, 99))))
def test_it_behaves_as_a_list(moves: list[tuple[str, int]]) -> None:
    blocks, queue = make(8)
    model, outside = list(range(8)), []
    for move, number in moves:
        if move == "pop":
            n = number % (len(model) + 1)
            taken = [block.block_id for block in queue.popleft_n(n)]
            assert taken == model[:n]
            model, outside = model[n:], outside + taken
        elif move == "remove" and model:
            block_id = model.pop(number % len(model))
            queue.remove(blocks[block_id])
            outside.append(block_id)
        elif move == "append" and outside:
            model.append(outside.pop(number % len(outside)))
            queue.append(blocks[model[-1]])
        elif move in ("append_n", "prepend_n"):
            n = number % (len(outside) + 1)
            moved, outside = outside[:n], outside[n:]
            getattr(queue, move)([blocks[block_id] for block_id in moved])
            model = model + moved if move == "append_n" else moved + model
        assert ids(queue) == model
        assert len(queue) == len(model)
