"""Steps as an engine would plan them, and the live batch that goes with them; one object serves all contenders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from stagecache.policy import HIDDEN_KEY
from stagecache.step import CachedRequests, NewRequest

BLOCK_SIZE = 16


@dataclass(frozen=True)
class Shape:
    """What a model puts out for each token.

    hidden: width of the bf16 hidden states. extra: further per-token keys. extra_width: their width, bf16.
    codec: a key of 16 int64 a token, written deferred.
    """

    hidden: int = 2048
    extra: int = 0
    extra_width: int = 256
    codec: bool = False

    @property
    def row_bytes(self) -> int:
        """Bytes of one token over all keys."""
        return 2 * (self.hidden + self.extra * self.extra_width) + (128 if self.codec else 0)

    def rows(self, count: int, seed: int) -> Rows:
        """Rows of ``count`` tokens, the same for the same seed."""
        maker = torch.Generator().manual_seed(seed)

        def bf16(width: int) -> torch.Tensor:
            bits = torch.randint(-(1 << 14), 1 << 14, (count, width), generator=maker, dtype=torch.int16)
            return bits.view(torch.bfloat16)

        outputs = {f"extra.{index}": bf16(self.extra_width) for index in range(self.extra)}
        if self.codec:
            outputs["codec"] = torch.randint(0, 1 << 16, (count, 16), generator=maker, dtype=torch.int64)
        return Rows(bf16(self.hidden), outputs)


@dataclass(frozen=True)
class Rows:
    """Outputs of a forward: tensors of one first dimension."""

    hidden: torch.Tensor
    outputs: dict[str, torch.Tensor]

    def by_key(self) -> dict[str, torch.Tensor]:
        return {HIDDEN_KEY: self.hidden, **self.outputs}

    def __getitem__(self, part: slice) -> Rows:
        return Rows(self.hidden[part], {name: rows[part] for name, rows in self.outputs.items()})

    @staticmethod
    def joined(parts: Sequence[Rows]) -> Rows:
        """One after the other."""
        return Rows(
            torch.cat([part.hidden for part in parts]),
            {name: torch.cat([part.outputs[name] for part in parts]) for name in parts[0].outputs},
        )


@dataclass
class Plan:
    """A scheduler output with the fields that both caches read; plain attributes, as vLLM's own has."""

    num_scheduled_tokens: dict[str, int]
    scheduled_new_reqs: list[NewRequest]
    scheduled_cached_reqs: CachedRequests
    finished_req_ids: set[str]
    total_num_scheduled_tokens: int
    preempted_req_ids: set[str] | None = None


@dataclass
class BenchRequest:
    """A request of the bench: its blocks, and how many of its tokens are done."""

    req_id: str
    blocks: list[int]
    computed: int = 0
    known: bool = field(default=False, repr=False)


class LiveBatch:
    """The batch as the runner holds it: ids, first positions and block table of the step that runs now.

    ``req_ids``, ``num_computed`` and ``block_table`` are what stagecache reads; ``as_input_batch`` what vLLM-Omni's
    own group view reads. Both look at the same memory.
    """

    def __init__(self, max_requests: int, max_blocks: int) -> None:
        self._table = np.zeros((max_requests, max_blocks), np.int32)
        self._positions = np.zeros(max_requests, np.int32)
        self.ids: list[str] = []
        self.index: dict[str, int] = {}
        self.finished: set[str] = set()
        self._requests: list[BenchRequest] = []
        self._shown = SimpleNamespace(
            req_ids=self.ids,
            req_id_to_index=self.index,
            num_computed_tokens_cpu=self._positions,
            block_table=[SimpleNamespace(block_table=SimpleNamespace(cpu=torch.from_numpy(self._table)))],
        )

    def req_ids(self) -> list[str]:
        return self.ids

    def num_computed(self) -> NDArray[Any]:
        return self._positions

    def block_table(self) -> NDArray[Any]:
        return self._table

    def as_input_batch(self) -> Any:
        """This batch in the form of vLLM's InputBatch, as far as vLLM-Omni's group view reads it."""
        return self._shown

    def plan(self, requests: Sequence[BenchRequest], counts: Sequence[int]) -> Plan:
        """The next step: ``counts[i]`` tokens of ``requests[i]``. Those of the last step that are missing finished."""
        if list(requests) != self._requests:
            staying = {request.req_id for request in requests}
            self.finished = {request.req_id for request in self._requests} - staying
            self._requests = list(requests)
            self.ids[:] = [request.req_id for request in requests]
            self.index.clear()
            self.index.update((req_id, row) for row, req_id in enumerate(self.ids))
            for row, request in enumerate(requests):
                self._table[row, : len(request.blocks)] = request.blocks
        new = [request for request in requests if not request.known]
        old = [request for request in requests if request.known]
        plan = Plan(
            {request.req_id: count for request, count in zip(requests, counts, strict=True)},
            [NewRequest(request.req_id, request.computed, [list(request.blocks)]) for request in new],
            CachedRequests(
                [request.req_id for request in old], set(), [None] * len(old), [request.computed for request in old]
            ),
            self.finished,
            sum(counts),
        )
        self.finished = set()
        for row, (request, count) in enumerate(zip(requests, counts, strict=True)):
            self._positions[row] = request.computed
            request.known = True
            request.computed += count
        return plan
