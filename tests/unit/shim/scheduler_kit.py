"""vLLM's real scheduler without engine or weights, and a worker that remembers what every slot holds.

`SlotWorker` executes scheduler outputs as a stage worker does: it keeps block tables and tokens by what the output
says, writes the content of each position into its slot, and counts hits whose slots hold anything else. A content is a
number that stands for all tokens up to its position. A higher epoch empties all slots.
"""

from __future__ import annotations

import json
import os
import random
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from vllm import SamplingParams
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, ParallelConfig, SchedulerConfig, VllmConfig
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

BLOCK = 16
MAX_LEN = 512

init_none_hash(sha256)


def make_model_config(folder: Path) -> ModelConfig:
    """Of a model that is never loaded."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 1000,
        "max_position_embeddings": 2048,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return ModelConfig(model=str(folder), skip_tokenizer_init=True, dtype="float32", seed=0, max_model_len=MAX_LEN)


def make_scheduler(
    model_config: ModelConfig,
    *,
    num_blocks: int = 200,
    budget: int = 512,
    max_seqs: int = 16,
    threshold: int = 0,
    policy: str = "fcfs",
    asynchronous: bool = False,
    prefix_caching: bool = True,
    scheduler_class: Any = None,
    kv_transfer_config: Any = None,
) -> Any:
    """A scheduler; one of ``num_blocks`` is vLLM's null block. budget, threshold: tokens of a step, of a prefill."""
    cache_config = CacheConfig(block_size=BLOCK, enable_prefix_caching=prefix_caching)
    config = VllmConfig(
        scheduler_config=SchedulerConfig(
            max_num_seqs=max_seqs,
            max_num_batched_tokens=budget,
            max_model_len=MAX_LEN,
            enable_chunked_prefill=True,
            long_prefill_token_threshold=threshold,
            is_encoder_decoder=False,
            policy=policy,  # type: ignore[arg-type]
        ),
        model_config=model_config,
        cache_config=cache_config,
        parallel_config=ParallelConfig(),
        device_config=DeviceConfig("cpu"),
        kv_transfer_config=kv_transfer_config,
    )
    config.scheduler_config.async_scheduling = asynchronous
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=16, dtype=torch.float32)
    cache_config.num_gpu_blocks = num_blocks
    return (scheduler_class or (AsyncScheduler if asynchronous else Scheduler))(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(
            num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer0"], spec)]
        ),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK,
        log_stats=False,
    )


def make_request(req_id: str, tokens: Any, max_tokens: int = 4, priority: int = 0) -> Request:
    params = SamplingParams(ignore_eos=True, max_tokens=max_tokens)
    params.update_from_generation_config({}, 2)
    return Request(
        request_id=req_id,
        prompt_token_ids=list(tokens),
        sampling_params=params,
        pooling_params=None,
        priority=priority,
        arrival_time=float(len(req_id)),
        block_hasher=get_request_block_hasher(BLOCK, sha256),
    )


@dataclass
class SlotWorker:
    """Executes steps. ``hits``, ``bad``: hit blocks seen, and those whose slots hold something else."""

    follow_epoch: bool = True
    epoch: int = 0
    hits: int = 0
    bad: int = 0
    slots: dict[int, int] = field(default_factory=dict)
    tables: dict[str, list[int]] = field(default_factory=dict)
    tokens: dict[str, list[int]] = field(default_factory=dict)
    _known: dict[str, list[int]] = field(default_factory=dict)
    """Contents by request, as far as they were asked for."""

    def execute(self, output: Any) -> ModelRunnerOutput:
        epoch = getattr(output, "stagecache_epoch", 0)
        if self.follow_epoch and epoch > self.epoch:
            self.epoch = epoch
            self.slots.clear()
        starts, spans = self._note(output)
        sampled: list[list[int]] = []
        for req_id, count in output.num_scheduled_tokens.items():
            end = starts[req_id] + count
            contents = self._contents(req_id, end)
            for position in range(starts[req_id], end):
                self.slots[self._slot(req_id, position)] = contents[position]
            at_end = end >= len(self.tokens[req_id])
            sampled.append([contents[end - 1] % 900] if at_end else [])
            self.tokens[req_id] += sampled[-1]
        for req_id, end in spans.items():
            contents = self._contents(req_id, end)
            for block in range(end // BLOCK):
                span = range(block * BLOCK, (block + 1) * BLOCK)
                self.hits += 1
                self.bad += any(self.slots.get(self._slot(req_id, p)) != contents[p] for p in span)
        ids = list(output.num_scheduled_tokens)
        return ModelRunnerOutput(ids, {req_id: i for i, req_id in enumerate(ids)}, sampled_token_ids=sampled)

    def _note(self, output: Any) -> tuple[dict[str, int], dict[str, int]]:
        """First positions of this step, and hit spans, by request."""
        for req_id in output.finished_req_ids:
            self.tables.pop(req_id, None)
        starts: dict[str, int] = {}
        spans: dict[str, int] = {}
        for new in output.scheduled_new_reqs:
            self.tables[new.req_id] = list(new.block_ids[0])
            self._set_tokens(new.req_id, new.prompt_token_ids)
            starts[new.req_id] = spans[new.req_id] = new.num_computed_tokens
        cached = output.scheduled_cached_reqs
        for index, req_id in enumerate(cached.req_ids):
            blocks = list((cached.new_block_ids[index] or ([],))[0])
            starts[req_id] = cached.num_computed_tokens[index]
            if req_id in cached.resumed_req_ids:
                self.tables[req_id] = blocks
                spans[req_id] = starts[req_id]
            else:
                self.tables[req_id] += blocks
            if req_id in cached.all_token_ids:
                self._set_tokens(req_id, cached.all_token_ids[req_id])
        return starts, spans

    def _slot(self, req_id: str, position: int) -> int:
        return self.tables[req_id][position // BLOCK] * BLOCK + position % BLOCK

    def _set_tokens(self, req_id: str, tokens: list[int]) -> None:
        self.tokens[req_id] = list(tokens)
        self._known[req_id] = []

    def _contents(self, req_id: str, end: int) -> list[int]:
        """Contents of at least the first ``end`` positions."""
        contents, tokens = self._known[req_id], self.tokens[req_id]
        content = contents[-1] if contents else 0
        for token in tokens[len(contents) : end]:
            content = hash((content, token))
            contents.append(content)
        return contents


def drive(scheduler: Any, worker: SlotWorker, *, depth: int = 1, limit: int = 400) -> list[Any]:
    """Run until all requests have ended, ``depth`` steps in flight; the scheduler outputs."""
    outputs: list[Any] = []
    in_flight: deque[tuple[Any, ModelRunnerOutput]] = deque()
    while scheduler.has_unfinished_requests() or in_flight:
        assert len(outputs) < limit, "the load does not end"
        if scheduler.has_unfinished_requests():
            output = scheduler.schedule()
            outputs.append(output)
            in_flight.append((output, worker.execute(output)))
        if len(in_flight) >= depth or not scheduler.has_unfinished_requests():
            scheduler.update_from_output(*in_flight.popleft())
    return outputs


@dataclass
class Load:
    """A random load: prompts that share prefixes, arriving over time, in a cache that is too small for them."""

    seed: int
    requests: int = 7

    def run(self, scheduler: Any, worker: SlotWorker, *, depth: int = 1, reset: Any = None) -> int:
        """Returns the steps it took. ``reset``: called now and then, before a step."""
        rng = random.Random(self.seed)
        stems = [[rng.randrange(900) for _ in range(160)] for _ in range(2)]
        waiting = [self._request(number, rng, stems) for number in range(self.requests)]
        in_flight: deque[tuple[Any, ModelRunnerOutput]] = deque()
        steps = 0
        while waiting or scheduler.has_unfinished_requests() or in_flight:
            while waiting and (rng.random() < 0.4 or not scheduler.has_unfinished_requests()):
                scheduler.add_request(waiting.pop())
            if reset is not None and rng.random() < 0.08:
                reset()
            steps += 1
            assert steps < 600, "the load does not end"
            if scheduler.has_unfinished_requests():
                output = scheduler.schedule()
                in_flight.append((output, worker.execute(output)))
            if in_flight and (len(in_flight) >= depth or not scheduler.has_unfinished_requests()):
                scheduler.update_from_output(*in_flight.popleft())
        return steps

    def _request(self, number: int, rng: random.Random, stems: list[list[int]]) -> Request:
        shared = rng.choice(stems)[: rng.randrange(0, 150)]
        tail = [rng.randrange(900) for _ in range(rng.randrange(1, 60))]
        return make_request(f"r{number}", shared + tail, rng.randrange(1, 24), rng.randrange(3))
