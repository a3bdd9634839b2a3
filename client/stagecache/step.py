"""What the cache reads of an engine step: the fields of vLLM's SchedulerOutput that matter, as plain dataclasses.

vLLM's own objects fit as they are; these are for callers without vLLM, and say which fields are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

BlockIds = Sequence[Any]
"""Block ids of one request: ints, or one sequence of ints a KV-cache group (only group 0 is read)."""


@dataclass
class NewRequest:
    """A request that the batch sees for the first time, or again with a whole block table."""

    req_id: str
    num_computed_tokens: int
    block_ids: BlockIds


@dataclass
class CachedRequests:
    """Requests that go on. Parallel lists; ``new_block_ids`` extends a request's table, or replaces it for ids in
    ``resumed_req_ids``.
    """

    req_ids: list[str] = field(default_factory=list)
    resumed_req_ids: set[str] = field(default_factory=set)
    new_block_ids: list[BlockIds | None] = field(default_factory=list)
    num_computed_tokens: list[int] = field(default_factory=list)


@dataclass
class SchedulerStep:
    """One step, as the scheduler planned it."""

    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    scheduled_new_reqs: list[NewRequest] = field(default_factory=list)
    scheduled_cached_reqs: CachedRequests = field(default_factory=CachedRequests)
    finished_req_ids: set[str] = field(default_factory=set)
    preempted_req_ids: set[str] | None = None

    @property
    def total_num_scheduled_tokens(self) -> int:
        return sum(self.num_scheduled_tokens.values())


class BatchView(Protocol):
    """The live batch, read on the engine thread between the forward and the save."""

    def req_ids(self) -> list[str]:
        """Request ids in batch order, which is the order of the rows."""

    def num_computed(self) -> NDArray[Any]:
        """int [>= requests]: first position of each request in this step, in batch order."""

    def block_table(self) -> NDArray[Any]:
        """int [>= requests, blocks]: block ids of each request, in batch order."""


def group_zero(block_ids: BlockIds | None) -> list[int]:
    """Block ids of KV-cache group 0 as a flat list; empty for None."""
    if not block_ids:
        return []
    first = block_ids[0]
    if type(first) is list:
        return first.copy()
    return list(block_ids) if isinstance(first, (int, np.integer)) else list(first)
