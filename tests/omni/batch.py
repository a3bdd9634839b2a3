"""What a manager of vLLM-Omni reads: scheduler outputs, and the live batch as vLLM's InputBatch shows it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from tests.model.steps import Step

MAX_REQUESTS = 64
MAX_BLOCKS = 64


class BlockTable:
    """Block table of one KV group: the attributes that vLLM-Omni's view checks, and the table."""

    use_hybrid_blocks = False
    blocks_per_kv_block = 1
    dcp_world_size = 1

    def __init__(self, block_size: int) -> None:
        self.kv_cache_block_size = block_size
        self.block_table = SimpleNamespace(cpu=torch.zeros((MAX_REQUESTS, MAX_BLOCKS), dtype=torch.int32))

    def get_numpy_array(self) -> np.ndarray:
        return self.block_table.cpu.numpy()


class InputBatch:
    """Shows the last step until ``show``: as in the runner it changes after new_step_starts."""

    def __init__(self, block_size: int) -> None:
        self.req_ids: list[str] = []
        self.req_id_to_index: dict[str, int] = {}
        self.num_computed_tokens_cpu = np.zeros(MAX_REQUESTS, np.int32)
        self.block_table = [BlockTable(block_size)]

    def show(self, step: Step) -> None:
        self.req_ids = [request.req_id for request in step.batch]
        self.req_id_to_index = {req_id: index for index, req_id in enumerate(self.req_ids)}
        table = self.block_table[0].get_numpy_array()
        for index, request in enumerate(step.batch):
            self.num_computed_tokens_cpu[index] = request.first
            table[index, : len(request.blocks)] = request.blocks


class SlotView:
    """A view that knows only ids and slots, as test doubles of vLLM-Omni's manager do."""

    def __init__(self, view: Any) -> None:
        self.block_size = view.block_size
        self.batch_req_ids = view.batch_req_ids
        self.step_slots_cpu = view.step_slots_cpu


class SchedulerOutputs:
    """Makes what vLLM's scheduler would send for a step; remembers block tables, since only new blocks travel."""

    def __init__(self) -> None:
        self._tables: dict[str, tuple[int, ...]] = {}

    def of(self, step: Step) -> SimpleNamespace:
        for req_id in step.finished:
            self._tables.pop(req_id, None)
        new = []
        cached = SimpleNamespace(
            req_ids=[], resumed_req_ids=set(), new_block_ids=[], num_computed_tokens=[], num_output_tokens=[]
        )
        counts: dict[str, int] = {}
        for request in step.batch:
            had = self._tables.get(request.req_id, ())
            self._tables[request.req_id] = request.blocks
            if request.how == "idle":
                continue
            counts[request.req_id] = request.count
            if request.how == "new":
                new.append(
                    SimpleNamespace(
                        req_id=request.req_id,
                        num_computed_tokens=request.first,
                        block_ids=(list(request.blocks),),
                    )
                )
                continue
            if request.how == "resumed":
                cached.resumed_req_ids.add(request.req_id)
            added = request.blocks if request.how == "resumed" else request.blocks[len(had) :]
            cached.req_ids.append(request.req_id)
            cached.new_block_ids.append((list(added),) if added else None)
            cached.num_computed_tokens.append(request.first)
            cached.num_output_tokens.append(0)
        return SimpleNamespace(
            finished_req_ids=set(step.finished),
            preempted_req_ids=set(step.preempted) or None,
            scheduled_new_reqs=new,
            scheduled_cached_reqs=cached,
            num_scheduled_tokens=counts,
            total_num_scheduled_tokens=sum(max(0, count) for count in counts.values()),
        )
