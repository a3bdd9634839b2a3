"""The block index: which content does the node hold, and in which blocks.

Pure data structures, no I/O, no locks, no clock; one thread owns a pool and all that works on it. Layers look down
only:

    namespace         where hashes are valid
    leases, manager   who holds which blocks
    pool              references, free queue and map kept in step
    queue, hash_map   the two structures;  blocks   their common element

A hash may come from `stagecache_wire.identity`, which the client has too, or from the engine; here it is 32 opaque
bytes.
"""

from stagecache_wire.hash_errors import BlockIndexError, UnsupportedHash, UnsupportedKey
from stagecache_wire.identity import (
    DEFAULT_HASH_SEED,
    HASH_BYTES,
    BlockHasher,
    ExtraKeys,
    MultiModalSpan,
    check_hashes,
    digest_prompt_embeds,
)
from stagecached.index.blocks import Block
from stagecached.index.errors import (
    BlockAlreadyCached,
    BlockNotFree,
    BlockNotHeld,
    MissingBlockHash,
    NoFreeBlocks,
    RequestAlreadyRunning,
    StalePrefix,
    UnknownBlock,
)
from stagecached.index.hash_map import BlockHashMap
from stagecached.index.leases import LeaseTable
from stagecached.index.manager import BlockManager
from stagecached.index.namespace import KeySchema, Namespace
from stagecached.index.pool import BlockPool
from stagecached.index.queue import FreeBlockQueue
from stagecached.index.request import Request, RequestView

__all__ = [
    "DEFAULT_HASH_SEED",
    "HASH_BYTES",
    "Block",
    "BlockAlreadyCached",
    "BlockHashMap",
    "BlockHasher",
    "BlockIndexError",
    "BlockManager",
    "BlockNotFree",
    "BlockNotHeld",
    "BlockPool",
    "ExtraKeys",
    "FreeBlockQueue",
    "KeySchema",
    "LeaseTable",
    "MissingBlockHash",
    "MultiModalSpan",
    "Namespace",
    "NoFreeBlocks",
    "Request",
    "RequestAlreadyRunning",
    "RequestView",
    "StalePrefix",
    "UnknownBlock",
    "UnsupportedHash",
    "UnsupportedKey",
    "check_hashes",
    "digest_prompt_embeds",
]
