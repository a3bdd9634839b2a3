"""The three modes, each a stage of its own over the same weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from bench.diffusion.workloads import BLOCK_SIZE
from examples.small_dit import MODEL_NAME, SmallDiT
from stagecache.diffusion import DiffusionConfig, DiffusionStage, NodeStore

DENSE, PAGED, PREFIX = "dense", "paged", "paged + prefix"


@dataclass
class Mode:
    """One mode. node: None without prefix caching."""

    name: str
    stage: DiffusionStage
    node: NodeStore | None = None


@contextmanager
def all_modes(model: SmallDiT, socket: Path, num_kv_blocks: int = 64) -> Iterator[list[Mode]]:
    """The three, with a session at the daemon for the last."""
    settings = {"block_size": BLOCK_SIZE, "num_kv_blocks": num_kv_blocks}
    paged = DiffusionConfig(MODEL_NAME, "paged_scheduler", **settings)
    prefix = DiffusionConfig(MODEL_NAME, "paged_scheduler", enable_prefix_caching=True, **settings)
    node = NodeStore.attach(socket, model.kv_shape, model=MODEL_NAME, stage="dit", block_size=BLOCK_SIZE)
    try:
        yield [
            Mode(DENSE, DiffusionStage(DiffusionConfig(MODEL_NAME, **settings), model)),
            Mode(PAGED, DiffusionStage(paged, model)),
            Mode(PREFIX, DiffusionStage(prefix, model, node), node),
        ]
    finally:
        node.close()


def threads(count: int) -> None:
    """CPUs for torch; the daemon takes another."""
    torch.set_num_threads(count)
