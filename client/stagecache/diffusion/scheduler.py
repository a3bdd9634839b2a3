"""Scheduler side: block tables of requests, and which of their prefix blocks the node has.

All rows of a request are admitted, or none. A hit is held on the node from admission until the request finishes, so
that it cannot be evicted before the worker has it. Rows that hit the same block share its page; a page that is
computed belongs to one row. Target tokens have pages like all others, and no hashes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from stagecache.diffusion.counts import DiffusionCounts
from stagecache.diffusion.identity import PrefixIdentity, hash_prefix
from stagecache.diffusion.model import RowLengths
from stagecache.errors import StageCacheError


class PageShortageError(StageCacheError):
    """A request needs more pages than are free; nothing was taken.

    Attributes:
        needed, free, total: pages.
    """

    def __init__(self, request_id: str, needed: int, free: int, total: int) -> None:
        remedy = (
            "Raise num_kv_blocks, or shorten the request."
            if needed > total
            else "Finish another request first, or raise num_kv_blocks."
        )
        super().__init__(f"request {request_id} needs {needed} pages, {free} of {total} are free.", remedy=remedy)
        self.needed, self.free, self.total = needed, free, total


class PrefixIndex(Protocol):
    """Which prefix blocks the node has."""

    def acquire(self, request_id: str, rows: Sequence[Sequence[bytes]]) -> list[int]:
        """How many leading hashes of each row the node has; these blocks are held for the request until ``release``.

        Zeros where the node cannot be asked: then everything is computed.
        """

    def release(self, request_id: str) -> None:
        """End what a request holds. May be repeated."""


@dataclass(frozen=True)
class RowAllocation:
    """One row, as the worker gets it.

    block_ids: its block table, for all of its tokens. hashes: of its complete prefix blocks; empty with prefix caching
    off. cached_blocks: leading blocks that the node has.
    """

    lengths: RowLengths
    block_ids: tuple[int, ...]
    hashes: tuple[bytes, ...] = ()
    cached_blocks: int = 0


@dataclass(frozen=True)
class Allocation:
    """One request, as the worker gets it: plain data."""

    request_id: str
    rows: tuple[RowAllocation, ...]

    def hits(self) -> dict[int, bytes]:
        """Hash by page of every block that comes from the node; rows may share pages."""
        return {
            block_id: block_hash
            for row in self.rows
            for block_id, block_hash in zip(row.block_ids, row.hashes[: row.cached_blocks], strict=False)
        }

    def computed(self) -> dict[int, bytes]:
        """Hash by page of every complete prefix block that the worker computes, one page a hash."""
        found: dict[bytes, int] = {}
        for row in self.rows:
            blocks = zip(row.block_ids[row.cached_blocks :], row.hashes[row.cached_blocks :], strict=False)
            for block_id, block_hash in blocks:
                found.setdefault(block_hash, block_id)
        return {block_id: block_hash for block_hash, block_id in found.items()}

    def without_hits(self) -> Allocation:
        """The same pages, all of them to be computed."""
        return Allocation(self.request_id, tuple(replace(row, cached_blocks=0) for row in self.rows))


class DiffusionScheduler:
    """Gives out the worker's pages. One thread owns it."""

    def __init__(
        self, num_blocks: int, block_size: int, index: PrefixIndex | None, fingerprint: str, counts: DiffusionCounts
    ) -> None:
        """index: None with prefix caching off. fingerprint: of the model, part of every hash."""
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._index = index
        self._fingerprint = fingerprint
        self._counts = counts
        self._free = list(range(num_blocks - 1, -1, -1))
        self._pages: dict[str, set[int]] = {}

    @property
    def num_free_blocks(self) -> int:
        return len(self._free)

    def admit(
        self, request_id: str, rows: Sequence[RowLengths], identities: Sequence[PrefixIdentity] = ()
    ) -> Allocation:
        """Pages for all rows of a request, behind the prefix blocks that the node has.

        identities: one a row; empty with prefix caching off.

        Raises:
            PageShortageError: nothing was taken.
        """
        if request_id in self._pages:
            raise ValueError(f"request {request_id} is running already")
        if self._index is not None and len(identities) != len(rows):
            raise ValueError(f"request {request_id}: {len(identities)} identities for {len(rows)} rows")
        # Whatever is cached, a request that hits nothing must fit: a hit may be lost before it is brought.
        needed = sum(self._blocks(row.seq_len) for row in rows)
        if needed > len(self._free):
            raise PageShortageError(request_id, needed, len(self._free), self._num_blocks)
        hashes: list[tuple[bytes, ...]] = [()] * len(rows)
        cached = [0] * len(rows)
        if self._index is not None:
            hashes = [self._hashes(row, identity) for row, identity in zip(rows, identities, strict=True)]
            cached = self._index.acquire(request_id, hashes)
        shared: dict[bytes, int] = {}
        tables: list[RowAllocation] = []
        for row, row_hashes, num_cached in zip(rows, hashes, cached, strict=True):
            hits = [self._shared(shared, block_hash) for block_hash in row_hashes[:num_cached]]
            own = [self._free.pop() for _ in range(self._blocks(row.seq_len) - num_cached)]
            tables.append(RowAllocation(row, (*hits, *own), tuple(row_hashes), num_cached))
        self._pages[request_id] = {block_id for table in tables for block_id in table.block_ids}
        return Allocation(request_id, tuple(tables))

    def finish(self, request_id: str) -> None:
        """A request ended, however: its pages are free, its hold on the node ends. May be repeated."""
        pages = self._pages.pop(request_id, None)
        if pages is None:
            return
        self._free.extend(sorted(pages, reverse=True))
        if self._index is not None:
            self._index.release(request_id)

    def _hashes(self, row: RowLengths, identity: PrefixIdentity) -> tuple[bytes, ...]:
        if len(identity.token_ids) != row.prefix_len:
            raise ValueError(f"{len(identity.token_ids)} token ids for a prefix of {row.prefix_len} tokens")
        hashes = hash_prefix(identity, self._fingerprint, self._block_size)
        self._counts.hashed_blocks += len(hashes)
        return tuple(hashes)

    def _shared(self, shared: dict[bytes, int], block_hash: bytes) -> int:
        if block_hash not in shared:
            shared[block_hash] = self._free.pop()
        return shared[block_hash]

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self._block_size)
