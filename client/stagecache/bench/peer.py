"""vLLM-Omni's in-process manager, from the installed package, in both of its modes.

Its asynchronous mode asks CUDA for streams, events and pinned memory. Here the rows are in host memory already, so
these calls are stubbed and cost nothing; its committer and prefetch threads run as they do beside a GPU.
"""

from __future__ import annotations

import contextlib
import os
import types
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

import torch

from stagecache.bench.batch import BLOCK_SIZE, LiveBatch, Plan, Rows, Shape
from stagecache.bench.contenders import Contender, peer_names
from stagecache_wire.geometry import Geometry

PEER_VERSION = "0.30.0"


def peer_missing() -> str | None:
    """What to say where the peer cannot be measured, None where it can."""
    try:
        found = version("vllm-omni")
    except PackageNotFoundError:
        found = None
    if found is not None and find_spec("vllm_omni") is not None:
        if found == PEER_VERSION:
            return None
        return f"the peer of these figures is vLLM-Omni {PEER_VERSION}, and {found} is installed here"
    return (
        f"the peer of these figures, vLLM-Omni {PEER_VERSION}, is not installed here. In a checkout, `make bench` "
        f"makes an environment that has it; elsewhere `pip install vllm-omni=={PEER_VERSION}` beside vLLM, or leave it "
        "out: --no-peer"
    )


class _Event:
    """torch.cuda.Event of work that is done when it is asked for."""

    def record(self, *_: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass


class _Stream:
    """torch.cuda.Stream without a device."""

    def wait_event(self, event: _Event) -> None:
        pass


@contextlib.contextmanager
def _on_stream(_: _Stream) -> Iterator[None]:
    yield


def _unpinned_empty(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
    return torch.empty(*args, **kwargs)


def _torch_without_device() -> types.ModuleType:
    """torch, but with stubs for the CUDA calls that the peer's controller makes. A module, so as fast as torch."""
    stubbed = types.ModuleType("torch")
    stubbed.__dict__.update(torch.__dict__)
    stubbed.__dict__["empty"] = _unpinned_empty
    stubbed.__dict__["cuda"] = types.SimpleNamespace(
        Event=_Event, Stream=_Stream, stream=_on_stream, is_available=lambda: False
    )
    return stubbed


class Peer(Contender):
    """vLLM-Omni's manager with its own view of the batch."""

    def __init__(self, batch: LiveBatch, shape: Shape, geometry: Geometry, *, eager: bool) -> None:
        super().__init__(batch)
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        from vllm_omni.core.prefix_cache import (
            FullAttentionGroupView,
            ModelCachePolicy,
            OmniPrefixCacheManager,
            PrefixCacheConfig,
            controller,
        )

        controller.torch = _torch_without_device()
        self.name = peer_names()[0 if eager else 1]
        config = PrefixCacheConfig(
            num_blocks=geometry.num_blocks,
            block_size=BLOCK_SIZE,
            staging_depth=geometry.staging_depth,
            staging_capacity_tokens=geometry.staging_capacity_tokens,
        )
        view = FullAttentionGroupView(batch.as_input_batch(), BLOCK_SIZE)
        self._manager = OmniPrefixCacheManager(config, view, eager=eager)
        self._manager.register_policy(ModelCachePolicy(deferred_keys=frozenset({"codec"} if shape.codec else ())))

    def begin(self, plan: Plan) -> None:
        self._manager.new_step_starts(plan)

    def save(self, rows: Rows, count: int) -> int:
        step: int = self._manager.save_outputs(
            rows.hidden, rows.outputs, num_tokens_unpadded=count, num_tokens_padded=count
        )
        return step

    def materialize(self, step: int, req_ids: list[str]) -> Any:
        return self._manager.materialize(step, req_ids)

    def close(self) -> None:
        self._manager.shutdown()
