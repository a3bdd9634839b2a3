"""The live batch as the cache reads it, from what each vLLM-Omni release offers.

0.30.0 gives its manager a ``FullAttentionGroupView``: the input batch behind it is read as it stands, without a copy.
0.32.0rc1 passes a write layout to each save. A view or layout that knows only the slots of a step is turned into first
positions and block ids; that costs a few numpy calls a request and is there for callers without an input batch.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from stagecache.batch import start_positions
from stagecache.errors import SlotMismatchError, StageCacheError

_EMPTY = np.empty((0, 0), np.int32)


class OmniBatchView:
    """A ``stagecache.step.BatchView`` over a group view that may come later, or over slots alone.

    Args:
        block_size: tokens in a block.
        group_view: vLLM-Omni's view, or None until ``bind``.
    """

    def __init__(self, block_size: int, group_view: Any = None) -> None:
        self.block_size = block_size
        self._group: Any = None
        self._batch: Any = None
        self._scheduled: dict[str, int] = {}
        self._starts: dict[str, int] = {}
        self._read: tuple[list[str], NDArray[Any], NDArray[Any]] | None = None
        if group_view is not None:
            self.bind(group_view)

    def bind(self, group_view: Any) -> None:
        """Read this group view from now on."""
        self._group = group_view
        batch = getattr(group_view, "_input_batch", None)
        known = all(hasattr(batch, name) for name in ("req_ids", "num_computed_tokens_cpu", "block_table"))
        self._batch = batch if known else None

    def begin(self, scheduler_output: Any) -> None:
        """A step begins; a view that knows only slots needs its counts and first positions."""
        self._read = None
        if self._batch is None:
            self._scheduled = dict(scheduler_output.num_scheduled_tokens)
            self._starts = start_positions(
                getattr(scheduler_output, "scheduled_new_reqs", None) or (),
                getattr(scheduler_output, "scheduled_cached_reqs", None),
            )

    def use_layout(self, layout: Any) -> None:
        """The rows of the step about to be saved, as 0.32.0rc1's adapter lays them out.

        Raises:
            SlotMismatchError: the slots of a request do not follow its positions.
        """
        if self._batch is not None or self._bind_layout(layout):
            return
        ids = [write.req_id for write in layout.writes]
        counts = [write.row_end - write.row_start for write in layout.writes]
        slots = np.empty(0, np.int64) if layout.slots_cpu is None else _as_array(layout.slots_cpu)
        self._read = (ids, *self._from_slots(ids, counts, slots))

    def _bind_layout(self, layout: Any) -> bool:
        """Bind the group view that a layout names; whether there is an input batch behind it."""
        group_view = getattr(layout, "group_view", None)
        if group_view is not None:
            self.bind(group_view)
        return self._batch is not None

    def req_ids(self) -> list[str]:
        """Request ids in batch order."""
        if self._batch is not None:
            ids: list[str] = self._batch.req_ids
            return ids
        return self._slot_batch()[0]

    def num_computed(self) -> NDArray[Any]:
        """int [>= requests]: first position of each request in this step."""
        if self._batch is not None:
            first: NDArray[Any] = self._batch.num_computed_tokens_cpu
            return first
        return self._slot_batch()[1]

    def block_table(self) -> NDArray[Any]:
        """int [>= requests, blocks]: block ids of each request."""
        if self._batch is not None:
            table: NDArray[Any] = self._batch.block_table[0].get_numpy_array()
            return table
        return self._slot_batch()[2]

    def _slot_batch(self) -> tuple[list[str], NDArray[Any], NDArray[Any]]:
        if self._read is None:
            if self._group is None:
                raise StageCacheError(
                    "the manager knows no batch.", remedy="Pass it a view, or a write_layout with each save."
                )
            ids = list(self._group.batch_req_ids())
            counts = [max(0, int(self._scheduled.get(req_id, 0))) for req_id in ids]
            if not any(counts):
                self._read = (ids, np.zeros(len(ids), np.int64), _EMPTY)
            else:
                slots = _as_array(self._group.step_slots_cpu(ids, dict(self._scheduled)))
                self._read = (ids, *self._from_slots(ids, counts, slots))
        return self._read

    def _from_slots(
        self, ids: list[str], counts: list[int], slots: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """First positions and block table of a step whose slots are ``slots``, int64 [tokens] in batch order."""
        size = self.block_size
        if len(slots) != sum(counts):
            raise SlotMismatchError(
                f"the slots cover {len(slots)} of {sum(counts)} scheduled tokens.",
                remedy="save_outputs must be called with the batch of the last new_step_starts.",
            )
        first = np.zeros(len(ids), np.int64)
        rows: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = []
        at = 0
        for index, (req_id, count) in enumerate(zip(ids, counts, strict=True)):
            own = slots[at : at + count]
            at += count
            start = self._starts.get(req_id, 0)
            if count:  # the slots are the truth: a position known only roughly is put where they say, in its block
                start = start - start % size + int(own[0]) % size
            first[index] = start
            positions = start + np.arange(count)
            if count and not np.array_equal(own % size, positions % size):
                raise SlotMismatchError(f"request {req_id}: slots {own[:4].tolist()}... do not follow its positions.")
            rows.append((positions // size, own // size))
        width = max((int(places[-1]) + 1 for places, _ in rows if len(places)), default=0)
        table = np.zeros((len(ids), width), np.int64)
        for index, (places, blocks) in enumerate(rows):
            table[index, places] = blocks
        return first, table


def _as_array(slots: Any) -> NDArray[np.int64]:
    """int64 [tokens] of a CPU tensor or array."""
    return np.asarray(slots.numpy() if hasattr(slots, "numpy") else slots, np.int64)
