"""Requests over time: their block ids, and how far their rows were handed out (R3).

A request that comes back (continued, resumed, or with a replaced prompt) starts a new *period*. Within a period steps
may be consumed in any order and never cut each other. Between periods rows are handed out once:

    low   of a period: how far earlier periods were handed out, capped where the comeback says so
    high  of a period: where later periods began to be handed out (an older step consumed after a newer comeback)

A step hands out the positions of [start, end) that lie in [low, high). A replaced prompt starts a new chain of periods:
old and new do not cut each other. ``delivered`` is one array with a row a period, so that a decode step updates it
with two numpy calls and no loop.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Positions: TypeAlias = NDArray[np.int64]
Numbers: TypeAlias = "NDArray[Any] | list[int]"
"""One number a request."""
NO_END = 1 << 60
"""A position beyond every sequence."""


@dataclass(slots=True)
class Period:
    """From one start or comeback of a request to the next.

    row: its place in ``RequestTable.delivered``.
    cap: what delivered_upto was cut to when it began; None where it was not (preempted).
    handed_from: lowest position that its steps handed out.
    chain: all periods of the same content, oldest first.
    """

    row: int
    cap: int | None
    chain: list[Period] = field(repr=False)
    handed_from: int = NO_END


@dataclass(slots=True)
class RequestState:
    """A live request. whole: ``blocks`` is its whole table; else it ran before this cache heard of it."""

    req_id: str
    blocks: list[int]
    period: Period
    preempted: bool = False
    whole: bool = True


class RequestTable:
    """All live requests. Callers hold the cache's lock.

    An interrupt may come anywhere in its methods; each may be done again with the same arguments.
    """

    def __init__(self, *, explicit_acks: bool = False) -> None:
        """explicit_acks: rows count as delivered when ``ack`` says so, not when they were handed out."""
        self.live: dict[str, RequestState] = {}
        self.delivered: Positions = np.zeros(64, np.int64)
        """[rows]: end of what each period has delivered."""
        self.handed: Positions = np.zeros(64, np.int64) if explicit_acks else self.delivered
        """[rows]: end of what each period has handed out; one array with ``delivered`` where nobody acks."""
        self.chained = 0
        """Chains with more than one period: while there are none, no step needs clipping."""
        self.version = 0
        """Changes whenever a request's row does."""
        self._periods: list[Period | None] = [None] * 64
        self._free = list(range(63, -1, -1))
        self.retired: deque[tuple[Period, int]] = deque()

    def start(self, req_id: str, blocks: list[int], *, whole: bool = True) -> RequestState:
        """A request that is not live begins, or is met while it runs."""
        state = RequestState(req_id, blocks, self._new_period(None, []), whole=whole)
        self.live[req_id] = state
        return state

    def finish(self, req_id: str, last_step_id: int) -> RequestState | None:
        """A request ends. Its rows of ``delivered`` are reused once all steps up to ``last_step_id`` are consumed."""
        state = self.live.get(req_id)
        if state is not None:
            self._retire(state.period.chain, last_step_id)
            del self.live[req_id]
        return state

    def comeback(
        self, state: RequestState, blocks: list[int], computed: int, block_size: int, last_step_id: int
    ) -> int:
        """A live request comes again with ``computed`` tokens done and the whole table ``blocks``.

        Returns the first position of [0, computed) that may still have to be handed out.
        """
        had = len(state.blocks)
        within = min(had, -(-computed // block_size))
        replaced = not state.preempted and state.blocks[:within] != blocks[:within]
        cap = None if state.preempted else computed
        if replaced:
            old, state.period = state.period.chain, self._new_period(0, [])
            self._retire(old, last_step_id)
        else:
            chain = state.period.chain
            if len(chain) == 1:
                self.chained += 1
            state.period = self._new_period(cap, chain)
        state.preempted = False
        state.blocks, state.whole = blocks, True
        return self.low(state.period)

    def low(self, period: Period) -> int:
        """delivered_upto as the period's steps see it now."""
        upto = 0
        for earlier, later in zip(period.chain, period.chain[1:], strict=False):
            if earlier is period:
                break
            upto = max(upto, int(self.delivered[earlier.row]))
            if later.cap is not None:
                upto = min(upto, later.cap)
        return upto

    def high(self, period: Period) -> int:
        """Where later periods began to be handed out."""
        later = period.chain[period.chain.index(period) + 1 :]
        return min((other.handed_from for other in later), default=NO_END)

    def period_of(self, row: int) -> Period:
        """The period that owns a row."""
        period = self._periods[row]
        assert period is not None
        return period

    def handed_out(self, row: int, begin: int, end: int) -> None:
        """Positions [begin, end) of a period went out."""
        period = self.period_of(row)
        if begin < period.handed_from:
            period.handed_from = begin
        if end > self.handed.item(row):
            self.handed[row] = end

    def handed_out_all(self, rows: Numbers, ends: Numbers) -> None:
        """The same for whole steps of requests that never came back: rows, ends int64 [requests]."""
        handed = self.handed
        handed[rows] = np.maximum(handed[rows], ends)

    def ack(self, req_id: str, upto: int) -> None:
        """The caller has received the rows below ``upto``, as far as they were handed out. An id that ended is past."""
        state = self.live.get(req_id)
        for period in state.period.chain if state is not None else ():
            row = period.row
            self.delivered[row] = max(int(self.delivered[row]), min(upto, int(self.handed[row])))

    def reclaim(self, oldest_unconsumed: int) -> None:
        """Free the rows of requests that ended, as far as no step older than ``oldest_unconsumed`` needs them."""
        while self.retired and self.retired[0][1] < oldest_unconsumed:
            period, _ = self.retired.popleft()
            if self._periods[period.row] is not period:  # It was retired twice.
                continue
            self._periods[period.row] = None
            self._free.append(period.row)
            if len(period.chain) > 1 and period is period.chain[-1]:
                self.chained -= 1

    def _retire(self, chain: list[Period], last_step_id: int) -> None:
        self.version += 1
        for period in chain:
            self.retired.append((period, last_step_id))

    def _new_period(self, cap: int | None, chain: list[Period]) -> Period:
        self.version += 1
        if not self._free:
            old = len(self.delivered)
            shared = self.handed is self.delivered
            self.delivered = np.concatenate((self.delivered, np.zeros(old, np.int64)))
            self.handed = self.delivered if shared else np.concatenate((self.handed, np.zeros(old, np.int64)))
            self._periods.extend([None] * old)
            self._free = list(range(2 * old - 1, old - 1, -1))
        row = self._free.pop()
        self.delivered[row] = self.handed[row] = 0
        period = Period(row, cap, chain)
        self._periods[row] = period
        chain.append(period)
        return period
