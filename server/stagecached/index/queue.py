"""The free queue: blocks that nobody holds, in the order in which they are handed out.

A doubly linked ring through the blocks, closed by one root that is never handed out. Every operation on one block is
O(1), also taking it out of the middle; no operation allocates, beyond the list that popleft_n answers with.

The queue keeps no policy: which end a freed block joins is the pool's choice (vLLM V1 prefix caching, take 2).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from stagecached.index.blocks import Block
from stagecached.index.errors import BlockNotFree, NoFreeBlocks


class FreeBlockQueue:
    """Free blocks, first out first. It starts with `blocks`, in their order.

    A block given to append, append_n or prepend_n must be in no queue; the pool's reference counts see to that.
    """

    __slots__ = ("_num_free", "_root")

    def __init__(self, blocks: Iterable[Block] = ()) -> None:
        self._root = Block(-1)
        self._num_free = 0
        self.append_n(blocks)

    def close(self) -> None:
        """Let go of all blocks. Nothing may use the queue after."""
        self._root.unlink()

    def __len__(self) -> int:
        return self._num_free

    def __iter__(self) -> Iterator[Block]:
        """The blocks in the order in which they will be handed out. The queue must not change meanwhile."""
        root = self._root
        block = root.next_free
        while block is not root:
            yield block
            block = block.next_free

    def popleft(self) -> Block:
        """Takes the first block out. Raises NoFreeBlocks when there is none."""
        block = self._root.next_free
        if block is self._root:
            raise NoFreeBlocks(1, 0)
        self.remove(block)
        return block

    def popleft_n(self, n: int) -> list[Block]:
        """Takes the first n blocks out, in order. Raises NoFreeBlocks, and takes none, when there are fewer."""
        if n < 0:
            raise ValueError(f"{n} blocks were asked for")
        if n > self._num_free:
            raise NoFreeBlocks(n, self._num_free)
        blocks: list[Block] = []
        take = blocks.append
        root = self._root
        block = root.next_free
        for _ in range(n):
            take(block)
            following = block.next_free
            block.next_free = block
            block = following
        root.next_free = block
        block.prev_free = root
        self._num_free -= n
        return blocks

    def remove(self, block: Block) -> None:
        """Takes `block` out, wherever it stands. Raises BlockNotFree when it is not in a queue."""
        following = block.next_free
        if following is block:
            raise BlockNotFree(block.block_id)
        before = block.prev_free
        before.next_free = following
        following.prev_free = before
        block.next_free = block
        self._num_free -= 1

    def append(self, block: Block) -> None:
        """Puts `block` at the end: handed out last."""
        root = self._root
        last = root.prev_free
        block.prev_free = last
        last.next_free = block
        block.next_free = root
        root.prev_free = block
        self._num_free += 1

    def append_n(self, blocks: Iterable[Block]) -> None:
        """Puts `blocks` at the end, in their order."""
        root = self._root
        last = root.prev_free
        n = 0
        for block in blocks:
            block.prev_free = last
            last.next_free = block
            last = block
            n += 1
        last.next_free = root
        root.prev_free = last
        self._num_free += n

    def prepend_n(self, blocks: Sequence[Block]) -> None:
        """Puts `blocks` at the front, in their order: blocks[0] is handed out next."""
        root = self._root
        first = root.next_free
        last = root
        for block in blocks:
            block.prev_free = last
            last.next_free = block
            last = block
        last.next_free = first
        first.prev_free = last
        self._num_free += len(blocks)
