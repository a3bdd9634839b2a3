"""The batch of one step: who is in it, how many rows each has, and where they belong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stagecache.errors import SlotMismatchError, StepTooLargeError
from stagecache.requests import Numbers, RequestTable
from stagecache.slots import FEW_BLOCKS, FEW_REQUESTS, DecodeSlots, Runs, batch_runs, few_runs
from stagecache.step import BatchView
from stagecache_wire.geometry import Geometry
from stagecache_wire.records import expand_runs


@dataclass(slots=True)
class Batch:
    """Layout of a step's rows, in batch order.

    counts: rows of each request; None where each has one. offsets: first row of each, [requests + 1]; None likewise.
    first: int [requests], first position. ends: first + counts. rows: [requests], places in the request table. runs: of
    all rows. tokens: sum of counts. Numbers of requests are arrays in decode steps, lists where requests are few.
    """

    req_ids: list[str]
    tokens: int
    counts: list[int] | None
    offsets: list[int] | None
    first: Numbers
    ends: Numbers
    rows: Numbers
    runs: Runs

    def span(self, index: int) -> tuple[int, int]:
        """First and end row of the request at ``index``."""
        if self.offsets is None:
            return index, index + 1
        return self.offsets[index], self.offsets[index + 1]

    def slots(self) -> NDArray[np.int64]:
        """int64 [tokens]: the slot of each row."""
        return self.runs.astype(np.int64) if self.runs.ndim == 1 else expand_runs(self.runs)

    def blocks(self, block_size: int) -> set[int]:
        """Ids of the blocks that the step writes."""
        if self.runs.ndim == 1 or len(self.runs) > FEW_BLOCKS:
            return set((self.slots() // block_size).tolist())
        found: set[int] = set()
        for start, length in self.runs.tolist():
            found.update(range(start // block_size, (start + length - 1) // block_size + 1))
        return found

    def spans(self) -> list[tuple[int, int]]:
        """First and end row of every request."""
        if self.offsets is None:
            return [(row, row + 1) for row in range(len(self.req_ids))]
        return list(pairwise(self.offsets))


class BatchReader:
    """Reads the live batch; what a decode step shares with the one before is kept. Engine thread only."""

    def __init__(self, view: BatchView, geometry: Geometry, requests: RequestTable) -> None:
        self._view = view
        self._geometry = geometry
        self._requests = requests
        self._last_ids: list[str] = []
        self._last_version = -1
        self._ones: dict[str, int] = {}
        self._ones_ids: list[str] | None = None
        self._slots = DecodeSlots(geometry.block_size, geometry.num_blocks)
        self._decoded = -1
        """Version of the request table at the last step, where that was a decode step."""
        self._next: NDArray[Any] = np.empty(0, np.int64)
        """First positions of the step after the last decode step, if its requests go on, and their bytes."""
        self._next_bytes = b""
        self._last_rows: list[int] = []
        self._last_rows_array: NDArray[np.int64] | None = None

    def read(self, scheduled: Mapping[str, int], planned: int, tokens: int) -> Batch:
        """The batch of a step that the scheduler planned with ``planned`` tokens and that brought ``tokens`` rows.

        Raises:
            SlotMismatchError: the batch does not have so many rows, or its slots do not cover them (W6).
            StepTooLargeError: more rows than a page holds (W6).
        """
        ids = self._view.req_ids()
        ids = self._last_ids if ids == self._last_ids else list(ids)
        if planned != tokens:
            raise self._mismatch(planned, tokens)
        if tokens > self._geometry.staging_capacity_tokens:
            raise StepTooLargeError(
                f"a step of {tokens} tokens, a staging page holds {self._geometry.staging_capacity_tokens}.",
                remedy="Attach with staging_capacity_tokens of the engine's max_num_batched_tokens.",
            )
        if tokens == len(ids) and (
            scheduled == self._ones if ids is self._ones_ids else self._is_decode(scheduled, ids)
        ):
            return self._decode(ids)
        return self._mixed(ids, scheduled, tokens)

    def _decode(self, ids: list[str]) -> Batch:
        """One token a request."""
        count, requests = len(ids), self._requests
        live = self._view.num_computed()[:count]
        follows = self._decoded == requests.version and ids is self._last_ids and live.tobytes() == self._next_bytes
        self._decoded = -1
        if follows:
            first = self._next
            runs = self._slots.follow(self._view.block_table(), first)
        else:
            first = live.copy()  # the live array goes on
            runs = self._slots.start(self._view.block_table(), first)
        rows = self._rows(ids)
        if self._last_rows_array is None:
            self._last_rows_array = np.array(rows, np.int64)
        self._next = ends = first + 1
        self._next_bytes = ends.tobytes()
        self._decoded = requests.version
        return Batch(ids, count, None, None, first, ends, self._last_rows_array, runs)

    def _mixed(self, ids: list[str], scheduled: Mapping[str, int], tokens: int) -> Batch:
        """Any other step."""
        self._decoded = -1
        computed, requests = self._view.num_computed(), len(ids)
        # One by one is slower, but its code is in use by few_runs too, and that of a slice is not.
        few = requests <= FEW_REQUESTS
        first = [computed.item(row) for row in range(requests)] if few else computed[:requests].tolist()
        counts, offsets, ends, total = [], [0], [], 0
        for index, req_id in enumerate(ids):
            count = scheduled.get(req_id, 0)
            if count < 0:
                count = 0
            total += count
            counts.append(count)
            offsets.append(total)
            ends.append(first[index] + count)
        if total != tokens:
            raise self._mismatch(total, tokens)
        size, num_blocks, table = self._geometry.block_size, self._geometry.num_blocks, self._view.block_table()
        if few and tokens <= FEW_BLOCKS * size:
            runs = few_runs(table, first, counts, size, num_blocks)
        else:
            runs = batch_runs(table, np.array(first, np.int64), np.array(counts, np.int64), size, num_blocks)
        return Batch(ids, tokens, counts, offsets, first, ends, self._rows(ids), runs)

    def _is_decode(self, scheduled: Mapping[str, int], ids: list[str]) -> bool:
        """Whether each request has one token; then the next step with these ids is known by one comparison."""
        ones = dict.fromkeys(ids, 1)
        if ones != scheduled:
            return False
        self._ones, self._ones_ids = ones, ids
        return True

    @staticmethod
    def _mismatch(slots: int, tokens: int) -> SlotMismatchError:
        return SlotMismatchError(
            f"the step has slots for {slots} tokens, the save brought {tokens}.",
            remedy="save_outputs must be called with the batch of the last new_step_starts.",
        )

    def _rows(self, ids: list[str]) -> list[int]:
        requests = self._requests
        if requests.version != self._last_version or ids != self._last_ids:
            self._last_rows, self._last_rows_array = [self._row(req_id) for req_id in ids], None
            self._last_ids, self._last_version = ids, requests.version
        return self._last_rows

    def _row(self, req_id: str) -> int:
        state = self._requests.live.get(req_id)
        if state is None:  # The engine ran it before the cache was attached.
            state = self._requests.start(req_id, [], whole=False)
        return state.period.row


def scheduled_runs(
    scheduled: Mapping[str, int], starts: Mapping[str, int], requests: RequestTable, geometry: Geometry
) -> Runs:
    """Slots that a step was to write, from the scheduler's plan alone: the live batch may not have got so far (W8).

    starts: first position by request. Positions beyond a request's blocks are left out.

    Raises:
        SlotMismatchError: the blocks of one of them are not known.
    """
    parts: list[Runs] = []
    size = geometry.block_size
    for req_id, count in scheduled.items():
        state = requests.live.get(req_id)
        start = starts.get(req_id)
        if start is None or count <= 0 or start < 0:
            continue
        if state is None or not state.whole:
            raise SlotMismatchError(f"request {req_id} ran before this cache heard of it: its blocks are not known")
        end = min(start + count, len(state.blocks) * size)
        if end > start:
            parts.append(
                batch_runs(
                    np.array([state.blocks]), np.array([start]), np.array([end - start]), size, geometry.num_blocks
                )
            )
    return np.concatenate(parts) if parts else np.empty((0, 2), np.uint32)


def start_positions(new: Sequence[Any], cached: Any) -> dict[str, int]:
    """First position of every request that a scheduler output names."""
    starts = {request.req_id: int(request.num_computed_tokens or 0) for request in new}
    if cached is not None:
        starts.update(zip(cached.req_ids, (int(count) for count in cached.num_computed_tokens), strict=False))
    return starts
