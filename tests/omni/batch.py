"""A live batch as vLLM's InputBatch shows it, and views over it: what a prefix-cache manager of vLLM-Omni reads."""

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
