"""The block pool: references, the free queue and the hash map, kept in step.

The semantics are those of vLLM V1's prefix caching (take 2) as vLLM 0.30.0 has them; the conformance test drives both
side by side. A block is in one of three conditions:

    held                 ref_cnt > 0, not in the queue
    free, content known  ref_cnt 0, in the queue, has a hash: a hit takes it out of the middle of the queue
    free, no content     ref_cnt 0, in the queue, no hash

A block whose content can be hit joins the end of the queue when it is freed, so that the least recently used goes
first; one without a hash can never be hit and joins the front. Handing a block out evicts its content.

Nothing here locks, sleeps or does I/O: one thread owns a pool.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from stagecached.index.blocks import Block
from stagecached.index.errors import BlockNotHeld, UnknownBlock
from stagecached.index.hash_map import BlockHashMap
from stagecached.index.queue import FreeBlockQueue


class BlockPool:
    """`num_blocks` blocks, made here once, all free and without content.

    null_block: keep block 0 out of the pool, as vLLM does (it pads block tables with it), so that ids agree with an
    engine's.
    """

    def __init__(self, num_blocks: int, *, null_block: bool = False) -> None:
        if num_blocks < 1:
            raise ValueError(f"a pool of {num_blocks} blocks was asked for; give at least 1")
        self.blocks = [Block(block_id) for block_id in range(num_blocks)]
        self.queue = FreeBlockQueue(self.blocks)
        self.cached = BlockHashMap()
        self.num_usable_blocks = num_blocks
        self.num_evictions = 0
        if null_block:
            self.queue.popleft()
            self.num_usable_blocks -= 1

    def close(self) -> None:
        """Take the blocks apart, so that they go with their last reference; nothing may use the pool after."""
        for block in self.blocks:
            block.unlink()
        self.queue.close()
        self.cached.close()
        self.blocks.clear()

    @property
    def num_free_blocks(self) -> int:
        """Blocks that nobody holds, with content or without."""
        return len(self.queue)

    @property
    def usage(self) -> float:
        """Share of the usable blocks that is held, 0.0 to 1.0."""
        return 1.0 - len(self.queue) / self.num_usable_blocks if self.num_usable_blocks else 0.0

    # Reading: none of these changes a reference, the queue or the map.

    def get_cached_block(self, block_hash: bytes) -> Block | None:
        """A block that holds this content, the first of several, or None."""
        return self.cached.get(block_hash)

    def longest_prefix(self, block_hashes: Iterable[bytes], max_blocks: int) -> list[Block]:
        """Blocks of the longest cached prefix, at most max_blocks; it ends at the first hash that is not cached."""
        return self.cached.prefix(block_hashes, max_blocks)

    # Holding and freeing.

    def get_new_blocks(self, n: int) -> list[Block]:
        """Hands out the first n blocks of the free queue, one reference each; what they held is evicted.

        Raises NoFreeBlocks, and changes nothing, when fewer are free.
        """
        blocks = self.queue.popleft_n(n)
        evict = self.cached.remove
        for block in blocks:
            if block.block_hash is not None:
                evict(block)
                self.num_evictions += 1
            block.ref_cnt = 1
        return blocks

    def touch(self, blocks: Iterable[Block]) -> None:
        """Adds a reference to each block; one that was free leaves the queue and so is safe from eviction."""
        remove = self.queue.remove
        for block in blocks:
            if block.ref_cnt == 0:
                remove(block)
            block.ref_cnt += 1

    def free_blocks(self, ordered_blocks: Iterable[Block]) -> None:
        """Gives one reference of each block back. The blocks come in the order in which they shall be evicted.

        Those that nobody holds any more join the queue: without a hash at its front, with one at its end, in the
        order given. Raises BlockNotHeld at a block without references; those before it are freed.
        """
        evict_first: list[Block] = []
        evict_last: list[Block] = []
        no_content, content = evict_first.append, evict_last.append
        try:
            for block in ordered_blocks:
                ref_cnt = block.ref_cnt
                if ref_cnt == 1:
                    if block.block_hash is None:
                        no_content(block)
                    else:
                        content(block)
                elif ref_cnt == 0:
                    raise BlockNotHeld(block.block_id)
                block.ref_cnt = ref_cnt - 1
        finally:
            self.queue.prepend_n(evict_first)
            self.queue.append_n(evict_last)

    # Content.

    def cache_full_blocks(
        self, blocks: Sequence[Block], block_hashes: Sequence[bytes], after: Block | None = None
    ) -> None:
        """Gives each full block the hash of its content, block i the hash i; from now on it can be hit.

        The blocks are consecutive in one prefix; `after` is the block before them, None when they begin it. Raises
        BlockAlreadyCached at a block that has one; those before it are cached.
        """
        if len(blocks) != len(block_hashes):
            raise ValueError(f"{len(block_hashes)} hashes were given for {len(blocks)} blocks")
        insert = self.cached.insert
        for block, block_hash in zip(blocks, block_hashes, strict=True):
            insert(block, block_hash, after)
            after = block

    def evict_blocks(self, block_ids: Iterable[int]) -> int:
        """Takes the content from these blocks, so that they are not hit again; answers how many had any.

        References and queue order stay as they are: who holds a block keeps it. Raises UnknownBlock, and changes
        nothing, for an id outside the pool.
        """
        ids = list(block_ids)
        for block_id in ids:
            if not 0 <= block_id < len(self.blocks):
                raise UnknownBlock(block_id, len(self.blocks))
        evicted = sum(self.cached.remove(self.blocks[block_id]) for block_id in ids)
        self.num_evictions += evicted
        return evicted

    def reset(self) -> bool:
        """Forgets all content, when no block is held; otherwise changes nothing and answers False (R5).

        The queue keeps its order.
        """
        if len(self.queue) != self.num_usable_blocks:
            return False
        self.num_evictions += self.cached.clear()
        return True
