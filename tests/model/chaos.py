"""An adversary in place of a scheduler: arbitrary steps that a cache must still serve by the rules.

It has no allocator. Hits point at any blocks, block tables are exchanged at will, requests lose blocks to others while
they live. Two things hold, as in every engine: a step never writes a slot twice, and a table never names a block twice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from tests.model.steps import Scheduled, Step

MAX_BLOCKS = 6


@dataclass
class ChaosRequest:
    blocks: list[int]
    computed: int
    preempted: bool = False


class Chaos:
    """Makes steps out of random numbers."""

    def __init__(self, num_blocks: int, block_size: int, readable: Callable[[int], bool]):
        """readable: whether a slot's hidden row may be read; most hits point at such."""
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.readable = readable
        self.live: dict[str, ChaosRequest] = {}
        self._ordinal = 0
        self._written: set[int] = set()

    def step(self, salt: int, capacity: int) -> Step:
        """A step of at most ``capacity`` tokens; the same salt and history give the same step."""
        rng = Random(salt)
        self._written = set()
        finished = [req_id for req_id in self.live if rng.random() < 0.12]
        for req_id in finished:
            del self.live[req_id]
        preempted = [req_id for req_id, request in self.live.items() if not request.preempted and rng.random() < 0.1]
        for req_id in preempted:
            self.live[req_id].preempted = True
        batch: list[Scheduled] = []
        going_on = [req_id for req_id in self.live if req_id not in preempted and rng.random() < 0.7]
        batch += [self._go_on(rng, req_id, capacity) for req_id in going_on]
        for _ in range(rng.choice((0, 0, 1, 1, 2, 3))):
            if len(self.live) < 6:
                fresh = finished and rng.random() < 0.4
                self._ordinal += 1
                req_id = rng.choice(finished) if fresh else f"c{self._ordinal}"
                if req_id not in self.live:
                    batch.append(self._arrive(rng, req_id, capacity))
        rng.shuffle(batch)
        return Step(tuple(batch), tuple(finished), tuple(preempted))

    def reset(self) -> None:
        self.live.clear()

    # ---- one request

    def _arrive(self, rng: Random, req_id: str, capacity: int) -> Scheduled:
        hit = self._hit(rng, rng.choice((0, 0, 1, 1, 2, 3)))
        return self._enter(rng, req_id, hit, len(hit) * self.block_size, "new", capacity)

    def _go_on(self, rng: Random, req_id: str, capacity: int) -> Scheduled:
        request = self.live[req_id]
        if request.preempted:
            how = rng.choice(("resumed", "resumed", "new"))
            hit = self._hit(rng, rng.choice((0, 1, 2, 3)))
            request.preempted = False
            return self._enter(rng, req_id, hit, len(hit) * self.block_size, how, capacity)
        choice = rng.random()
        if choice < 0.15:
            return self._come_again(rng, req_id, request, capacity)
        if choice < 0.2:
            hit = self._hit(rng, rng.choice((1, 2)))
            return self._enter(rng, req_id, hit, len(hit) * self.block_size, "resumed", capacity)
        if choice < 0.25:
            return Scheduled(req_id, tuple(request.blocks), request.computed, 0, "idle")
        return self._enter(rng, req_id, request.blocks, request.computed, "cached", capacity)

    def _come_again(self, rng: Random, req_id: str, request: ChaosRequest, capacity: int) -> Scheduled:
        blocks, first = list(request.blocks), request.computed
        choice = rng.random()
        if choice < 0.3:
            first = rng.randint(0, request.computed)
        elif choice < 0.5:
            blocks = self._hit(rng, max(1, -(-first // self.block_size)))
            first = min(first, len(blocks) * self.block_size)
        elif choice < 0.7:
            blocks += [block for block in self._hit(rng, 2) if block not in blocks][: MAX_BLOCKS - len(blocks)]
            first = rng.randint(0, len(blocks) * self.block_size)
        return self._enter(rng, req_id, blocks, first, "new", capacity)

    def _enter(self, rng: Random, req_id: str, blocks: list[int], first: int, how: str, capacity: int) -> Scheduled:
        """Schedule some tokens from ``first`` on, as many as find free slots."""
        table = list(blocks)
        count = 0
        wanted = rng.choice((0, 1, 1, 1, 2, 3, 5, 8)) if how != "cached" else rng.choice((1, 1, 1, 2, 4))
        for position in range(first, min(first + wanted, MAX_BLOCKS * self.block_size)):
            if position // self.block_size >= len(table):
                free = [block for block in range(self.num_blocks) if block not in table and self._unwritten(block)]
                if not free:
                    break
                table.append(rng.choice(free))
            slot = table[position // self.block_size] * self.block_size + position % self.block_size
            if slot in self._written or len(self._written) >= capacity:
                break
            self._written.add(slot)
            count += 1
        if how == "cached" and count == 0:
            how, table = "idle", list(blocks)
        self.live[req_id] = ChaosRequest(table, first + count)
        return Scheduled(req_id, tuple(table), first, count, how)

    def _hit(self, rng: Random, count: int) -> list[int]:
        """Distinct blocks to hit: mostly readable ones or ones that this step writes, now and then any."""
        size = self.block_size
        good = [
            block
            for block in range(self.num_blocks)
            if all(self.readable(slot) or slot in self._written for slot in range(block * size, block * size + size))
        ]
        if rng.random() < 0.06 or len(good) < count:
            return rng.sample(range(self.num_blocks), count) if rng.random() < 0.3 else good[:count]
        return rng.sample(good, count)

    def _unwritten(self, block: int) -> bool:
        return self._written.isdisjoint(range(block * self.block_size, (block + 1) * self.block_size))
