"""From a saved step to what its requests get: page rows copied out, hits merged with their tails, leftovers split."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from stagecache import leftovers
from stagecache.batch import Batch
from stagecache.device import clone_rows, move_bytes
from stagecache.errors import SlotMismatchError, StageCacheError
from stagecache.hits import Hit
from stagecache.mapping import StagedKey
from stagecache.outputs import StageCacheOutputs
from stagecache.pages import PageUse
from stagecache.policy import HIDDEN_KEY

if TYPE_CHECKING:
    from stagecache.attachment import Attachment
    from stagecache.copies import Copies


class _Referable:
    __slots__ = ("__weakref__",)


@dataclass(slots=True)
class SavedStep(_Referable):
    """Everything materialize needs, taken at save; consumed exactly once (S1).

    page: the staging page it holds. staged: keys whose rows are in the page. local: rows of other per-token keys
    (deferred, or not kept), a copy of their own, by name. leftover: snapshot by name. hits: by request.
    absent_requests: requests with a hit of which the batch has no row (H7). failed: raised at materialize (K3).
    wants_hidden: whether hidden states are handed out. copies: from a device, on their way to page, local and leftover.
    span_keys: other keys whose hits are. home: what it was saved under.
    """

    step_id: int
    batch: Batch
    page: PageUse | None
    staged: list[StagedKey]
    local: dict[str, torch.Tensor]
    leftover: dict[str, Any]
    hits: dict[str, Hit]
    failed: list[StageCacheError]
    wants_hidden: bool
    split_lists: bool = True
    all_keys: dict[str, StagedKey] = field(default_factory=dict)
    copies: Copies | None = None
    span_keys: frozenset[str] = frozenset()
    home: Attachment = field(init=False)

    def land(self, copies: Copies, timeout_s: float) -> None:
        """Wait for its copies; what belongs to no page moves to memory that may be handed out.

        Raises:
            CallDeadlineError, FailedWriteError: as ``Copies.wait``.
        """
        copies.wait(timeout_s, f"step {self.step_id}")
        self.local = {name: clone_rows(rows) for name, rows in self.local.items()}


Window = tuple[int, int]
"""Positions [begin, end) of one request that a step hands out."""

ReadHit = Callable[[Hit, str, Window], NDArray[np.uint8]]
"""(hit, key name, needed positions) -> u8 rows of hit and tail, the tail not filled in."""

HandOut = Callable[[Hit, str, NDArray[np.uint8]], torch.Tensor]
"""(hit, key name, rows as read, the tail filled in) -> [rows + tail, *row_shape], a tensor that lives on its own."""


def windows(step: SavedStep, req_ids: Iterable[str], low_high: Callable[[int], Window]) -> dict[str, Window]:
    """What each request gets of a step, where some request came back (R3). low_high(row): its period's bounds."""
    batch = step.batch
    index_of = {req_id: index for index, req_id in enumerate(batch.req_ids)}
    found: dict[str, Window] = {}
    for req_id in req_ids:
        index = index_of[req_id]
        first, end = int(batch.first[index]), int(batch.ends[index])
        hit = step.hits.get(req_id)
        low, high = low_high(int(batch.rows[index]))
        begin = max(hit.low if hit is not None else first, low)
        found[req_id] = (begin, max(begin, min(end, high)))
    return found


def assemble(
    step: SavedStep,
    req_ids: list[str],
    window_of: dict[str, Window] | None,
    read_hit: ReadHit,
    hand_out: HandOut,
) -> StageCacheOutputs:
    """Build the outputs. Holds no lock; copies rows out of the page before anyone may free it.

    window_of: positions by request, or None where each request gets all of its rows. read_hit raises where hit rows
    cannot be had.
    """
    hidden: dict[str, torch.Tensor] | None = {} if step.wants_hidden else None
    mm: dict[str, dict[str, Any]] = {}
    for key in step.staged:
        name = key.schema.name
        mm[name] = _merge_key(step, req_ids, name, window_of, read_hit, hand_out)
    for name in step.local:
        mm[name] = _merge_key(step, req_ids, name, window_of, read_hit, hand_out)
    if HIDDEN_KEY in mm:
        hidden = mm.pop(HIDDEN_KEY)
    elif hidden is not None:
        hidden = _spans_alone(step, HIDDEN_KEY, req_ids, window_of, read_hit, hand_out)
    for name in step.span_keys:
        if name not in mm:
            mm[name] = _spans_alone(step, name, req_ids, window_of, read_hit, hand_out)
    if step.leftover:
        index_of = {req_id: index for index, req_id in enumerate(step.batch.req_ids)}
        size = len(step.batch.req_ids)
        for name, value in step.leftover.items():
            mm[name] = {
                req_id: leftovers.for_request(value, index_of[req_id], size, split_lists=step.split_lists)
                for req_id in req_ids
            }
    return StageCacheOutputs(hidden, mm)


def _merge_key(
    step: SavedStep,
    req_ids: list[str],
    name: str,
    window_of: dict[str, Window] | None,
    read_hit: ReadHit,
    hand_out: HandOut,
) -> dict[str, torch.Tensor]:
    batch, hits = step.batch, step.hits
    own = step.local.get(name)  # Rows that may be handed out as they are; what is in the page must be copied first.
    if not hits and window_of is None and len(req_ids) == len(batch.req_ids):
        rows = own
        if rows is None:
            assert step.page is not None
            rows = clone_rows(step.all_keys[name].rows(step.page.page, batch.tokens))
        # "Unsafe" where somebody takes gradients; of rows, it saves the bookkeeping of a view a request.
        parts = rows.unsafe_split_with_sizes(_ones(batch.tokens) if batch.counts is None else batch.counts)
        if req_ids is batch.req_ids or req_ids == batch.req_ids:
            return dict(zip(req_ids, parts, strict=True))
        by_id = dict(zip(batch.req_ids, parts, strict=True))
        return {req_id: by_id[req_id] for req_id in req_ids}
    places = {req_id: index for index, req_id in enumerate(batch.req_ids)}
    merged: dict[str, torch.Tensor] = {}
    for req_id in req_ids:
        index = places[req_id]
        start, end = batch.span(index)
        window = None if window_of is None else window_of[req_id]
        hit = hits.get(req_id)
        if hit is not None:
            found = _merge_hit(hit, name, _address(step, name), start, end, window, read_hit, hand_out)
            merged[req_id] = _in_page(step, name)[:0].clone() if found is None else found
            continue
        if own is None:
            own = clone_rows(_in_page(step, name))
        if window is not None:
            first = int(batch.first[index])
            start, end = start + max(window[0] - first, 0), start + max(window[1] - first, 0)
        merged[req_id] = own[start:end]
    return merged


def _in_page(step: SavedStep, name: str) -> torch.Tensor:
    """A key's rows of the step where they are: in the page, or in a copy of the step's own."""
    rows = step.local.get(name)
    if rows is not None:
        return rows
    assert step.page is not None
    return step.all_keys[name].rows(step.page.page, step.batch.tokens)


def _address(step: SavedStep, name: str) -> int:
    """Where these rows begin in this process; they are contiguous."""
    own = step.local.get(name)
    if own is not None:
        return int(own.data_ptr())
    assert step.page is not None
    return step.all_keys[name].addresses[step.page.page]


@lru_cache(maxsize=16)
def _ones(count: int) -> list[int]:
    """Shared, so never to be changed. Splitting by it takes a third of the time of ``split(1)``."""
    return [1] * count


def _merge_hit(
    hit: Hit,
    name: str,
    rows_at: int,
    start: int,
    end: int,
    window: Window | None,
    read_hit: ReadHit,
    hand_out: HandOut,
) -> torch.Tensor | None:
    """The hit's rows and behind them the step's rows [start, end), which begin at address ``rows_at``; of these the
    positions of ``window``. None where that is none.
    """
    tail = end - start
    if tail > hit.tail:  # Bytes are moved by address: nothing else would stop them at the extent's end.
        raise SlotMismatchError(
            f"request {hit.req_id}: {tail} rows in the step, {hit.tail} when it began.",
            remedy="A scheduler output must stay as it is from new_step_starts to save_outputs.",
        )
    begin, stop = hit.low, hit.high + tail
    if window is not None:  # It may name this step's positions also where the step brought no rows of this key.
        begin, stop = window[0], min(window[1], stop)
    if begin >= stop:
        return None
    raw = read_hit(hit, name, (begin, stop))
    gather = hit.gathers[name]
    size = gather.key.row_bytes
    if tail:
        move_bytes(gather.address + (hit.high - hit.low) * size, rows_at + start * size, tail * size)
    rows = hand_out(hit, name, raw)
    return rows if window is None and tail == hit.tail else rows[begin - hit.low : stop - hit.low]


def _spans_alone(
    step: SavedStep,
    name: str,
    req_ids: list[str],
    window_of: dict[str, Window] | None,
    read_hit: ReadHit,
    hand_out: HandOut,
) -> dict[str, torch.Tensor]:
    """Rows of hits in a step that brought none of this key: the span by itself (H7)."""
    key = step.all_keys.get(name)
    merged = {}
    for req_id in req_ids:
        hit = step.hits.get(req_id)
        if hit is not None and key is not None and name in hit.gathers:
            window = None if window_of is None else window_of[req_id]
            found = _merge_hit(hit, name, 0, 0, 0, window, read_hit, hand_out)
            merged[req_id] = torch.empty((0, *key.schema.row_shape), dtype=key.dtype) if found is None else found
    return merged
