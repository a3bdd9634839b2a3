"""Workloads with hits: prompts whose first tokens the engine's prefix cache skipped."""

from __future__ import annotations

from stagecache.bench.batch import BLOCK_SIZE, BenchRequest, Rows, Shape
from stagecache.bench.contenders import geometry_for
from stagecache.bench.measure import Step
from stagecache.bench.workloads import Lane, Workload, prefill_steps, scattered_blocks

TAIL = BLOCK_SIZE
"""Tokens of the step itself, behind each hit."""


class Hits(Workload):
    """``at_once`` new requests a step, each with a hit of ``tokens``. The rows were written by earlier prompts."""

    name = "hits"
    has_hits = True

    def __init__(self, tokens: int, at_once: int, hidden: int, forward_s: float, chunk: int = 2048) -> None:
        self.shape = Shape(hidden)
        self._count = at_once
        self._tokens = tokens
        self._forward_s = forward_s
        self._chunk = min(chunk, max(tokens, at_once * TAIL))
        blocks = tokens // BLOCK_SIZE
        hit_bytes = at_once * tokens * self.shape.row_bytes
        self.geometry = geometry_for(max(256, 2 * at_once * (blocks + 1)), self._chunk, hit_bytes)
        self.parameters = {"tokens": tokens, "at once": at_once, "hidden": hidden, "forward ms": forward_s * 1e3}
        self._tables = scattered_blocks(self.geometry.num_blocks, at_once, blocks + 1)
        self._cached = [self.shape.rows(tokens, seed) for seed in range(at_once)]
        self._tails = [self.shape.rows(at_once * TAIL, 100 + seed) for seed in range(2)]
        self._expected = [
            [Rows.joined([self._cached[i], tails[i * TAIL : (i + 1) * TAIL]]) for i in range(at_once)]
            for tails in self._tails
        ]

    @property
    def max_requests(self) -> int:
        return self._count

    @property
    def fewest_bytes(self) -> int:
        return self._count * (self._tokens + 3 * TAIL) * self.shape.row_bytes

    def prepare(self, lane: Lane) -> list[Step]:
        return [
            step
            for i in range(self._count)
            for step in prefill_steps(f"source-{i}", self._tables[i], self._cached[i], self._chunk)
        ]

    def block(self, lane: Lane) -> list[Step]:
        lane.turn += 1
        requests = [
            BenchRequest(f"hit-{lane.turn}-{i}", table, computed=self._tokens) for i, table in enumerate(self._tables)
        ]
        variant = lane.turn % 2
        return [Step(requests, [TAIL] * self._count, self._tails[variant], self._expected[variant], self._forward_s)]


class SameStepHits(Workload):
    """A prompt, and a second one that hits the first one's blocks in the very step that computes them."""

    name = "same-step hits"
    has_hits = True

    def __init__(self, tokens: int, hidden: int, forward_s: float) -> None:
        self.shape = Shape(hidden)
        self._forward_s = forward_s
        self._tokens = tokens
        blocks = tokens // BLOCK_SIZE
        self.geometry = geometry_for(max(256, 4 * blocks), tokens + TAIL, tokens * self.shape.row_bytes)
        self.parameters = {"tokens": tokens, "hidden": hidden, "forward ms": forward_s * 1e3}
        self._table = scattered_blocks(self.geometry.num_blocks, 1, blocks + 1)[0]
        self._rows = [self.shape.rows(tokens + TAIL, seed) for seed in range(2)]

    @property
    def max_requests(self) -> int:
        return 2

    @property
    def fewest_bytes(self) -> int:
        return (4 * self._tokens + 3 * TAIL) * self.shape.row_bytes

    def block(self, lane: Lane) -> list[Step]:
        lane.turn += 1
        rows = self._rows[lane.turn % 2]
        first = BenchRequest(f"writes-{lane.turn}", self._table[:-1])
        second = BenchRequest(f"hits-{lane.turn}", self._table, computed=self._tokens)
        expected = [rows[: self._tokens], rows]
        return [Step([first, second], [self._tokens, TAIL], rows, expected, self._forward_s)]
