"""vLLM-Omni's whole GPUARModelRunner on vLLM's CPU runner, as two stages of one pipeline would run it.

    thinker   hidden states wanted whole, and a second tensor a token, ``hidden_states.layer_0``
    talker    hidden states not wanted whole; ``codes.audio``, int64, deferred

Both use the same tiny language model; its extra outputs are functions of its hidden states, so they depend on the whole
context. ``STEPS`` keeps what each step handed on, by stage.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from typing import Any

import torch
import vllm.v1.worker.cpu_worker as cpu_worker  # first: it prepares torch for the CPU
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm_omni.model_executor.models.output_templates import OmniOutput
from vllm_omni.worker.gpu_ar_model_runner import GPUARModelRunner

CODEBOOKS = 8

STEPS: dict[str, list[dict[str, dict[str, torch.Tensor]]]] = defaultdict(list)
"""By stage, for each step: what each request hands to the next stage."""

RUNNERS: dict[str, Any] = {}
"""The runner made last, by stage."""


def layer_rows(hidden: torch.Tensor) -> torch.Tensor:
    """A stand-in for the hidden states of an inner layer: [n, hidden]."""
    return hidden.flip(-1) * 0.5


def code_rows(hidden: torch.Tensor) -> torch.Tensor:
    """A stand-in for audio codes: int64 [n, CODEBOOKS]."""
    return (hidden[:, :CODEBOOKS] * 1000).round().long()


class StageRunner(GPUARModelRunner, CPUModelRunner):
    """One stage's runner."""

    stage = "thinker"

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        # What OmniModelConfig has and a plain ModelConfig lacks.
        for name, value in {"engine_output_type": "latent", "model_stage": self.stage}.items():
            object.__setattr__(vllm_config.model_config, name, value)
        super().__init__(vllm_config, device)
        RUNNERS[self.stage] = self

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        model = self.model
        forward = model.forward
        known = set(inspect.signature(forward).parameters)
        model.forward = lambda *args, **kwargs: forward(*args, **{k: v for k, v in kwargs.items() if k in known})
        model.have_multimodal_outputs = True
        model.make_omni_output = lambda hidden, **_: OmniOutput(hidden, self.extra(hidden))
        for name, value in self.policy().items():
            setattr(model, name, value)
        self._snapshot_prefix_cache_model_policy(model)
        self._pooler_payload_include_hidden_flag = getattr(model, "omni_pooler_payload_include_hidden", True)

    def extra(self, hidden: torch.Tensor) -> dict[str, Any]:
        return {"hidden_states": {"layers": {0: layer_rows(hidden)}}}

    def policy(self) -> dict[str, Any]:
        return {}

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        output = super().sample_tokens(*args, **kwargs)
        payloads = getattr(output, "inter_stage_outputs", None) or getattr(output, "multimodal_outputs", None)
        if payloads:
            STEPS[self.stage].append(dict(zip(output.req_ids, payloads, strict=True)))
        return output


class TalkerRunner(StageRunner):
    """Emits codes, and needs no hidden states of a hit."""

    stage = "talker"

    def extra(self, hidden: torch.Tensor) -> dict[str, Any]:
        return {"codes": {"audio": code_rows(hidden)}}

    def policy(self) -> dict[str, Any]:
        return {
            "requires_full_prefix_cached_hidden_states": False,
            "deferred_prefix_cache_mm_keys": {"codes.audio"},
            "omni_pooler_payload_include_hidden": False,
        }


class ThinkerWorker(cpu_worker.CPUWorker):
    """vLLM's CPU worker with the stage's runner."""

    runner_class: type[StageRunner] = StageRunner

    def init_device(self) -> None:
        original = cpu_worker.CPUModelRunner
        cpu_worker.CPUModelRunner = self.runner_class
        try:
            super().init_device()
        finally:
            cpu_worker.CPUModelRunner = original

    def session(self) -> dict[str, Any]:
        """For collective_rpc: this process and the session that its runner holds."""
        import os

        cache = getattr(self.model_runner.omni_prefix_cache, "cache", None)
        return {"pid": os.getpid(), "session": None if cache is None else cache.session.session_id}


class TalkerWorker(ThinkerWorker):
    runner_class = TalkerRunner
