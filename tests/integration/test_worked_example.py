"""The worked example of docs/architecture.md: 8 blocks of 4, hidden width 2, ``mm_feature`` of width 16."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from stagecache import HIDDEN_KEY, Geometry, StageCache
from stagecache.step import NewRequest, SchedulerStep
from stagecache_wire.v1 import stagecache_pb2 as pb

A = ["The", "quick", "brown", "fox", "was", "tired", "and", "slept", "beneath", "the", "shady", "tree"]
B = ["The", "quick", "brown", "fox", "jumped", "over", "the", "dog"]
GEOMETRY = Geometry(num_blocks=8, block_size=4, staging_capacity_tokens=32)


class OneRequest:
    """A live batch of one request."""

    def __init__(self) -> None:
        self.req_id, self.first, self.blocks = "", 0, [0]

    def set(self, req_id: str, first: int, blocks: list[int]) -> None:
        self.req_id, self.first, self.blocks = req_id, first, blocks

    def req_ids(self) -> list[str]:
        return [self.req_id]

    def num_computed(self) -> Any:
        return np.array([self.first])

    def block_table(self) -> Any:
        return np.array([self.blocks])


def rows(words: list[str], width: int) -> torch.Tensor:
    """What the forward would give: float32 [words, width], a function of each word and of its whole prefix."""
    seeds = [hash(tuple(words[: index + 1])) % 100_003 for index in range(len(words))]
    return torch.tensor(seeds, dtype=torch.float32)[:, None] + torch.arange(width, dtype=torch.float32) / 32


def step(cache: StageCache, view: OneRequest, req_id: str, words: list[str], computed: int, blocks: list[int]) -> Any:
    """Run one prefill step of one request, of which ``computed`` tokens were hit."""
    count = len(words) - computed
    cache.new_step_starts(SchedulerStep({req_id: count}, [NewRequest(req_id, computed, blocks)]))
    view.set(req_id, computed, blocks)
    step_id = cache.save_outputs(
        rows(words, 2)[computed:],
        {"mm_feature": rows(words, 16)[computed:]},
        num_tokens_unpadded=count,
        num_tokens_padded=count,
    )
    return cache.materialize(step_id, [req_id])


def test_the_second_request_gets_the_rows_of_the_shared_prefix(daemon: Any) -> None:
    """H2: block 0 is served from the pool, the rest from this step, for hidden and for mm_feature."""
    view = OneRequest()
    cache = StageCache.attach(socket=daemon.socket, model="example", stage="fox", geometry=GEOMETRY, view=view)
    try:
        first = step(cache, view, "A", A, 0, [0, 1, 2])
        assert torch.equal(first.hidden_states["A"], rows(A, 2))
        second = step(cache, view, "B", B, 4, [0, 3])
        assert second.hidden_states["B"].shape == (8, 2)
        assert torch.equal(second.hidden_states["B"], rows(B, 2))
        assert torch.equal(second.mm_outputs["mm_feature"]["B"], rows(B, 16))
        # The control: the rows of A's tail are not those of B's.
        assert not torch.equal(second.hidden_states["B"], rows(A, 2)[:8])

        keys = {key.schema.name: key.key_id for key in cache.session.keys} or {HIDDEN_KEY: 0, "mm_feature": 1}
        lookup = cache.session.rpc.lookup(
            pb.LookupRequest(block_ids=[0, 3, 4], span_tokens=[12], key_ids=sorted(keys.values())), 5.0
        )
        assert list(lookup.readable) == [8, 8], "blocks 0 and 3 are there"
        assert list(lookup.first_missing_slot) == [16, 16], "block 4 is empty"
    finally:
        cache.close()
