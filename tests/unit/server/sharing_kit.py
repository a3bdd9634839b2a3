"""What a namespace is to a consumer, in this process' memory: blocks that outlive a consumer's death."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from stagecache_wire.geometry import KeySchema
from stagecached.sharing import SharedRows


class KeptBlocks:
    """Blocks by hash. A block is there once its rows are all copied."""

    def __init__(self, schemas: Sequence[KeySchema], block_size: int, num_blocks: int = 64) -> None:
        self.schemas = tuple(schemas)
        self.num_blocks = num_blocks
        self.blocks: dict[bytes, dict[str, np.ndarray]] = {}
        self.resets: list[int] = []
        self.open = True
        self._block_size = block_size

    def publish(self, block_hash: bytes, copy_rows: Callable[[SharedRows], None]) -> str:
        if not self.open:
            return "closed"
        if block_hash in self.blocks:
            return "held"
        if len(self.blocks) >= self.num_blocks:
            return "no_room"
        rows = {schema.name: np.zeros(self._block_size, f"V{schema.row_bytes}") for schema in self.schemas}
        copy_rows(rows)
        self.blocks[block_hash] = rows
        return "kept"

    @contextmanager
    def rows(self, block_hash: bytes) -> Iterator[SharedRows | None]:
        yield self.blocks.get(block_hash) if self.open else None

    def reset(self, sequence: int) -> None:
        if sequence not in self.resets:
            self.resets.append(sequence)
            self.blocks.clear()
