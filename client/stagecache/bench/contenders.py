"""What is measured: no cache, and stagecache with a daemon of its own process. The peer is in peer.py."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from stagecache.bench.batch import BLOCK_SIZE, LiveBatch, Plan, Rows, Shape
from stagecache.cache import StageCache
from stagecache.device import clone_rows
from stagecache.outputs import StageCacheOutputs
from stagecache.policy import ModelCachePolicy
from stagecache_wire.geometry import Geometry

OURS = "stagecache"
NONE = "no cache"


class Contender(ABC):
    """One cache behind the calls that a runner makes, with a live batch of its own."""

    name: str

    def __init__(self, batch: LiveBatch) -> None:
        self.batch = batch

    @abstractmethod
    def begin(self, plan: Plan) -> None:
        """Before the forward."""

    @abstractmethod
    def save(self, rows: Rows, count: int) -> int:
        """After the forward; ``count`` rows."""

    @abstractmethod
    def materialize(self, step: int, req_ids: list[str]) -> Any:
        """Outputs by request: ``hidden_states`` and ``mm_outputs``, as both caches give them."""

    def quiet(self) -> None:  # noqa: B027  most have nothing to ask
        """Wait for what it does elsewhere, as far as it can tell."""

    @abstractmethod
    def close(self) -> None:
        """Give everything back."""


class NoCache(Contender):
    """What a runner does without any cache: one copy of each output to the host, cut by request."""

    name = NONE

    def __init__(self, batch: LiveBatch) -> None:
        super().__init__(batch)
        self._counts: list[int] = []
        self._rows: dict[str, torch.Tensor] = {}

    def begin(self, plan: Plan) -> None:
        self._counts = list(plan.num_scheduled_tokens.values())

    def save(self, rows: Rows, count: int) -> int:
        self._rows = {name: clone_rows(tensor[:count]) for name, tensor in rows.by_key().items()}
        return 0

    def materialize(self, step: int, req_ids: list[str]) -> StageCacheOutputs:
        parts = {
            name: dict(zip(req_ids, tensor.split(self._counts), strict=True)) for name, tensor in self._rows.items()
        }
        hidden = parts.pop("__hidden_states__")
        return StageCacheOutputs(hidden, parts)

    def close(self) -> None:
        self._rows = {}


class Ours(Contender):
    """stagecache, attached to a daemon."""

    name = OURS

    def __init__(self, batch: LiveBatch, socket: Path, shape: Shape, geometry: Geometry) -> None:
        super().__init__(batch)
        self.cache = StageCache.attach(
            socket=socket,
            model="bench",
            stage="bench",
            geometry=geometry,
            view=batch,
            policy=ModelCachePolicy(deferred_keys=frozenset({"codec"} if shape.codec else ())),
        )

    def begin(self, plan: Plan) -> None:
        self.cache.new_step_starts(plan)

    def save(self, rows: Rows, count: int) -> int:
        return self.cache.save_outputs(rows.hidden, rows.outputs, num_tokens_unpadded=count, num_tokens_padded=count)

    def materialize(self, step: int, req_ids: list[str]) -> StageCacheOutputs:
        return self.cache.materialize(step, req_ids)

    def quiet(self) -> None:
        session = self.cache.session
        session.wait_consumed(session.log.head, 30.0, "the log")

    def close(self) -> None:
        self.cache.close()


def geometry_for(num_blocks: int, capacity: int, hit_bytes: int = 0) -> Geometry:
    """Sizes for a workload. hit_bytes: rows of all hits of a step; held merges may take half of the arena."""
    arena = (64 << 20) + 4 * hit_bytes
    return Geometry(num_blocks, BLOCK_SIZE, capacity, 4, arena, 4096).checked()


def peer_names() -> Sequence[str]:
    """Names of the peer's two modes."""
    return ("vllm-omni eager", "vllm-omni async")
