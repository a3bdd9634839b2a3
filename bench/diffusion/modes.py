"""The three modes, each a stage of its own over the same weights, and paged a second time: what noise alone does."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.diffusion.workloads import BLOCK_SIZE
from examples.small_dit import MODEL_NAME, SmallDiT
from stagecache.diffusion import DiffusionConfig, DiffusionKVMode, DiffusionStage, NodeStore

DENSE, PAGED, AGAIN, PREFIX = "dense", "paged", "paged again", "paged + prefix"


@dataclass
class Mode:
    """One mode. node: None without prefix caching. own_cpu_s: CPU seconds that the worker's thread spent so far on
    identity, hits, loads and saves.
    """

    name: str
    stage: DiffusionStage
    model: SmallDiT
    node: NodeStore | None = None
    own_cpu_s: float = 0.0

    def clock(self) -> None:
        """Count own_cpu_s from now on."""
        stage = self.stage
        parts = [(stage._hook, "identify"), (stage._scheduler, "admit"), (stage._scheduler, "finish")]
        for owner, name in [*parts, (stage._worker, "_load"), (stage._worker, "_save")]:
            setattr(owner, name, self._clocked(getattr(owner, name)))

    def _clocked(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def clocked(*arguments: Any) -> Any:
            begun = time.thread_time()
            try:
                return call(*arguments)
            finally:
                self.own_cpu_s += time.thread_time() - begun

        return clocked


@contextmanager
def all_modes(model: SmallDiT, socket: Path, num_kv_blocks: int = 64) -> Iterator[list[Mode]]:
    """The modes, with a session at the daemon for the last."""

    def config(mode: DiffusionKVMode, *, prefix: bool = False) -> DiffusionConfig:
        return DiffusionConfig(
            MODEL_NAME, mode, enable_prefix_caching=prefix, block_size=BLOCK_SIZE, num_kv_blocks=num_kv_blocks
        )

    dense, paged = config(DiffusionKVMode.DENSE_LEGACY), config(DiffusionKVMode.PAGED_SCHEDULER)
    node = NodeStore.attach(socket, model.kv_shape, model=MODEL_NAME, stage="dit", block_size=BLOCK_SIZE)
    try:
        prefix = DiffusionStage(config(DiffusionKVMode.PAGED_SCHEDULER, prefix=True), model, node)
        caching = Mode(PREFIX, prefix, model, node)
        caching.clock()
        yield [
            Mode(DENSE, DiffusionStage(dense, model), model),
            Mode(PAGED, DiffusionStage(paged, model), model),
            Mode(AGAIN, DiffusionStage(paged, model), model),
            caching,
        ]
    finally:
        node.close()


def threads(count: int) -> None:
    """CPUs for torch; the daemon takes another."""
    torch.set_num_threads(count)
