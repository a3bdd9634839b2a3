"""From the hash of a block's content to the blocks that hold it.

Several blocks may hold the same content: a block table is append-only, so a block that fills with content already
cached stays what it is, a duplicate (take 2). The blocks of one hash form a ring through the blocks, in the order in
which they got the hash; the map points at the first, which is the one that lookups answer. Insert and remove are O(1)
and allocate nothing but the map's entry.

A prefix is found by following the blocks: each remembers which block was cached behind it, and where that block is the
one that serves the next hash, the map need not be asked. So a long prefix costs the map one access for its first block
and one wherever another request branched off. A large map is slow to ask (each access misses the processor's caches);
this keeps the cost of a lookup the same at 1,000,000 blocks. What a block remembers is a hint and may be out of date;
since a hash names the content, a block that serves the hash looked for is the right answer however it was found.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

from stagecached.index.blocks import Block
from stagecached.index.errors import BlockAlreadyCached


class BlockHashMap:
    """Hash to blocks. The only writer of a block's block_hash, served_hash, next_same, prev_same, next_in_prefix."""

    __slots__ = ("_first", "_no_block")

    def __init__(self) -> None:
        self._first: dict[bytes, Block] = {}
        self._no_block = Block(-1)

    def close(self) -> None:
        """Let go of all blocks. Nothing may use the map after."""
        self._first.clear()
        self._no_block.unlink()

    def __len__(self) -> int:
        """Number of different hashes."""
        return len(self._first)

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._first

    def get(self, block_hash: bytes) -> Block | None:
        """The first of the blocks that hold `block_hash`, or None."""
        return self._first.get(block_hash)

    def prefix(self, block_hashes: Iterable[bytes], max_blocks: int) -> list[Block]:
        """First blocks of the leading hashes that are all held, at most max_blocks. It ends at the first miss."""
        found: list[Block] = []
        take, ask = found.append, self._first.get
        block = self._no_block
        for block_hash in islice(block_hashes, max_blocks):
            block = block.next_in_prefix
            if block.served_hash != block_hash:
                first = ask(block_hash)
                if first is None:
                    break
                block = first
            take(block)
        return found

    def blocks_of(self, block_hash: bytes) -> Iterator[Block]:
        """All blocks that hold `block_hash`, in the order in which they got it."""
        first = block = self._first.get(block_hash)
        while block is not None:
            yield block
            block = None if block.next_same is first else block.next_same

    def insert(self, block: Block, block_hash: bytes, after: Block | None = None) -> None:
        """Gives `block` its hash, behind the blocks that hold it already. Raises BlockAlreadyCached.

        after: the block that holds the content before it, where the caller knows it.
        """
        if block.block_hash is not None:
            raise BlockAlreadyCached(block.block_id)
        block.block_hash = block_hash
        first = self._first.setdefault(block_hash, block)
        if first is block:
            block.served_hash = block_hash
            if after is not None:
                after.next_in_prefix = block
            return
        last = first.prev_same
        last.next_same = block
        block.prev_same = last
        block.next_same = first
        first.prev_same = block

    def remove(self, block: Block) -> bool:
        """Takes the hash from `block`; the next block of the ring becomes the first. False: it had none."""
        block_hash = block.block_hash
        if block_hash is None:
            return False
        block.block_hash = None
        following = block.next_same
        if following is block:
            block.served_hash = None
            del self._first[block_hash]
            return True
        if block.served_hash is not None:
            block.served_hash = None
            following.served_hash = block_hash
            self._first[block_hash] = following
        before = block.prev_same
        before.next_same = following
        following.prev_same = before
        block.next_same = block.prev_same = block
        return True

    def clear(self) -> int:
        """Takes the hash from every block and answers how many had one."""
        blocks = [block for block_hash in self._first for block in self.blocks_of(block_hash)]
        for block in blocks:
            block.block_hash = block.served_hash = None
            block.next_same = block.prev_same = block
        self._first.clear()
        return len(blocks)
