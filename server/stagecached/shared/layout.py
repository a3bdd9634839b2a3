"""Byte layout of a namespace's segment. docs/memory-layout.md has it as a table. Only daemons map it, one at a time.

    header         one page: what the segment is, generations, owners of leases
    block headers  one cache line a block; the seal is its last word
    rows           one region a key: [num_blocks, block_size] rows, each region on its own memory pages

A block has content while its seal fits: the seal is stored last and cleared first, and it is a checksum of the words
that name the content, so neither a half-written header nor another segment's bytes pass for one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from stagecache_wire.geometry import KeySchema
from stagecache_wire.layout import PAGE, WORD

MAGIC: Final = int.from_bytes(b"STGSHARE", "little")
SHARED_ABI: Final = 1
"""Raised whenever a byte of the segment changes its meaning: an older segment is then dropped, not read."""

H_MAGIC: Final = 0
H_ABI: Final = 1
H_DIGEST: Final = 2
"""Four words: the namespace's digest."""
H_NUM_BLOCKS: Final = 6
H_BLOCK_SIZE: Final = 7
H_BLOCK_BYTES: Final = 8
H_NUM_KEYS: Final = 9
H_TOTAL_BYTES: Final = 10

S_BASE_GENERATION: Final = 64
"""The generation that a session joins."""
S_LAST_GENERATION: Final = 65
"""The highest that was given out: none is given twice."""
S_OWNERS: Final = 128
"""``MAX_OWNERS`` words: id of the client whose leases are bit i of ``B_HELD``; 0: nobody's."""
MAX_OWNERS: Final = 64

BLOCK_WORDS: Final = 8
B_HASH: Final = 0
"""Four words."""
B_GENERATION: Final = 4
B_USED: Final = 5
"""time.time_ns() of the last use, made strictly rising: the order of eviction after a rebuild."""
B_HELD: Final = 6
"""Bit i: the owner of slot i of ``S_OWNERS`` holds the block."""
B_SEAL: Final = 7

_MASK: Final = (1 << 64) - 1
_SPREAD: Final = 0x9E3779B97F4A7C15
_MIX: Final = 0xFF51AFD7ED558CCD


@dataclass(frozen=True)
class SharedGeometry:
    """Sizes of one namespace's segment.

    digest: 32 bytes, the namespace's. keys: by name, the order of the regions.
    """

    digest: bytes
    num_blocks: int
    block_size: int
    keys: tuple[KeySchema, ...]

    @property
    def block_bytes(self) -> int:
        """Rows of one block, all keys."""
        return self.block_size * sum(key.row_bytes for key in self.keys)

    @property
    def rows_offset(self) -> int:
        """Where the rows begin, in bytes."""
        return _pages(PAGE + self.num_blocks * BLOCK_WORDS * WORD)

    def region_offsets(self) -> list[int]:
        """Where each key's region begins, in bytes, and behind the last one the size of the segment."""
        offsets = [self.rows_offset]
        for key in self.keys:
            offsets.append(offsets[-1] + _pages(self.num_blocks * self.block_size * key.row_bytes))
        return offsets

    @property
    def total_bytes(self) -> int:
        return self.region_offsets()[-1]

    def header_words(self) -> list[tuple[int, int]]:
        """Words that never change, and their values."""
        return [
            (H_MAGIC, MAGIC),
            (H_ABI, SHARED_ABI),
            *((H_DIGEST + i, word) for i, word in enumerate(hash_words(self.digest))),
            (H_NUM_BLOCKS, self.num_blocks),
            (H_BLOCK_SIZE, self.block_size),
            (H_BLOCK_BYTES, self.block_bytes),
            (H_NUM_KEYS, len(self.keys)),
            (H_TOTAL_BYTES, self.total_bytes),
        ]


def fitting_blocks(size: int, block_size: int, keys: tuple[KeySchema, ...]) -> int:
    """How many blocks a segment of at most ``size`` bytes can have; 0 where not even one fits."""
    block_bytes = block_size * sum(key.row_bytes for key in keys)
    count = max((size - PAGE) // (block_bytes + BLOCK_WORDS * WORD), 0)
    while count > 0 and SharedGeometry(b"\0" * 32, count, block_size, keys).total_bytes > size:
        count -= 1
    return count


def block_word(block_id: int) -> int:
    """Index of the first header word of a block."""
    return PAGE // WORD + block_id * BLOCK_WORDS


def hash_words(block_hash: bytes) -> tuple[int, int, int, int]:
    """32 bytes as four words."""
    value = int.from_bytes(block_hash, "little")
    return value & _MASK, value >> 64 & _MASK, value >> 128 & _MASK, value >> 192


def seal_of(digest_word: int, block_id: int, words: tuple[int, ...]) -> int:
    """The seal of a block. words: the hash's four and the generation. Never 0."""
    x = digest_word ^ (block_id + 1) * _SPREAD & _MASK
    for word in words:
        x = (x ^ word) * _MIX & _MASK
        x ^= x >> 29
    return x | 1


def seals_of(digest_word: int, headers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """``seal_of`` for every block. headers: u64 [num_blocks, BLOCK_WORDS]."""
    mix, shift = np.uint64(_MIX), np.uint64(29)
    x: NDArray[np.uint64] = np.arange(1, len(headers) + 1, dtype=np.uint64)
    x *= np.uint64(_SPREAD)
    x ^= np.uint64(digest_word)
    for column in range(B_HASH, B_GENERATION + 1):
        x ^= headers[:, column]
        x *= mix
        x ^= x >> shift
    x |= np.uint64(1)
    return x


def _pages(size: int) -> int:
    return (size + PAGE - 1) // PAGE * PAGE
