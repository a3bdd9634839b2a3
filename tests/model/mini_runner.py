"""vLLM's own batch on a CPU, without engine and weights: the real InputBatch and the real
GPUModelRunner._update_states, fed by a real scheduler, with a StageCache as its consumer.

The rows of a token are a function of all tokens up to it, as hidden states are, so every row that comes out is known.
"""

from __future__ import annotations

import random
from collections import deque
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import vllm.v1.worker.gpu_model_runner as gpu_model_runner
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.worker.gpu_input_batch import InputBatch

from stagecache import Geometry, KeySchema, StageCache
from tests.unit.shim.scheduler_kit import BLOCK, MAX_LEN

LAG = 2
"""A step is materialized at most so many steps after it was saved."""


def contents(tokens: list[int]) -> torch.Tensor:
    """int64 [tokens]: for each position a number that stands for all tokens up to it."""
    found, content = [], 1
    for token in tokens:
        content = (content * 1_000_003 + token + 1) & 0x7FFFFFFFFFFF
        found.append(content)
    return torch.tensor(found, dtype=torch.int64)


def rows_of(tokens: list[int]) -> torch.Tensor:
    """float64 [tokens, 4]: content, token, position, 1."""
    stacked = [contents(tokens), torch.tensor(tokens), torch.arange(len(tokens)), torch.ones(len(tokens))]
    return torch.stack([column.to(torch.float64) for column in stacked], dim=1)


class BatchOf:
    """The view that StageCache reads, of an InputBatch."""

    def __init__(self, batch: InputBatch):
        self._batch = batch

    def req_ids(self) -> list[str]:
        return list(self._batch.req_ids)

    def num_computed(self) -> np.ndarray:
        return self._batch.num_computed_tokens_cpu

    def block_table(self) -> np.ndarray:
        table: np.ndarray = self._batch.block_table[0].get_numpy_array()
        return table


class MiniRunner:
    """What of a model runner the batch needs, and nothing else.

    It checks that each request is handed every position once, in order, over all of its steps, preemptions and hits:
    ``delivered[id]`` is how far it got. ``hit_rows`` and ``replayed`` count rows that no step of the request computed,
    and rows that were computed again after a preemption.
    """

    _update_states = gpu_model_runner.GPUModelRunner._update_states

    def __init__(self, scheduler: Any, socket: str, seed: int, *, num_blocks: int, max_seqs: int, budget: int):
        self.device = torch.device("cpu")
        self.requests: dict[str, Any] = {}
        self.num_prompt_logprobs: dict[str, int] = {}
        self.speculative_config = None
        self.uses_mrope = False
        self.use_async_scheduling = False
        self.use_async_spec_decode = False
        self.is_pooling_model = False
        self.late_interaction_runner = SimpleNamespace(
            on_requests_finished=lambda ids: None, register_request=lambda *args: None
        )
        self.kv_cache_config = scheduler.kv_cache_config
        self.input_batch = InputBatch(
            max_num_reqs=max_seqs,
            max_model_len=MAX_LEN,
            max_num_batched_tokens=budget,
            device=self.device,
            vocab_size=1000,
            block_sizes=[BLOCK],
            kernel_block_sizes=[BLOCK],
            max_num_blocks_per_req=[MAX_LEN // BLOCK],
            logitsprocs=LogitsProcessors(),
        )
        self.cache = StageCache.attach(
            socket=socket,
            model="mini",
            stage=f"mini{seed}",
            geometry=Geometry(num_blocks, BLOCK, budget, staging_depth=LAG + 2, arena_bytes=8 << 20),
            view=BatchOf(self.input_batch),
            keys=[KeySchema("__hidden_states__", "float64", (4,)), KeySchema("content", "int64", ())],
        )
        self.delivered: dict[str, int] = {}
        self.hit_rows = 0
        self.steps = 0
        self.empty_steps = 0
        self.resumed = 0
        self.bad: list[str] = []
        self._random = random.Random(seed)
        self._open: deque[tuple[int, dict[str, list[int]], dict[str, int]]] = deque()

    def _on_request_state_removed(self, *args: Any) -> None:
        pass

    def _process_encoder_cache_scheduler_output(self, *args: Any) -> None:
        pass

    def _may_reorder_batch(self, *args: Any) -> None:
        pass

    def execute(self, output: Any) -> ModelRunnerOutput:
        """One step: begin, update the batch, compute, save, and materialize some step, perhaps an older one."""
        self.resumed += len(output.scheduled_cached_reqs.resumed_req_ids)
        self.cache.new_step_starts(output)
        self._update_states(output)
        self.steps += 1
        if not output.total_num_scheduled_tokens:
            self.empty_steps += 1
            return ModelRunnerOutput([], {})
        tokens, first = self._tokens(output)
        hidden = torch.cat([rows_of(seen)[first[req_id] :] for req_id, seen in tokens.items()])
        content = torch.cat([contents(seen)[first[req_id] :] for req_id, seen in tokens.items()])
        n = output.total_num_scheduled_tokens
        step_id = self.cache.save_outputs(hidden, {"content": content}, num_tokens_unpadded=n, num_tokens_padded=n)
        hidden.fill_(-1.0)
        content.fill_(-1)
        self._open.append((step_id, tokens, first))
        while len(self._open) > self._random.randrange(LAG + 1):
            self._materialize()
        return self._sample(output, tokens)

    def finish(self) -> None:
        while self._open:
            self._materialize()
        self.cache.close()

    def _tokens(self, output: Any) -> tuple[dict[str, list[int]], dict[str, int]]:
        """In batch order: each request's tokens up to the end of this step, and the first position of it."""
        batch = self.input_batch
        tokens, first = {}, {}
        for index, req_id in enumerate(batch.req_ids):
            first[req_id] = int(batch.num_computed_tokens_cpu[index])
            end = first[req_id] + output.num_scheduled_tokens[req_id]
            tokens[req_id] = batch.token_ids_cpu[index, :end].tolist()
        return tokens, first

    def _materialize(self) -> None:
        step_id, tokens, first = self._open.popleft()
        out = self.cache.materialize(step_id, list(tokens))
        for req_id, seen in tokens.items():
            begin = self.delivered.get(req_id, 0)
            wanted = rows_of(seen)[begin:]
            given = out.hidden_states[req_id]
            if not torch.equal(given, wanted) or not torch.equal(
                out.mm_outputs["content"][req_id], wanted[:, 0].long()
            ):
                self.bad.append(f"step {step_id}, {req_id}: positions {begin} to {len(seen)}, found {given.tolist()}")
            self.hit_rows += max(0, first[req_id] - begin)
            self.delivered[req_id] = max(begin, len(seen))

    def _sample(self, output: Any, tokens: dict[str, list[int]]) -> ModelRunnerOutput:
        """A token for every request that is at its end, and the bookkeeping of vLLM's _bookkeeping_sync."""
        batch = self.input_batch
        ids = list(tokens)
        sampled: list[list[int]] = []
        for index, req_id in enumerate(ids):
            state = self.requests[req_id]
            at_end = len(tokens[req_id]) >= state.num_tokens
            sampled.append([int(contents(tokens[req_id])[-1]) % 900] if at_end else [])
            for token in sampled[-1]:
                place = int(batch.num_tokens_no_spec[index])
                batch.token_ids_cpu[index, place] = token
                batch.num_tokens_no_spec[index] = place + 1
                state.output_token_ids.append(token)
        return ModelRunnerOutput(ids, {req_id: i for i, req_id in enumerate(ids)}, sampled_token_ids=sampled)
