"""The block: one unit of cached content, and a link of the lists it is in.

Blocks are made once, with their pool, and never again; every list of blocks runs through the blocks themselves, so
that no operation allocates. A link that points to its own block means: not in that list.
"""

from __future__ import annotations


class Block:
    """One block of the pool. Only the classes named below write its fields.

    block_id    position in the pool; the id that block tables carry.
    ref_cnt     how many requests and leases hold the block (BlockPool). 0: it is in the free queue, and its content,
                if it has a hash, may be hit until the block is handed out again.
    block_hash  identity of the content, 32 bytes; None while the block is not full or not cached (BlockHashMap).
    next_free, prev_free    neighbours in the free queue (FreeBlockQueue). prev_free means something only while the
                            block is in the queue.
    next_same, prev_same    ring of the blocks that hold the same hash, in the order in which they got it
                            (BlockHashMap).
    served_hash             block_hash while the block is the first of that ring, the one that lookups answer with;
                            else None (BlockHashMap).
    next_in_prefix          a hint, checked at each use: a block that was cached behind this one (BlockHashMap).
    """

    __slots__ = (
        "block_hash",
        "block_id",
        "next_free",
        "next_in_prefix",
        "next_same",
        "prev_free",
        "prev_same",
        "ref_cnt",
        "served_hash",
    )

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_cnt = 0
        self.block_hash: bytes | None = None
        self.next_free = self
        self.prev_free = self
        self.next_same = self
        self.prev_same = self
        self.served_hash: bytes | None = None
        self.next_in_prefix = self

    def unlink(self) -> None:
        """Let go of other blocks and of itself: the last thing that is done with a block."""
        del self.next_free, self.prev_free, self.next_same, self.prev_same, self.next_in_prefix

    def __repr__(self) -> str:
        digest = "-" if self.block_hash is None else self.block_hash.hex()[:12]
        return f"Block({self.block_id}, ref_cnt={self.ref_cnt}, hash={digest})"
