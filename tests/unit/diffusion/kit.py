"""A small DiT, requests for it, and the block index in this process where a test needs no daemon."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from examples.small_dit import MODEL_NAME, ImageRequest, SmallDiT, SmallDiTConfig
from stagecache.diffusion import DiffusionConfig, DiffusionKVMode, DiffusionStage
from stagecache.diffusion.pages import KVPages
from stagecached.index import BlockPool, LeaseTable

BLOCK = 16
SIZES = SmallDiTConfig(layers=2, width=64, heads=2, target=(4, 4), tile=BLOCK)


@contextmanager
def one_thread() -> Iterator[None]:
    """torch with one thread: on a busy machine, small products on two take a hundred times as long."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def picture(seed: int = 0, height: int = 32, width: int = 32) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def ask(prompt: str = "a red boat on a lake in the early morning fog", **more: Any) -> ImageRequest:
    return ImageRequest(prompt, **{"images": (picture(),), "steps": 3, **more})


class IndexInProcess:
    """The daemon's block index, with the rows beside it. Blocks are named and held by the code that serves them."""

    def __init__(self, num_blocks: int = 256) -> None:
        self.pool = BlockPool(num_blocks)
        self.leases = LeaseTable(self.pool)
        self.rows: dict[int, list[torch.Tensor]] = {}

    def join(self, fingerprint: str) -> None:
        pass

    def acquire(self, request_id: str, rows: Sequence[Sequence[bytes]]) -> list[int]:
        return [len(self.leases.acquire("here", f"{request_id}/{i}", hashes)) for i, hashes in enumerate(rows)]

    def release(self, request_id: str) -> None:
        for request in [r for r in self.leases._spans.get("here", {}) if r.rpartition("/")[0] == request_id]:
            self.leases.release("here", request)

    def load(self, request_id: str, hits: Mapping[int, bytes], pages: KVPages) -> None:
        for page, block_hash in hits.items():
            block = self.pool.get_cached_block(block_hash)
            assert block is not None
            assert block.ref_cnt > 0, "a hit that is loaded is held"
            for layer, rows in enumerate(self.rows[block.block_id]):
                pages.layers[layer][page] = rows

    def save(self, request_id: str, blocks: Mapping[int, bytes], pages: KVPages) -> int:
        new = {page: h for page, h in blocks.items() if self.pool.get_cached_block(h) is None}
        taken = self.pool.get_new_blocks(len(new))
        for block, (page, block_hash) in zip(taken, new.items(), strict=True):
            self.pool.cache_full_blocks([block], [block_hash])
            self.rows[block.block_id] = [layer[page].clone() for layer in pages.layers]
        self.pool.free_blocks(reversed(taken))
        return len(blocks)

    @property
    def num_cached(self) -> int:
        return sum(block.block_hash is not None for block in self.pool.blocks)


def dense(model: SmallDiT) -> DiffusionStage:
    return DiffusionStage(DiffusionConfig(MODEL_NAME, block_size=BLOCK), model)


def paged(model: SmallDiT, node: Any = None, num_kv_blocks: int = 64) -> DiffusionStage:
    config = DiffusionConfig(
        MODEL_NAME,
        DiffusionKVMode.PAGED_SCHEDULER,
        enable_prefix_caching=node is not None,
        block_size=BLOCK,
        num_kv_blocks=num_kv_blocks,
    )
    return DiffusionStage(config, model, node)


def changed_pixel(request: ImageRequest) -> ImageRequest:
    """The same request, one channel of one pixel one step brighter or darker."""
    image = request.images[0].copy()
    image[-1, -1, -1] ^= 1
    return replace(request, images=(image, *request.images[1:]))
