"""The block manager beside the real vLLM scheduler: every call it makes on its KVCacheManager is made on ours too.

The scheduler decides what to allocate, in which chunks, whom to preempt and when; the hashes are the engine's own
(`sha256`, its default), taken as they are.
"""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from pathlib import Path

import pytest

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
pytest.importorskip("vllm")

import torch
from vllm import SamplingParams
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, ParallelConfig, SchedulerConfig, VllmConfig
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from stagecached.index import BlockManager, BlockPool
from tests.engine.index.conformance import agree, compare_pools

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

BLOCK_SIZE = 4
MAX_MODEL_LEN = 96


@pytest.fixture(scope="module")
def model_config(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    """Of a model that is never loaded."""
    directory: Path = tmp_path_factory.mktemp("model")
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
    (directory / "config.json").write_text(json.dumps(config))
    return ModelConfig(
        model=str(directory), skip_tokenizer_init=True, dtype="float32", seed=0, max_model_len=MAX_MODEL_LEN
    )


def make_scheduler(model_config: ModelConfig, num_blocks: int, budget: int, asynchronous: bool) -> Scheduler:
    cache_config = CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=True)
    config = VllmConfig(
        scheduler_config=SchedulerConfig(
            max_num_seqs=6,
            max_num_batched_tokens=budget,
            max_model_len=MAX_MODEL_LEN,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
        ),
        model_config=model_config,
        cache_config=cache_config,
        parallel_config=ParallelConfig(),
        device_config=DeviceConfig("cpu"),
    )
    config.scheduler_config.async_scheduling = asynchronous
    spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=16, dtype=torch.float32)
    cache_config.num_gpu_blocks = num_blocks
    return (AsyncScheduler if asynchronous else Scheduler)(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(
            num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer0"], spec)]
        ),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK_SIZE,
        log_stats=False,
    )


class Mirror:
    """Stands in for the scheduler's KVCacheManager: makes each call on it and on ours, and compares all state."""

    def __init__(self, peer: KVCacheManager) -> None:
        self._peer = peer
        self._pool = BlockPool(peer.block_pool.num_gpu_blocks, null_block=True)
        self._ours = BlockManager(self._pool, BLOCK_SIZE, max_model_len=peer.max_model_len)
        self.calls: Counter[str] = Counter()

    def __getattr__(self, name: str) -> object:
        return getattr(self._peer, name)

    def _compare(self, call: str, request: Request | None = None) -> None:
        self.calls[call] += 1
        compare_pools(self._pool, self._peer.block_pool)
        if request is not None:
            table = self._peer.get_block_ids(request.request_id)[0]
            agree("table", self._ours.block_ids(request.request_id), table)

    def get_computed_blocks(self, request: Request) -> tuple[KVCacheBlocks, int, int]:
        answer = self._peer.get_computed_blocks(request)
        hit = self._ours.get_computed_blocks(request)
        agree("hit blocks", [block.block_id for block in hit], answer[0].get_block_ids()[0])
        agree("hit tokens", len(hit) * BLOCK_SIZE, answer[1])
        self._compare("hit" if hit else "miss")
        return answer

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        new_computed_blocks: KVCacheBlocks | None = None,
        **options: int,
    ) -> KVCacheBlocks | None:
        hit = new_computed_blocks.get_block_ids()[0] if new_computed_blocks else []
        passed = {
            name: options[name]
            for name in ("num_lookahead_tokens", "full_sequence_must_fit", "reserved_blocks", "delay_cache_blocks")
            if name in options
        }
        ours = self._ours.allocate_slots(
            request, num_new_tokens, [self._pool.blocks[block_id] for block_id in hit], **passed
        )
        peer = self._peer.allocate_slots(
            request, num_new_tokens, num_new_computed_tokens, new_computed_blocks, **options
        )
        agree("refused", ours is None, peer is None)
        if ours is not None and peer is not None:
            agree("new blocks", [block.block_id for block in ours], peer.get_block_ids()[0])
        self._compare("refused" if ours is None else "allocated", request)
        return peer

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None:
        self._ours.cache_blocks(request, num_computed_tokens)
        self._peer.cache_blocks(request, num_computed_tokens)
        self._compare("cached", request)

    def free(self, request: Request) -> None:
        self._ours.free(request.request_id)
        self._peer.free(request)
        self._compare("freed", request)

    def reset_prefix_cache(self) -> bool:
        done = self._peer.reset_prefix_cache()
        agree("reset", self._pool.reset(), done)
        self._compare("reset")
        return done


_PARAMS = SamplingParams(ignore_eos=True, max_tokens=30)


def _request(number: int, token_ids: list[int]) -> Request:
    params = _PARAMS.clone()
    params.max_tokens = 1 + number * 7 % 30
    return Request(
        request_id=f"r{number}",
        prompt_token_ids=token_ids,
        sampling_params=params,
        pooling_params=None,
        block_hasher=get_request_block_hasher(BLOCK_SIZE, sha256),
    )


def _outputs(scheduler: Scheduler, scheduled: SchedulerOutput, rng: random.Random) -> ModelRunnerOutput:
    ids = list(scheduled.num_scheduled_tokens)
    tokens = [[] if scheduler.requests[i].is_prefill_chunk else [3 + rng.randrange(2)] for i in ids]
    return ModelRunnerOutput(req_ids=ids, req_id_to_index={r: i for i, r in enumerate(ids)}, sampled_token_ids=tokens)


def run_load(model_config: ModelConfig, seed: int, asynchronous: bool) -> Counter[str]:
    """A random load of requests that share prefixes, in a cache too small for it."""
    rng = random.Random(seed)
    scheduler = make_scheduler(model_config, rng.randrange(26, 60), rng.choice([16, 32, 64]), asynchronous)
    mirror = scheduler.kv_cache_manager = Mirror(scheduler.kv_cache_manager)
    documents = [[10 + d] * rng.randrange(4, 40) for d in range(3)]
    behind: list[tuple[SchedulerOutput, ModelRunnerOutput]] = []
    num_added = 0
    for _step in range(120):
        if num_added < 24 and rng.random() < 0.4:
            num_added += 1
            turn = rng.choice(documents)
            scheduler.add_request(_request(num_added, (turn + [5] * rng.randrange(1, 9))[: MAX_MODEL_LEN - 31]))
        scheduled = scheduler.schedule()
        mirror.calls["preempted"] += len(scheduled.preempted_req_ids or ())
        behind.append((scheduled, _outputs(scheduler, scheduled, rng)))
        while len(behind) > (1 if asynchronous else 0):
            scheduler.update_from_output(*behind.pop(0))
        if scheduler.running and rng.random() < 0.03 and not asynchronous:
            victim = rng.choice(scheduler.running)
            documents.append(list(victim.all_token_ids)[:50])
            scheduler.finish_requests(victim.request_id, RequestStatus.FINISHED_ABORTED)
        if rng.random() < 0.02:
            scheduler.reset_prefix_cache(reset_running_requests=not asynchronous and rng.random() < 0.5)
    return mirror.calls


@pytest.mark.parametrize("asynchronous", [False, True], ids=["synchronous", "asynchronous"])
def test_same_as_vllm_under_the_real_scheduler(model_config: ModelConfig, asynchronous: bool) -> None:
    init_none_hash(sha256)
    calls: Counter[str] = Counter()
    for seed in range(60):
        calls.update(run_load(model_config, seed, asynchronous))
    print(dict(calls))
    least = {"hit": 500, "miss": 100, "allocated": 5000, "refused": 100, "freed": 500, "preempted": 100, "reset": 30}
    assert {what: calls[what] for what, count in least.items() if calls[what] < count} == {}
