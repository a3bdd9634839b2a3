"""One namespace's blocks: stored under (generation, hash), evicted least recently used, never while held.

Any thread may call, one short lock orders them; no rows are copied under it: a block that is being copied in or out is
held by a reference meanwhile, so nobody takes it away.

    publish   take a block (it loses its content: seal cleared first), copy, header words, seal, then it can be found
    pinned    blocks by hash, held while the caller reads
    look      how far a prefix is stored, changing nothing

The order of shared stores is the crash contract: a daemon may be killed between any two of them, and the next one finds
a block either with the whole of its rows or without content. ``point`` stands between any two; the crash tests kill
the process in it.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final

import numpy as np
from numpy.typing import NDArray

from stagecache_wire.fence import fence
from stagecache_wire.v1 import stagecache_pb2 as pb
from stagecached.index import HASH_BYTES, Block, BlockPool
from stagecached.shared import layout
from stagecached.shared.layout import block_word, hash_words, seal_of
from stagecached.shared.segment import SharedSegment

CopyRows = Callable[[Sequence[NDArray[np.void]]], bool]
"""Gets one void [block_size] a key of the namespace, to be filled. False: the rows are not to be kept."""

DROPPED_AT_ONCE: Final = 1024
"""Blocks dropped by a reset while the lock is held: about two milliseconds."""
REMEMBERED_EVICTIONS: Final = 8192
"""Hashes of which it is known that and why their block went: only to explain a miss."""


class PublishOutcome(IntEnum):
    """What became of a block that was to be kept; values are those of ``pb.PublishState``."""

    STORED = pb.PUBLISH_STATE_STORED
    KNOWN = pb.PUBLISH_STATE_KNOWN
    """Its content was there, or is just being copied: the first one is kept."""
    NOT_PRESENT = pb.PUBLISH_STATE_NOT_PRESENT
    """A slot of the block is not PRESENT for a key of the namespace."""
    NO_ROOM = pb.PUBLISH_STATE_NO_ROOM
    """Every block is held."""
    CHANGED = pb.PUBLISH_STATE_CHANGED
    """The rows, or the generation, changed while they were copied."""
    NOT_JOINED = pb.PUBLISH_STATE_NOT_JOINED


@dataclass
class StoreFigures:
    """Totals of one namespace since this daemon started. Written under the store's lock."""

    lookup_hashes: int = 0
    hit_hashes: int = 0
    published: int = 0
    known: int = 0
    filled: int = 0
    prefixes: dict[str, int] = field(default_factory=lambda: {"hit": 0, "pending": 0, "miss": 0})
    """Looked-up and acquired prefixes by the state of their end, see ``Found``."""
    skipped: dict[PublishOutcome, int] = field(default_factory=dict)
    evictions: dict[str, int] = field(default_factory=lambda: {"capacity": 0, "reset": 0, "request": 0})


@dataclass(frozen=True, slots=True)
class Found:
    """How far a prefix is stored. state and end: of the block behind it (``pb.BlockState``, ``pb.PrefixEnd``)."""

    blocks: int
    state: pb.BlockState
    end: pb.PrefixEnd


def key_of(block_hash: bytes, generation: int) -> bytes:
    """Under what a block is found."""
    return block_hash + generation.to_bytes(8, "little")


def keys_of(block_hashes: Iterable[bytes], generation: int) -> list[bytes]:
    """``key_of`` of each."""
    suffix = generation.to_bytes(8, "little")
    return [block_hash + suffix for block_hash in block_hashes]


class NamespaceStore:
    """The blocks of one namespace. Thread-safe."""

    def __init__(self, segment: SharedSegment, clock: Callable[[], int] = time.time_ns) -> None:
        """segment: without content, or to be filled by ``rebuild``. clock: ns since the epoch, for the order of use."""
        self.segment = segment
        self.geometry = segment.geometry
        self.pool = BlockPool(segment.geometry.num_blocks)
        self.figures = StoreFigures()
        self.lock = threading.Lock()
        self.generations: dict[int, int] = {}
        """Members of each generation that has any."""
        self.settled = True
        """False while a starting daemon has not found all members yet: nothing is unreachable before that."""
        self.used_ns = clock()
        self._words = segment.words
        self._digest_word = hash_words(segment.geometry.digest)[0]
        self._pending: dict[bytes, int] = {}
        self._evicted: OrderedDict[bytes, pb.PrefixEnd] = OrderedDict()
        self._clock = clock
        self._emptied: set[Block] = set()
        """Blocks that lost their content while somebody held them."""
        self.last_use = 0
        """The highest ``B_USED``."""

    # ---------------------------------------------------------------- in

    def publish(
        self, block_hash: bytes, generation: int, copy_rows: CopyRows, wanted: Callable[[], bool]
    ) -> PublishOutcome:
        """Keep a block's rows, which ``copy_rows`` writes, under its hash.

        wanted(): whether the generation is still the publisher's; asked under the lock, last right before the seal.
        An exception of copy_rows leaves a free block, and is raised on.
        """
        outcome = self._publish(block_hash, generation, copy_rows, wanted)
        with self.lock:
            if outcome is PublishOutcome.STORED:
                self.figures.published += 1
            elif outcome is PublishOutcome.KNOWN:
                self.figures.known += 1
            else:
                self.figures.skipped[outcome] = self.figures.skipped.get(outcome, 0) + 1
        return outcome

    def skip(self, outcome: PublishOutcome) -> None:
        """Count a block that was not offered to ``publish``."""
        with self.lock:
            self.figures.skipped[outcome] = self.figures.skipped.get(outcome, 0) + 1

    def _publish(
        self, block_hash: bytes, generation: int, copy_rows: CopyRows, wanted: Callable[[], bool]
    ) -> PublishOutcome:
        key = key_of(block_hash, generation)
        with self.lock:
            if not wanted():
                return PublishOutcome.NOT_JOINED
            known = self.pool.get_cached_block(key)
            if known is not None:
                self.pool.touch((known,))
                self.give_back((known,))
                return PublishOutcome.KNOWN
            if key in self._pending:
                return PublishOutcome.KNOWN
            block = self._take()
            if block is None:
                return PublishOutcome.NO_ROOM
            self._pending[key] = block.block_id
        copied = kept = False
        try:
            self.point("after_unseal")
            copied = self._copy(block, block_hash, generation, copy_rows)
            self.point("after_rows")
        finally:
            with self.lock:
                del self._pending[key]
                kept = copied and wanted()
                if kept:
                    self._seal(block, block_hash, generation)
                    self.pool.cache_full_blocks((block,), (key,))
                    self._evicted.pop(block_hash, None)
                self.give_back((block,))
        return PublishOutcome.STORED if kept else PublishOutcome.CHANGED

    def _take(self) -> Block | None:
        """The block that was used longest ago, without content from here on; None where all are held."""
        if not self.pool.num_free_blocks:
            return None
        oldest = next(iter(self.pool.queue))
        if oldest.block_hash is not None:
            self.note_eviction(oldest.block_hash, "capacity")
        (block,) = self.pool.get_new_blocks(1)
        self._emptied.discard(block)
        self._words[block_word(block.block_id) + layout.B_SEAL] = 0
        fence()
        return block

    def _copy(self, block: Block, block_hash: bytes, generation: int, copy_rows: CopyRows) -> bool:
        return copy_rows([region[block.block_id] for region in self.segment.regions])

    def _seal(self, block: Block, block_hash: bytes, generation: int) -> None:
        """Write the header, the seal last."""
        at, words = block_word(block.block_id), (*hash_words(block_hash), generation)
        for index, word in enumerate(words):
            self._words[at + index] = word
            self.point("inside_header")
        self._words[at + layout.B_HELD] = 0
        self.stamp((block,))
        self.point("before_seal")
        fence()
        self._words[at + layout.B_SEAL] = seal_of(self._digest_word, block.block_id, words)
        self.point("after_seal")

    # ---------------------------------------------------------------- out

    @contextmanager
    def pinned(self, block_hashes: Sequence[bytes], generation: int) -> Iterator[list[int | None]]:
        """Ids of the blocks that hold these contents, None where one is not there; none is evicted while inside."""
        with self.lock:
            get = self.pool.get_cached_block
            blocks = [get(key) for key in keys_of(block_hashes, generation)]
            held = [block for block in blocks if block is not None]
            self.pool.touch(held)
            self.figures.filled += len(held)
        try:
            yield [None if block is None else block.block_id for block in blocks]
        finally:
            with self.lock:
                self.give_back(reversed(held))

    def look(self, block_hashes: Sequence[bytes], generation: int) -> Found:
        """How far the prefix of these hashes is stored, and why not further. Changes no order of eviction."""
        keys = keys_of(block_hashes, generation)
        with self.lock:
            stored = len(self.pool.longest_prefix(keys, len(keys)))
            self.count_lookup(keys, stored)
            if stored == len(keys):
                return Found(stored, pb.BLOCK_STATE_HIT, pb.PREFIX_END_WHOLE)
            if keys[stored] in self._pending:
                return Found(stored, pb.BLOCK_STATE_PENDING, pb.PREFIX_END_BEING_COPIED)
            return Found(stored, pb.BLOCK_STATE_MISS, self._why_missing(block_hashes[stored], generation))

    def _why_missing(self, block_hash: bytes, generation: int) -> pb.PrefixEnd:
        others = {self.base_generation, *self.generations} - {generation}
        if any(key_of(block_hash, other) in self.pool.cached for other in others):
            return pb.PREFIX_END_RESET
        return self._evicted.get(block_hash, pb.PREFIX_END_NOT_STORED)

    def count_lookup(self, keys: Sequence[bytes], found: int) -> None:
        """The first ``found`` of these are stored. Under the lock."""
        self.figures.lookup_hashes += len(keys)
        self.figures.hit_hashes += found
        end = "hit" if found == len(keys) else "pending" if keys[found] in self._pending else "miss"
        self.figures.prefixes[end] += 1
        self.used_ns = self._clock()

    def give_back(self, blocks: Iterable[Block]) -> None:
        """Give one reference of each back; the first of them is evicted first. Under the lock."""
        blocks = list(blocks)
        self.stamp(blocks)
        self.pool.free_blocks(blocks)

    def stamp(self, blocks: Iterable[Block]) -> None:
        """Note a use of each, in this order. Under the lock."""
        self.used_ns = now = max(self._clock(), self.last_use + 1)
        for block in blocks:
            self._words[block_word(block.block_id) + layout.B_USED] = now
            now += 1
        self.last_use = now - 1

    # ---------------------------------------------------------------- generations

    @property
    def base_generation(self) -> int:
        """The one that a session joins."""
        return self._words[layout.S_BASE_GENERATION]

    def new_generation(self) -> int:
        """A number that no generation had. Under the lock."""
        number = self._words[layout.S_LAST_GENERATION] + 1
        self._words[layout.S_LAST_GENERATION] = number
        self.point("after_last_generation")
        return number

    def retire(self, generation: int) -> None:
        """Sessions that join from now on do not find what ``generation`` holds. Under the lock."""
        if self.base_generation == generation:
            number = self.new_generation()
            self._words[layout.S_BASE_GENERATION] = number
            self.point("after_base_generation")

    def drop_unreachable(self) -> None:
        """Take the content of blocks whose generation nobody is in and nobody can join; a block that is held keeps its
        memory until it is given back. Not under the lock: it is taken for a part at a time, since what cannot be
        reached stays so.
        """
        with self.lock:
            if not self.settled:
                return
            reachable = np.array([self.base_generation, *self.generations], np.uint64)
            headers = self.segment.headers
            left = (headers[:, layout.B_SEAL] != 0) & ~np.isin(headers[:, layout.B_GENERATION], reachable)
            ids = np.flatnonzero(left).tolist()
            suffixes = {key_of(b"", generation) for generation in reachable.tolist()}
        for start in range(0, len(ids), DROPPED_AT_ONCE):
            with self.lock:
                self._drop(ids[start : start + DROPPED_AT_ONCE], suffixes)

    def _drop(self, block_ids: Iterable[int], reachable: set[bytes]) -> None:
        """Take the content of these blocks where nobody has stored another since. Under the lock."""
        dropped = []
        for block_id in block_ids:
            block = self.pool.blocks[block_id]
            if block.block_hash is None or block.block_hash[HASH_BYTES:] in reachable:
                continue
            self.note_eviction(block.block_hash, "reset")
            if block.ref_cnt:
                self._emptied.add(block)
            self._words[block_word(block_id) + layout.B_SEAL] = 0
            self.point("inside_drop")
            dropped.append(block_id)
        self.pool.evict_blocks(dropped)

    def note_eviction(self, key: bytes, cause: str) -> None:
        """Count it, and remember it for a while. Under the lock."""
        self.figures.evictions[cause] += 1
        block_hash = key[:HASH_BYTES]
        self._evicted[block_hash] = pb.PREFIX_END_RESET if cause == "reset" else pb.PREFIX_END_EVICTED
        self._evicted.move_to_end(block_hash)
        if len(self._evicted) > REMEMBERED_EVICTIONS:
            self._evicted.popitem(last=False)

    # ---------------------------------------------------------------- figures

    def counts(self) -> dict[str, int]:
        """Blocks ``held`` (leased, read or being copied), ``cached`` (stored, may be evicted) and ``free``."""
        with self.lock:
            self._emptied = {block for block in self._emptied if block.ref_cnt and block.block_hash is None}
            in_queue, stored = self.pool.num_free_blocks, len(self.pool.cached)
            held = self.geometry.num_blocks - in_queue
            cached = stored - (held - len(self._pending) - len(self._emptied))
        return {"held": held, "cached": cached, "free": in_queue - cached}

    def oldest_ns(self) -> int | None:
        """When the block that is evicted next was used last, in ns since the epoch; None where it has no content."""
        with self.lock:
            block = next(iter(self.pool.queue), None)
            if block is None or block.block_hash is None:
                return None
            return self._words[block_word(block.block_id) + layout.B_USED]

    def point(self, name: str) -> None:
        """Between two shared stores. Crash tests kill the process here."""
