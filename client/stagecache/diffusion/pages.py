"""Where KV lies in the worker: pages with block tables, or one dense buffer a row."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from stagecache.diffusion.model import KVShape


class BlockTable:
    """Blocks in token order. ``first``: of a table whose blocks lie one behind the other, else None."""

    def __init__(self, block_ids: Sequence[int]) -> None:
        self.block_ids = list(block_ids)
        self.index = torch.tensor(self.block_ids, dtype=torch.int64)
        low = self.block_ids[0] if self.block_ids else 0
        self.first = low if self.block_ids == list(range(low, low + len(self.block_ids))) else None


class KVPages:
    """The worker's KV: for each layer ``[num_blocks, block_size, 2, heads, head_dim]``, allocated once, zeroed once."""

    def __init__(self, shape: KVShape, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.layers = [
            torch.zeros((num_blocks, block_size, *shape.row_shape), dtype=shape.dtype) for _ in range(shape.layers)
        ]

    def read(self, layer: int, table: BlockTable, num_blocks: int) -> torch.Tensor:
        """Rows of a table's leading blocks, [num_blocks * block_size, 2, heads, head_dim].

        For reading, until the next write: blocks that lie one behind the other are not copied.
        """
        pages = self.layers[layer]
        if table.first is not None:
            return pages[table.first : table.first + num_blocks].flatten(0, 1)
        return pages.index_select(0, table.index[:num_blocks]).flatten(0, 1)

    def write(self, layer: int, table: BlockTable, rows: torch.Tensor) -> None:
        """Store rows, [blocks * block_size, 2, heads, head_dim], in all blocks of a table."""
        pages = self.layers[layer]
        rows = rows.view(len(table.block_ids), *pages.shape[1:])
        if table.first is not None:
            pages[table.first : table.first + len(rows)] = rows
        else:
            pages.index_copy_(0, table.index, rows)


class PagedRow:
    """One row's KV in pages, found by its block table."""

    def __init__(self, pages: KVPages, block_ids: Sequence[int]) -> None:
        self._pages = pages
        self._size = pages.block_size
        self._table = BlockTable(block_ids)

    def write(self, layer: int, start: int, kv: torch.Tensor) -> None:
        pages, size, blocks = self._pages.layers[layer], self._size, self._table.block_ids
        done = 0
        while done < len(kv):
            block, offset = divmod(start + done, size)
            count = min(size - offset, len(kv) - done)
            pages[blocks[block], offset : offset + count] = kv[done : done + count]
            done += count

    def read(self, layer: int, end: int) -> torch.Tensor:
        return self._pages.read(layer, self._table, -(-end // self._size))


class DenseRow:
    """One row's KV in a buffer of its own, as long as whole blocks of the sequence."""

    def __init__(self, shape: KVShape, seq_len: int, block_size: int) -> None:
        length = -(-seq_len // block_size) * block_size
        self._layers = torch.zeros((shape.layers, length, *shape.row_shape), dtype=shape.dtype)

    def write(self, layer: int, start: int, kv: torch.Tensor) -> None:
        self._layers[layer, start : start + len(kv)] = kv

    def read(self, layer: int, end: int) -> torch.Tensor:
        return self._layers[layer]
