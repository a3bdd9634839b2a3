"""Errors of the block index, one type a situation.

Each text says what was asked, what was found and what to do. All derive from `BlockIndexError`; a caller that only
wants to refuse a call catches that one.
"""

from __future__ import annotations

from stagecache_wire.hash_errors import BlockIndexError


class NoFreeBlocks(BlockIndexError):
    """More blocks were asked for than the free queue holds. Nothing was taken."""

    def __init__(self, asked: int, free: int) -> None:
        super().__init__(f"asked for {asked} blocks, {free} are free; free a request or release a lease first")
        self.asked = asked
        self.free = free


class BlockNotFree(BlockIndexError):
    """A block was to leave the free queue, or change in it, and is not in it."""

    def __init__(self, block_id: int) -> None:
        super().__init__(f"block {block_id} is not in the free queue; it is held, or it is the null block")
        self.block_id = block_id


class BlockNotHeld(BlockIndexError):
    """A reference was given back that nobody holds."""

    def __init__(self, block_id: int) -> None:
        super().__init__(f"block {block_id} was freed once more than it was held; free each allocation once")
        self.block_id = block_id


class BlockAlreadyCached(BlockIndexError):
    """A full block was to get a hash and has one. The table is append-only: a hash is set once a tenancy."""

    def __init__(self, block_id: int) -> None:
        super().__init__(f"block {block_id} already has a hash; a block is cached once, when it fills")
        self.block_id = block_id


class UnknownBlock(BlockIndexError):
    """A block id lies outside the pool."""

    def __init__(self, block_id: int, num_blocks: int) -> None:
        super().__init__(f"block {block_id} does not exist; the pool has blocks 0 to {num_blocks - 1}")
        self.block_id = block_id


class StalePrefix(BlockIndexError):
    """A prefix answered by get_computed_blocks was evicted before it was allocated. Nothing was changed."""

    def __init__(self, request_id: str, position: int, block_id: int) -> None:
        super().__init__(
            f"request {request_id}: block {block_id}, given as computed block {position}, no longer holds that "
            "content; call get_computed_blocks again right before allocate_slots"
        )
        self.request_id = request_id
        self.position = position
        self.block_id = block_id


class RequestAlreadyRunning(BlockIndexError):
    """Computed blocks were given for a request that has blocks. Hits come only before the first allocation."""

    def __init__(self, request_id: str, num_blocks: int) -> None:
        super().__init__(
            f"request {request_id} already has {num_blocks} blocks; a prefix hit is possible only before its first "
            "allocation, or after free (preemption)"
        )
        self.request_id = request_id


class MissingBlockHash(BlockIndexError):
    """A block fills and its hash was not given. Nothing was changed."""

    def __init__(self, request_id: str, needed: int, found: int) -> None:
        super().__init__(
            f"request {request_id}: {needed} blocks are full, {found} hashes are known; give the hash of each full "
            "block before allocating its last token"
        )
        self.request_id = request_id
