"""An engine without weights: vLLM's real Scheduler, InputBatch and ``_update_states`` with vLLM-Omni's real mixin.

Each row is a function of the content before it, images included, so every merged row can be checked exactly. Images
are features of the request, with equal placeholder tokens; their rows come from the encoder's outputs, which are
computed when the scheduler asks for it and kept as long as its encoder cache keeps them.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import vllm.v1.worker.gpu_model_runner as gpu_model_runner
from vllm import SamplingParams
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, ParallelConfig, SchedulerConfig, VllmConfig
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.utils.hashing import sha256
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker.gpu_input_batch import InputBatch
from vllm_omni.core.prefix_cache import stage_prefix_cache_config
from vllm_omni.core.prefix_cache.runner_mixin import PrefixCacheRunnerMixin

from stagecache.shim.omni import attach

BLOCK = 16
PLACEHOLDER = 999
MAX_LEN = 512
MODULUS = 1 << 20


@dataclass(frozen=True)
class Image:
    """An image at ``offset`` of the prompt, ``length`` placeholders long. ``name`` is its content."""

    name: str
    offset: int
    length: int

    def value(self, place: int) -> int:
        """What the encoder yields for the placeholder ``place`` of the image."""
        return (sum(map(ord, self.name)) * 7919 + place * 104729) % MODULUS


def request(req_id: str, tokens: Sequence[int], *images: Image, max_tokens: int = 2) -> Request:
    init_none_hash(sha256)
    params = SamplingParams(ignore_eos=True, max_tokens=max_tokens)
    params.update_from_generation_config({}, 2)
    features = [
        MultiModalFeatureSpec(
            data=None,
            modality="image",
            identifier=image.name,
            mm_position=PlaceholderRange(offset=image.offset, length=image.length),
            mm_hash=image.name,
        )
        for image in images
    ]
    return Request(
        request_id=req_id,
        prompt_token_ids=list(tokens),
        sampling_params=params,
        pooling_params=None,
        mm_features=features,
        block_hasher=get_request_block_hasher(BLOCK, sha256),
    )


def make_scheduler(checkpoint: Path, *, encoder_cache: int = 64, budget: int = 512, num_blocks: int = 64) -> Scheduler:
    """The real scheduler; the encoder's cache and budget are in placeholders."""
    config = VllmConfig(
        scheduler_config=SchedulerConfig(
            max_num_seqs=8,
            max_num_batched_tokens=budget,
            max_model_len=MAX_LEN,
            enable_chunked_prefill=True,
            async_scheduling=False,
            is_encoder_decoder=False,
        ),
        model_config=ModelConfig(
            model=str(checkpoint), skip_tokenizer_init=True, dtype="float32", seed=0, max_model_len=MAX_LEN
        ),
        cache_config=CacheConfig(block_size=BLOCK, cache_dtype="auto", enable_prefix_caching=True),
        parallel_config=ParallelConfig(),
        device_config=DeviceConfig("cpu"),
    )
    config.scheduler_config.async_scheduling = False
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=32, dtype=torch.float32)
    kv_cache = KVCacheConfig(
        num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
    )
    config.cache_config.num_gpu_blocks = num_blocks
    scheduler = Scheduler(
        vllm_config=config,
        kv_cache_config=kv_cache,
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK,
    )
    scheduler.max_num_encoder_input_tokens = 512
    scheduler.encoder_cache_manager = EncoderCacheManager(cache_size=encoder_cache)
    return scheduler


class MiniRunner(PrefixCacheRunnerMixin):
    """What ``_update_states`` and the mixin touch of a runner, and a forward pass that hashes what came before."""

    is_pooling_model = False
    _update_states = gpu_model_runner.GPUModelRunner._update_states

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.device = torch.device("cpu")
        self.requests: dict[str, Any] = {}
        self.num_prompt_logprobs: dict[str, int] = {}
        self.speculative_config = None
        self.uses_mrope = False
        self.use_async_scheduling = False
        self.use_async_spec_decode = False
        self.late_interaction_runner = SimpleNamespace(
            on_requests_finished=lambda ids: None, register_request=lambda *args: None
        )
        self.vllm_config = scheduler.vllm_config
        self.model_config = self.vllm_config.model_config
        self.kv_cache_config = scheduler.kv_cache_config
        self.model = SimpleNamespace()
        self.input_batch = _input_batch(
            max_num_reqs=8,
            max_model_len=MAX_LEN,
            max_num_batched_tokens=512,
            device=self.device,
            vocab_size=2000,
            block_sizes=[BLOCK],
            kernel_block_sizes=[BLOCK],
            max_num_blocks_per_req=[MAX_LEN // BLOCK],
            logitsprocs=LogitsProcessors(),
        )
        self._omni_prefix_cache_cfg = stage_prefix_cache_config(
            kv_cache_config=self.kv_cache_config,
            cache_config=self.vllm_config.cache_config,
            kv_transfer_config=None,
            scheduler_config=self.vllm_config.scheduler_config,
            model_config=self.model_config,
            is_pooling_model=False,
        )
        attach.prepare(self)
        self.encoder_outputs: dict[str, Image] = {}
        self.encoded: list[str] = []
        self.images: dict[str, tuple[Image, ...]] = {}

    def _on_request_state_removed(self, *args: Any) -> None: ...

    def _process_encoder_cache_scheduler_output(self, *args: Any) -> None: ...

    def _may_reorder_batch(self, *args: Any) -> None: ...

    def shutdown(self) -> None:
        if self.omni_prefix_cache is not None:
            self.omni_prefix_cache.shutdown()

    def add(self, made: Request, *images: Image) -> None:
        self.images[made.request_id] = images
        self.scheduler.add_request(made)

    def step(self) -> tuple[Any, dict[str, torch.Tensor]]:
        """One engine step: the scheduler's output, and the merged hidden rows by request."""
        output = self.scheduler.schedule()
        self._prefix_cache_step_begin(output)
        self._update_states(output)
        if not output.total_num_scheduled_tokens:
            return output, {}
        self._encode(output)
        batch = self.input_batch
        ids = list(batch.req_ids)
        rows = torch.cat([self._forward(req_id, output.num_scheduled_tokens[req_id]) for req_id in ids])
        n = rows.shape[0]
        step_id = self._prefix_cache_save_step(rows, None, num_tokens_unpadded=n, num_tokens_padded=n)
        hidden, _ = self._prefix_cache_materialize(step_id, ids)
        self._sample(output, ids)
        return output, dict(hidden or {})

    def run(self) -> dict[str, torch.Tensor]:
        """All that is waiting, to its end; the rows that each request got, in order."""
        parts: dict[str, list[torch.Tensor]] = {}
        while self.scheduler.has_unfinished_requests():
            for req_id, rows in self.step()[1].items():
                parts.setdefault(req_id, []).append(rows)
        self.step()  # tells the runner who finished
        return {req_id: torch.cat(rows) for req_id, rows in parts.items()}

    def _encode(self, output: Any) -> None:
        for req_id, inputs in output.scheduled_encoder_inputs.items():
            for index in inputs:
                image = self.images[req_id][index]
                self.encoder_outputs[image.name] = image
                self.encoded.append(image.name)
        for name in output.free_encoder_mm_hashes:
            self.encoder_outputs.pop(name, None)

    def _forward(self, req_id: str, count: int) -> torch.Tensor:
        """float32 [count, 3]: token, position, and a sum over all content up to it."""
        index = self.input_batch.req_id_to_index[req_id]
        first = int(self.input_batch.num_computed_tokens_cpu[index])
        tokens = self.input_batch.token_ids_cpu[index, : first + count].tolist()
        for image in self.images[req_id]:
            if image.offset < first + count and image.offset + image.length > first:
                assert image.name in self.encoder_outputs, f"{req_id} needs {image.name}, which is not encoded"
        return content_rows(tokens, self.images[req_id])[first:]

    def _sample(self, output: Any, ids: list[str]) -> None:
        """One token, always 7, for each request whose tokens are all computed; what the engine's runner would note."""
        batch = self.input_batch
        sampled: list[list[int]] = []
        for index, req_id in enumerate(ids):
            done = int(batch.num_computed_tokens_cpu[index]) + output.num_scheduled_tokens[req_id]
            sampled.append([7] if done >= self.requests[req_id].num_tokens else [])
            for token in sampled[-1]:
                place = int(batch.num_tokens_no_spec[index])
                batch.token_ids_cpu[index, place] = token
                batch.num_tokens_no_spec[index] = place + 1
                self.requests[req_id].output_token_ids.append(token)
        result = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={req_id: index for index, req_id in enumerate(ids)},
            sampled_token_ids=sampled,
        )
        self.scheduler.update_from_output(output, result)


def _input_batch(**settings: Any) -> InputBatch:
    """vLLM's input batch, with those of the settings that its release knows."""
    known = inspect.signature(InputBatch).parameters
    return InputBatch(**{name: value for name, value in settings.items() if name in known})


def content_rows(tokens: Sequence[int], images: Sequence[Image]) -> torch.Tensor:
    """What a run without prefix caching computes: float32 [len(tokens), 3]."""
    sums, total = [], 0
    placed = {image.offset + place: image.value(place) for image in images for place in range(image.length)}
    for position, token in enumerate(tokens):
        total = (total * 31 + placed.get(position, token) + 1) % MODULUS
        sums.append([float(token), float(position), float(total)])
    return torch.tensor(sums)
