"""Workloads that need no hit: decode, prefill in chunks, deferred codec rows. Hits are in hits.py."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from stagecache.bench.batch import BLOCK_SIZE, BenchRequest, LiveBatch, Rows, Shape
from stagecache.bench.contenders import geometry_for
from stagecache.bench.measure import Step
from stagecache_wire.geometry import Geometry

_VARIANTS = 3
_DECODE_BLOCKS = 4


@dataclass
class Lane:
    """What one contender has of a workload: its batch, its requests, how far it is."""

    batch: LiveBatch
    requests: list[BenchRequest] = field(default_factory=list)
    turn: int = 0


class Workload(ABC):
    """Blocks of steps, the same for each contender.

    name: of the table it belongs to. parameters: what tells it from others in the table. per: what a figure is of:
    each step, or a whole block, or a step as the mean of its block. has_hits: "no cache" cannot do it.
    """

    name: str
    parameters: dict[str, Any]
    per: Literal["step", "block", "mean"] = "step"
    has_hits = False
    shape: Shape
    geometry: Geometry

    def lane(self) -> Lane:
        """A new contender's lane."""
        return Lane(LiveBatch(self.max_requests, self.geometry.num_blocks))

    @property
    @abstractmethod
    def max_requests(self) -> int:
        """Requests in the batch at once."""

    def prepare(self, lane: Lane) -> list[Step]:
        """Steps before the first block that are no part of it: the rows that later blocks hit."""
        return []

    @abstractmethod
    def block(self, lane: Lane) -> list[Step]:
        """The next block. ``Step.requests`` advance as the steps are driven."""

    @property
    def label(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in self.parameters.items())

    @property
    def fewest_bytes(self) -> int:
        """Bytes that a block must move at least: rows once into shared memory, once to the pool, once to who asked."""
        return 0


def scattered_blocks(num_blocks: int, requests: int, blocks: int) -> list[list[int]]:
    """Block ids of requests, taken all over the cache, the same each time."""
    ids = np.random.default_rng(7).permutation(num_blocks)[: requests * blocks]
    return [[int(block) for block in ids[at : at + blocks]] for at in range(0, requests * blocks, blocks)]


class Decode(Workload):
    """One token a request and step. Requests stand at different places of their blocks."""

    def __init__(
        self,
        requests: int,
        hidden: int,
        extra: int,
        forward_s: float,
        steps: int,
        *,
        num_blocks: int | None = None,
        name: str = "decode",
    ) -> None:
        self.name = name
        self._count = requests
        self._forward_s = forward_s
        self._steps = steps
        self.shape = Shape(hidden, extra)
        blocks = num_blocks or max(1024, _DECODE_BLOCKS * requests)
        self.geometry = geometry_for(blocks, max(requests, 64))
        self.parameters = {"requests": requests, "hidden": hidden, "extra keys": extra, "forward ms": forward_s * 1e3}
        if num_blocks is not None:
            self.parameters = {"requests": requests, "row bytes": self.shape.row_bytes, "blocks": num_blocks}
        self._variants = [self.shape.rows(requests, seed) for seed in range(_VARIANTS)]
        self._expected = [[rows[i : i + 1] for i in range(requests)] for rows in self._variants]

    @property
    def max_requests(self) -> int:
        return self._count

    @property
    def fewest_bytes(self) -> int:
        return 3 * self._count * self.shape.row_bytes * self._steps

    def prepare(self, lane: Lane) -> list[Step]:
        tables = scattered_blocks(self.geometry.num_blocks, self._count, _DECODE_BLOCKS)
        lane.requests = [BenchRequest(f"decode-{i:04d}", table) for i, table in enumerate(tables)]
        return [Step(lane.requests, [1] * self._count, self._variants[0], self._expected[0])]

    def block(self, lane: Lane) -> list[Step]:
        furthest = max(request.computed for request in lane.requests)
        if furthest <= 1 or furthest + self._steps > _DECODE_BLOCKS * BLOCK_SIZE:
            for index, request in enumerate(lane.requests):
                request.computed = 1 + index % BLOCK_SIZE
        steps = []
        for _ in range(self._steps):
            lane.turn += 1
            variant = lane.turn % _VARIANTS
            steps.append(
                Step(
                    lane.requests,
                    [1] * self._count,
                    self._variants[variant],
                    self._expected[variant],
                    self._forward_s,
                )
            )
        return steps


class Prefill(Workload):
    """One prompt, in chunks of at most ``chunk`` tokens; a block is the whole prompt."""

    name = "prefill"
    per = "block"

    def __init__(self, tokens: int, chunk: int, hidden: int, extra: int) -> None:
        self.shape = Shape(hidden, extra)
        self._tokens = tokens
        self._chunk = min(chunk, tokens)
        self.geometry = geometry_for(max(256, 2 * -(-tokens // BLOCK_SIZE)), self._chunk)
        self.parameters = {"tokens": tokens, "chunk": self._chunk, "hidden": hidden, "extra keys": extra}
        self._rows = [self.shape.rows(tokens, seed) for seed in range(2)]
        self._blocks = scattered_blocks(self.geometry.num_blocks, 1, -(-tokens // BLOCK_SIZE))[0]

    @property
    def max_requests(self) -> int:
        return 1

    @property
    def fewest_bytes(self) -> int:
        return 3 * self._tokens * self.shape.row_bytes

    def block(self, lane: Lane) -> list[Step]:
        lane.turn += 1
        return prefill_steps(f"prompt-{lane.turn}", self._blocks, self._rows[lane.turn % 2], self._chunk)


def prefill_steps(req_id: str, blocks: list[int], rows: Rows, chunk: int) -> list[Step]:
    """The steps of one prompt."""
    request = BenchRequest(req_id, blocks)
    tokens = len(rows.hidden)
    parts = [rows[start : min(start + chunk, tokens)] for start in range(0, tokens, chunk)]
    return [Step([request], [len(part.hidden)], part, [part]) for part in parts]


class Deferred(Workload):
    """Decode with a codec key that is written deferred; a block begins with fresh requests, and the last ones end."""

    name = "deferred"
    per = "mean"

    def __init__(self, requests: int, hidden: int, steps: int) -> None:
        self.shape = Shape(hidden, codec=True)
        self._count = requests
        self._steps = min(steps, _DECODE_BLOCKS * BLOCK_SIZE)
        self.geometry = geometry_for(max(1024, 2 * _DECODE_BLOCKS * requests), max(requests, 64))
        self.parameters = {"requests": requests, "hidden": hidden, "steps a request": self._steps}
        self._variants = [self.shape.rows(requests, seed) for seed in range(_VARIANTS)]
        self._expected = [[rows[i : i + 1] for i in range(requests)] for rows in self._variants]
        self._tables = scattered_blocks(self.geometry.num_blocks, 2 * requests, _DECODE_BLOCKS)

    @property
    def max_requests(self) -> int:
        return self._count

    @property
    def fewest_bytes(self) -> int:
        return 3 * self._count * self.shape.row_bytes * self._steps

    def block(self, lane: Lane) -> list[Step]:
        lane.turn += 1
        tables = self._tables[: self._count] if lane.turn % 2 else self._tables[self._count :]
        requests = [BenchRequest(f"speech-{lane.turn}-{i}", table) for i, table in enumerate(tables)]
        steps = []
        for at in range(self._steps):
            variant = (lane.turn + at) % _VARIANTS
            steps.append(Step(requests, [1] * self._count, self._variants[variant], self._expected[variant]))
        return steps
