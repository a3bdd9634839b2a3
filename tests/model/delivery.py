"""Rule R3 of the reference model: which positions of a request a step hands out.

- Within one prompt of one request, each comeback (new again while live, or resumed) starts a period. A step hands out
  ``[max(start, low), min(end, high))``: ``low`` is how far steps of earlier periods have handed out, capped at the
  num_computed_tokens of every comeback since that was not preempted; ``high`` is where steps of later periods began,
  which matters only where an older step is consumed after one of a comeback.
- Steps of one period do not clip each other, so any order of consumption gives each its own rows (S1).
- A replaced prompt and a finished request end their prompt: steps of it that are consumed later hand out their own
  rows and move nothing of the next prompt.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.model.steps import Scheduled, Step

ENDLESS = 1 << 60


@dataclass
class Period:
    """What the steps between two comebacks handed out: positions [begin, end), received up to ``acked``."""

    cap: int = ENDLESS
    begin: int = ENDLESS
    end: int = 0
    acked: int = 0


@dataclass
class Live:
    """A live request: its block table, and the periods of its current prompt, the present one last."""

    blocks: tuple[int, ...]
    periods: list[Period] = field(default_factory=lambda: [Period()])
    preempted: bool = False


@dataclass
class Part:
    """One request of a saved step. ``start``: 0 where the step begins a period, else its first computed position."""

    request: Scheduled
    start: int
    row: int
    periods: list[Period]
    period: int
    hit: dict[str, list[bytes | None]] = field(default_factory=dict)


class Delivery:
    """Live requests, and how far their rows went out."""

    def __init__(self, block_size: int, explicit_acks: bool):
        self.block_size = block_size
        self.explicit_acks = explicit_acks
        self.live: dict[str, Live] = {}

    def preempt(self, step: Step) -> None:
        for req_id in step.preempted:
            if req_id in self.live:
                self.live[req_id].preempted = True

    def finish(self, step: Step) -> None:
        for req_id in step.finished:
            self.live.pop(req_id, None)

    def enter(self, request: Scheduled, row: int) -> Part:
        """R3: what a request's appearance in a step means for it."""
        live = self.live.get(request.req_id)
        starts = request.how in ("new", "resumed")
        if live is None:
            live = self.live[request.req_id] = Live(request.blocks)
        elif starts:
            self.come_back(live, request)
        live.blocks = request.blocks
        start = 0 if starts else request.first
        return Part(request, start, row, live.periods, len(live.periods) - 1)

    def come_back(self, live: Live, request: Scheduled) -> None:
        """R3: a new period; a new prompt where blocks that the request had within its hit were exchanged."""
        preempted = live.preempted or request.how == "resumed"
        live.preempted = False
        had = live.blocks[: -(-request.first // self.block_size)]
        if not preempted and had != request.blocks[: len(had)]:
            live.periods = [Period()]
        else:
            live.periods.append(Period(cap=ENDLESS if preempted else request.first))

    def span(self, part: Part) -> tuple[int, int]:
        """R3: positions that a step hands out, decided when it is consumed."""
        low, cap = part.start, ENDLESS
        for number in range(part.period, 0, -1):
            cap = min(cap, part.periods[number].cap)
            low = max(low, min(cap, part.periods[number - 1].acked))
        high = min((period.begin for period in part.periods[part.period + 1 :]), default=ENDLESS)
        return low, min(part.request.first + part.request.tokens, high)

    def delivered(self, part: Part, begin: int, end: int) -> None:
        """R3: delivered_upto moves by what was handed out."""
        if begin < end:
            period = part.periods[part.period]
            period.begin, period.end = min(period.begin, begin), max(period.end, end)
            if not self.explicit_acks:
                period.acked = period.end

    def ack(self, req_id: str, upto: int) -> None:
        """R3: rows below ``upto`` were received, as far as they were handed out; where the caller uses acks, only then
        are they delivered."""
        for period in self.live[req_id].periods if req_id in self.live else ():
            period.acked = max(period.acked, min(upto, period.end))
