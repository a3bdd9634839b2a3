"""Both managers behind the calls of ``tests.model.steps``: vLLM-Omni's own, and ours in its place.

    peer      vLLM-Omni's OmniPrefixCacheManager, in process
    sidecar   SidecarPrefixCacheManager on the same group view
    slots     the same, on a view that knows only the slots of a step
    adapter   the same, fed as a hooked 0.32.0rc1 runner feeds it

With vLLM-Omni 0.32.0rc1 ``peer`` and ``slots`` go through its scheduler adapter and write layouts.
"""

from __future__ import annotations

import inspect
from itertools import count
from typing import Any

import torch
from vllm_omni.core import prefix_cache as omni
from vllm_omni.core.prefix_cache import (
    FullAttentionGroupView,
    ModelCachePolicy,
    OmniPrefixCacheManager,
    OmniPrefixCacheUnmatchError,
    PrefixCacheConfig,
)

from stagecache.shim.omni import SidecarPrefixCacheManager
from stagecache.shim.omni.adapter import SidecarSchedulerAdapter
from tests.model.steps import HIDDEN, Merged, Outputs, Refused, Rules, Step, Tensor
from tests.omni.batch import InputBatch, SchedulerOutputs, SlotView
from tests.omni.values import converted, from_torch, to_torch

ADAPTER_API = "write_layout" in inspect.signature(OmniPrefixCacheManager.save_outputs).parameters
"""Whether this is a release with scheduler adapter and write layouts (0.32.0rc1)."""

POISON = 0xA5
"""Fills live buffers after the save: no result may show it."""

KINDS = ("peer", "sidecar", "slots", "adapter")

_models = (f"model-{number}" for number in count())
"""Each manager has a model of its own: keys are remembered by model."""


class ManagerCache:
    """A manager, driven with plain values. It spoils every live buffer right after the save, and keeps what was handed
    out so that ``held_unchanged`` can tell whether any of it changed since."""

    def __init__(self, kind: str, rules: Rules, socket: str, **settings: Any) -> None:
        self.kind = kind
        self.rules = rules
        self.batch = InputBatch(rules.block_size)
        self.view = FullAttentionGroupView(self.batch, rules.block_size)
        self.outputs = SchedulerOutputs()
        self.held: list[tuple[torch.Tensor, Tensor]] = []
        self._step: Any = None
        config = PrefixCacheConfig(
            num_blocks=settings.pop("num_blocks", 16),
            block_size=rules.block_size,
            staging_depth=rules.depth,
            staging_capacity_tokens=rules.capacity,
            **settings,
        )
        self.manager, self.adapter = self._make(config, socket)
        self.manager.register_policy(ModelCachePolicy(rules.needs_hidden, rules.deferred))

    def _make(self, config: PrefixCacheConfig, socket: str) -> tuple[Any, Any]:
        adapter = omni.PrefixCacheSchedulerAdapter() if ADAPTER_API else None
        if self.kind == "peer":
            return OmniPrefixCacheManager(config, **({} if ADAPTER_API else {"view": self.view})), adapter
        ours = {"socket": socket, "model": next(_models), "arena_bytes": 1 << 20}
        if self.kind == "adapter":
            return SidecarPrefixCacheManager(config, **ours), SidecarSchedulerAdapter()
        if self.kind == "slots":
            view = None if ADAPTER_API else SlotView(self.view)
            return SidecarPrefixCacheManager(config, view, **ours), adapter
        return SidecarPrefixCacheManager(config, self.view, **ours), None

    def new_step_starts(self, step: Step) -> None:
        output = self.outputs.of(step)
        with _refusals():
            self._step = output if self.adapter is None else self.adapter.translate_step(output)
            self.manager.new_step_starts(self._step)
        self.batch.show(step)
        self._counts = output.num_scheduled_tokens

    def save_outputs(self, outputs: Outputs) -> int:
        live: list[torch.Tensor] = []

        def buffer(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            live.append(to_torch(value))
            return live[-1]

        hidden = None if outputs.hidden is None else buffer(outputs.hidden)
        mm = {key: converted(value, buffer) for key, value in outputs.mm.items()}
        extra = {}
        with _refusals():
            if self.adapter is not None:
                counts = {req_id: max(0, count) for req_id, count in self._counts.items()}
                extra["write_layout"] = self.adapter.build_write_layout(self.view, num_scheduled_tokens=counts)
            step_id: int = self.manager.save_outputs(
                hidden, mm, num_tokens_unpadded=outputs.unpadded, num_tokens_padded=outputs.padded, **extra
            )
        for tensor in live:
            if tensor.numel():
                tensor.view(torch.uint8).fill_(POISON)
        return step_id

    def materialize(self, step_id: int, req_ids: list[str]) -> Merged:
        with _refusals():
            given = self.manager.materialize(step_id, req_ids)
        self.last = given
        out: Merged = {}
        for key, values in {HIDDEN: given.hidden_states or {}, **given.mm_outputs}.items():
            for req_id, value in values.items():
                out.setdefault(key, {})[req_id] = converted(value, self._hold)
        return out

    def discard_step(self, step_id: int) -> None:
        with _refusals():
            self.manager.discard_step(step_id)

    def reset(self) -> None:
        raise NotImplementedError("a manager of vLLM-Omni has no reset")

    def held_unchanged(self) -> bool:
        """S3: whether all that was handed out still reads as it did then; lets go of it."""
        same = all(from_torch(value) == plain for value, plain in self.held)
        self.held.clear()
        return same

    def close(self) -> None:
        self.held.clear()
        self.manager.shutdown()

    def _hold(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        plain = from_torch(value)
        self.held.append((value, plain))
        return plain


class _refusals:  # noqa: N801
    """Turns vLLM-Omni's errors, and classes derived from them, into Refused with the names of all their classes."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, OmniPrefixCacheUnmatchError):
            raise Refused({cls.__name__ for cls in type(error).__mro__}, str(error)) from error
