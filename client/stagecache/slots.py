"""From a batch to the slots of its rows: runs of (start slot, length), in row order, without a slot a token."""

from __future__ import annotations

from array import array
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stagecache.errors import SlotMismatchError

Runs = NDArray[np.uint32]
"""u32 [n, 2]: start slot and length; or u32 [n]: slots, each a run of 1."""


def decode_slots(
    table: NDArray[Any],
    positions: NDArray[Any],
    block_size: int,
    num_blocks: int,
    rows: NDArray[np.int64] | None = None,
) -> Runs:
    """Slots of one token a request. table: int [requests, blocks]; positions: int [n]; result u32 [n].

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
    """Slots of decode steps in a row. A request's next slot is the last one plus 1, but where a block begins; which
    rows begin one at a step is known from the first of these steps, so that only those read the block table.
    """

    def __init__(self, block_size: int, num_blocks: int) -> None:
        self._block_size = block_size
        self._num_blocks = num_blocks
        self._slots: Runs = np.empty(0, np.uint32)
        self._step = 0
        self._beginning: list[list[tuple[int, int]]] | None = None

    def start(self, table: NDArray[Any], first: NDArray[Any]) -> Runs:
        """Slots of a step whose requests are not those of the step before: as ``decode_slots``."""
        self._beginning = None
        self._slots = decode_slots(table, first, self._block_size, self._num_blocks)
        return self._slots

    def follow(self, table: NDArray[Any], first: NDArray[Any]) -> Runs:
        """Slots of a step that has the requests of the step before, each one position further, in the same order, and
        none with another block table. first: int [requests].

        Raises:
            SlotMismatchError: as for ``decode_slots``.
        """
        size = self._block_size
        if self._beginning is None:
            self._step, self._beginning = 0, self._rows_by_step(first)
        else:
            self._step += 1
        slots: Runs = self._slots + _ONE
        beginning = self._beginning[self._step % size]
        if beginning:
            further, width = self._step // size, table.shape[1]
            if len(beginning) > _FEW:
                rows = np.array([row for row, _ in beginning])
                slots[rows] = decode_slots(table, first[rows], size, self._num_blocks, rows)
            else:
                for row, ordinal in beginning:
                    block = int(table[row, ordinal + further]) if ordinal + further < width else -1
                    if not 0 <= block < self._num_blocks:
                        return self.start(table, first)  # which raises, and says why
                    slots[row] = block * size
        self._slots = slots
        return slots

    def _rows_by_step(self, first: NDArray[Any]) -> list[list[tuple[int, int]]]:
        """For this step and those after it, until all rows have begun a block: (row, ordinal of the block)."""
        size = self._block_size
        steps: list[list[tuple[int, int]]] = [[] for _ in range(size)]
        for row, position in enumerate(first.tolist()):
            steps[-position % size].append((row, -(-position // size)))
        return steps


_ONE = np.uint32(1)
_FEW = 24
"""Up to so many single look-ups are faster than one of all rows at once."""


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


FEW_REQUESTS, FEW_BLOCKS = 4, 64
"""Up to so many, ``few_runs`` takes less time than ``batch_runs``, most of all when the code is cold."""


def few_runs(table: NDArray[Any], first: list[int], counts: list[int], block_size: int, num_blocks: int) -> Runs:
    """As ``batch_runs``, for a few requests, without numpy's arithmetic.

    Raises:
        SlotMismatchError: as for ``decode_slots``.
    """
    flat: list[int] = []
    run_end, width = -1, table.shape[1]
    for row, count in enumerate(counts):
        if count <= 0:
            continue
        at, skipped = divmod(first[row], block_size)
        while count > 0:
            block = table.item(row, at) if at < width else -1
            if not 0 <= block < num_blocks:
                raise _no_slots(table, row, first[row], counts[row], block_size, num_blocks)
            begin, length = block * block_size + skipped, block_size - skipped
            if length > count:
                length = count
            if begin == run_end:
                flat[-1] += length
            else:
                flat += begin, length
            run_end = begin + length
            count -= length
            at += 1
            skipped = 0
    runs: Runs = np.frombuffer(array("I", flat), np.uint32) if flat else np.empty(0, np.uint32)
    return runs.reshape(-1, 2)


def _no_slots(
    table: NDArray[Any], row: int, start: int, count: int, block_size: int, num_blocks: int
) -> SlotMismatchError:
    end = start + count
    low, high = start // block_size, (end - 1) // block_size + 1
    if high > table.shape[1]:
        return SlotMismatchError(f"position {end - 1} lies beyond a block table of {table.shape[1]} blocks")
    return _outside(table[row, low:high], num_blocks)


_MANY_BLOCKS = 256
"""From here on a multiplication of numpy's, whose code is cold at a hit, is faster than one a block."""


def span_runs(blocks: list[int], low: int, high: int, block_size: int) -> bytes:
    """Runs of positions [low, high) of one request whose block ids are ``blocks``, a run a block; one run where all
    blocks follow each other in the cache. Result: pairs of u32, start slot and length, as a record has them.

    Raises:
        OverflowError: a block id that no slot can have.
    """
    first, last = low // block_size, -(-high // block_size)
    count = last - first
    if count <= 0:
        return b""
    ids = blocks[first:last]
    skipped = low - first * block_size
    if ids[-1] - ids[0] == count - 1 and ids == list(range(ids[0], ids[0] + count)):
        return array("I", (ids[0] * block_size + skipped, high - low)).tobytes()
    flat = array("I", bytes(8 * count))
    if count > _MANY_BLOCKS:
        np.multiply(
            np.frombuffer(array("I", ids), np.uint32), np.uint32(block_size), out=np.frombuffer(flat, np.uint32)[::2]
        )
    else:
        flat[::2] = array("I", [block * block_size for block in ids])
    flat[1::2] = array("I", (block_size,)) * count
    flat[0] += skipped
    flat[1] -= skipped
    flat[-1] -= last * block_size - high
    return flat.tobytes()


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
        raise _outside(ids, num_blocks)


def _outside(ids: NDArray[Any], num_blocks: int) -> SlotMismatchError:
    return SlotMismatchError(f"block ids {int(ids.min())} to {int(ids.max())} in a cache of {num_blocks} blocks")
