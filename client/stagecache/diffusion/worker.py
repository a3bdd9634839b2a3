"""Worker side: pages, and the model's forwards over them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Protocol

from stagecache.diffusion.config import DiffusionConfig, DiffusionKVMode
from stagecache.diffusion.counts import DiffusionCounts
from stagecache.diffusion.model import Denoising, KVShape, RowKV, RowQuery
from stagecache.diffusion.pages import DenseRow, KVPages, PagedRow
from stagecache.diffusion.scheduler import Allocation
from stagecache.errors import StageCacheError

logger = logging.getLogger("stagecache")


class PrefixStore(Protocol):
    """Brings prefix blocks from the node, and takes them there."""

    def load(self, request_id: str, hits: Mapping[int, bytes], pages: KVPages) -> None:
        """Write the content of each hash into its page. hits: hash by page.

        Raises:
            StageCacheError: one of them could not be had; pages may have been written in part.
        """

    def save(self, request_id: str, blocks: Mapping[int, bytes], pages: KVPages) -> int:
        """Hand complete pages to the node under their hashes; returns how many went. It does not wait for them.

        Raises:
            StageCacheError: not all of them went.
        """


class DiffusionWorker:
    """Runs one request at a time."""

    def __init__(
        self, config: DiffusionConfig, shape: KVShape, store: PrefixStore | None, counts: DiffusionCounts
    ) -> None:
        """store: None with prefix caching off."""
        self._config = config
        self._shape = shape
        self._store = store
        self._counts = counts
        self.pages: KVPages | None = None
        if config.diffusion_kv_mode is DiffusionKVMode.PAGED_SCHEDULER:
            self.pages = KVPages(shape, config.num_kv_blocks, config.block_size)

    def run(self, denoising: Denoising, allocation: Allocation | None) -> None:
        """All denoise steps of a request. allocation: None in dense mode.

        The first step computes what follows the cached prefix of each row; the later ones the target alone. Complete
        prefix blocks go to the node right behind the first step: they do not change any more.
        """
        rows = denoising.rows
        if allocation is None or self.pages is None:
            kvs: list[RowKV] = [DenseRow(self._shape, row.seq_len, self._config.block_size) for row in rows]
            starts = [0] * len(rows)
        else:
            allocation = self._load(allocation)
            kvs = [PagedRow(self.pages, row.block_ids) for row in allocation.rows]
            starts = [row.cached_blocks * self._config.block_size for row in allocation.rows]
        first = [RowQuery(start, kv) for start, kv in zip(starts, kvs, strict=True)]
        self._counts.first_step_tokens += denoising.step(0, first)
        if allocation is not None:
            self._save(allocation)
        later = [RowQuery(row.prefix_len, kv) for row, kv in zip(rows, kvs, strict=True)]
        for index in range(1, denoising.num_steps):
            self._counts.later_step_tokens += denoising.step(index, later)

    def _load(self, allocation: Allocation) -> Allocation:
        """Bring what the node has; where it cannot be brought, all of it is computed."""
        hits = allocation.hits()
        if not hits or self._store is None or self.pages is None:
            return allocation
        try:
            self._store.load(allocation.request_id, hits, self.pages)
        except StageCacheError as error:
            logger.warning("stagecache: prefix of request %s is computed again: %s", allocation.request_id, error)
            self._counts.failed_loads += 1
            return allocation.without_hits()
        self._counts.loaded_blocks += len(hits)
        self._counts.hit_blocks += sum(row.cached_blocks for row in allocation.rows)
        return allocation

    def _save(self, allocation: Allocation) -> None:
        blocks = allocation.computed()
        if not blocks or self._store is None or self.pages is None:
            return
        try:
            self._counts.saved_blocks += self._store.save(allocation.request_id, blocks, self.pages)
        except StageCacheError as error:
            logger.warning("stagecache: prefix of request %s is not kept: %s", allocation.request_id, error)
            self._counts.unsaved_requests += 1
