"""Where KV lies in the worker: pages with block tables, or one dense buffer a row."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from stagecache.diffusion.model import KVShape


class KVPages:
    """The worker's KV: for each layer ``[num_blocks, block_size, 2, heads, head_dim]``, allocated once, zeroed once."""

    def __init__(self, shape: KVShape, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.layers = [
            torch.zeros((num_blocks, block_size, *shape.row_shape), dtype=shape.dtype) for _ in range(shape.layers)
        ]

    def read_blocks(self, layer: int, block_ids: torch.Tensor) -> torch.Tensor:
        """A copy of these blocks' rows, [blocks * block_size, 2, heads, head_dim]. block_ids: int64."""
        return self.layers[layer].index_select(0, block_ids).flatten(0, 1)

    def write_blocks(self, layer: int, block_ids: torch.Tensor, rows: torch.Tensor) -> None:
        """Store rows, [blocks * block_size, 2, heads, head_dim], in these blocks. block_ids: int64."""
        pages = self.layers[layer]
        pages.index_copy_(0, block_ids, rows.reshape(len(block_ids), *pages.shape[1:]))


class PagedRow:
    """One row's KV in pages, found by its block table."""

    def __init__(self, pages: KVPages, block_ids: Sequence[int]) -> None:
        self._pages = pages
        self._size = pages.block_size
        self._table = list(block_ids)
        self._ids = torch.tensor(self._table, dtype=torch.int64)

    def write(self, layer: int, start: int, kv: torch.Tensor) -> None:
        pages, size = self._pages.layers[layer], self._size
        done = 0
        while done < len(kv):
            block, offset = divmod(start + done, size)
            count = min(size - offset, len(kv) - done)
            pages[self._table[block], offset : offset + count] = kv[done : done + count]
            done += count

    def read(self, layer: int, end: int) -> torch.Tensor:
        return self._pages.read_blocks(layer, self._ids[: -(-end // self._size)])


class DenseRow:
    """One row's KV in a buffer of its own, as long as whole blocks of the sequence."""

    def __init__(self, shape: KVShape, seq_len: int, block_size: int) -> None:
        length = -(-seq_len // block_size) * block_size
        self._layers = torch.zeros((shape.layers, length, *shape.row_shape), dtype=shape.dtype)

    def write(self, layer: int, start: int, kv: torch.Tensor) -> None:
        self._layers[layer, start : start + len(kv)] = kv

    def read(self, layer: int, end: int) -> torch.Tensor:
        return self._layers[layer]
