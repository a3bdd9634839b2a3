"""From a batch to the slots of its rows: runs of (start slot, length), in row order, without a slot a token."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stagecache.errors import SlotMismatchError

Runs = NDArray[np.uint32]
"""u32 [n, 2]: start slot and length; or u32 [n]: slots, each a run of 1."""


def decode_slots(
    table: NDArray[Any],
    positions: NDArray[np.int64],
    block_size: int,
    num_blocks: int,
    rows: NDArray[np.int64] | None = None,
) -> Runs:
    """Slots of one token a request. table: int [requests, blocks]; positions: int64 [n]; result u32 [n].

    rows: int64 [n], the row of the table that belongs to each position; None for the first n rows.

    Raises:
        SlotMismatchError: a position lies beyond the block table, or a block id beyond the cache (W6).
    """
    count = len(positions)
    blocks = positions // block_size
    try:
        ids = table[_rows(count) if rows is None else rows, blocks]
    except IndexError:
        raise SlotMismatchError(
            f"position {int(positions.max())} lies beyond a block table of {table.shape[1]} blocks"
        ) from None
    # A negative id is a large one when it is read without its sign.
    if count and np.maximum.reduce(ids.view(_UNSIGNED[ids.dtype.itemsize])) >= num_blocks:
        _check_ids(ids, num_blocks)
    # Slots stay below 2**31, so the arithmetic may be of 32 bits.
    blocks *= -block_size
    blocks += positions
    slots: Runs = ids.astype(np.uint32) * np.uint32(block_size) + blocks.astype(np.uint32)
    return slots


_UNSIGNED = {4: np.uint32, 8: np.uint64}


@lru_cache(maxsize=64)
def _rows(count: int) -> NDArray[np.int64]:
    """0 to count - 1; shared, so never to be written."""
    return np.arange(count)


class DecodeSlots:
    """Slots of decode steps in a row. A request's next slot is the last one plus 1, but where a block ends; which rows
    end one at a step is known from the first of these steps, so that only those read the block table.
    """

    def __init__(self, block_size: int, num_blocks: int) -> None:
        self._block_size = block_size
        self._num_blocks = num_blocks
        self._slots: Runs = np.empty(0, np.uint32)
        self._expected = b""
        self._step = 0
        self._crossing: list[NDArray[np.int64]] | None = None

    def read(self, table: NDArray[Any], first: NDArray[np.int64], ends: NDArray[np.int64], *, same: bool) -> Runs:
        """As ``decode_slots``. first, ends: int64 [requests], ends = first + 1. same: the requests of the step
        before, in the same order, none of which got another block table.

        Raises:
            SlotMismatchError: as for ``decode_slots``.
        """
        size = self._block_size
        if not same or first.tobytes() != self._expected:
            self._slots = decode_slots(table, first, size, self._num_blocks)
            self._crossing = None
        else:
            if self._crossing is None:
                begins = -first % size
                self._step, self._crossing = 0, [np.flatnonzero(begins == step) for step in range(size)]
            else:
                self._step = (self._step + 1) % size
            slots = self._slots + _ONE
            crossing = self._crossing[self._step]
            if len(crossing):
                slots[crossing] = decode_slots(table, first[crossing], size, self._num_blocks, crossing)
            self._slots = slots
        self._expected = ends.tobytes()
        return self._slots


_ONE = np.uint32(1)


def batch_runs(
    table: NDArray[Any],
    first: NDArray[np.int64],
    counts: NDArray[np.int64],
    block_size: int,
    num_blocks: int,
) -> Runs:
    """Runs of all rows of a step.

    table: int [requests, blocks]. first: int64 [requests], first position of each. counts: int64 [requests], tokens.
    Result: u32 [n, 2]; blocks that follow each other in the cache become one run.

    Raises:
        SlotMismatchError: as for ``decode_slots``.
    """
    rows = np.flatnonzero(counts > 0)
    if not len(rows):
        return np.empty((0, 2), np.uint32)
    start, end = first[rows], first[rows] + counts[rows]
    first_block = start // block_size
    num = (end - 1) // block_size - first_block + 1
    if int((first_block + num).max()) > table.shape[1]:
        raise SlotMismatchError(f"position {int(end.max()) - 1} lies beyond a block table of {table.shape[1]} blocks")
    ends = np.cumsum(num)
    owner = np.repeat(np.arange(len(rows)), num)
    ordinal = np.arange(int(ends[-1])) - np.repeat(ends - num, num) + first_block[owner]
    ids = table[rows[owner], ordinal].astype(np.int64)
    _check_ids(ids, num_blocks)
    low = np.maximum(start[owner] - ordinal * block_size, 0)
    high = np.minimum(end[owner] - ordinal * block_size, block_size)
    return merge_runs(ids * block_size + low, high - low)


def span_runs(blocks: list[int], low: int, high: int, block_size: int) -> Runs:
    """Runs of positions [low, high) of one request whose block ids are ``blocks``. Result: u32 [n, 2]."""
    first, last = low // block_size, -(-high // block_size)
    ids = np.asarray(blocks[first:last], np.int64)
    starts = ids * block_size
    lengths = np.full(len(ids), block_size, np.int64)
    if len(ids):
        cut = low - first * block_size
        starts[0] += cut
        lengths[0] -= cut
        lengths[-1] -= last * block_size - high
    return merge_runs(starts, lengths)


def merge_runs(starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> Runs:
    """Join runs that follow each other. starts, lengths: int64 [n]; result: u32 [m, 2], m <= n."""
    if not len(starts):
        return np.empty((0, 2), np.uint32)
    breaks = np.flatnonzero(starts[1:] != starts[:-1] + lengths[:-1]) + 1
    heads = np.concatenate(([0], breaks))
    merged = np.empty((len(heads), 2), np.uint32)
    merged[:, 0] = starts[heads]
    merged[:, 1] = np.add.reduceat(lengths, heads)
    return merged


def count_slots(runs: Runs) -> int:
    """How many slots the runs name."""
    return len(runs) if runs.ndim == 1 else int(runs[:, 1].sum(dtype=np.int64))


def _check_ids(ids: NDArray[Any], num_blocks: int) -> None:
    if len(ids) and not (int(ids.min()) >= 0 and int(ids.max()) < num_blocks):
        raise SlotMismatchError(f"block ids {int(ids.min())} to {int(ids.max())} in a cache of {num_blocks} blocks")
