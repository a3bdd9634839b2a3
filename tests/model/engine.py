"""A simulated engine with prefix caching like vLLM V1's: it decides what each step schedules, and where.

- Full blocks are found by a hash of their content and everything before them; the hash is published when the block is
  scheduled, so another request of the same step may hit it.
- Freed blocks go to the end of a queue, tail of the request first, and keep their hash until they are reused.
- A request that gets no block preempts the youngest running one; a preempted request starts again from the hits it
  then finds.
- At least one token of a request is always computed.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from tests.model.steps import Scheduled, Step

Hash = tuple[int, ...]


class BlockPool:
    """Blocks with reference counts, an LRU queue of the free ones, and the hashes of full blocks."""

    def __init__(self, num_blocks: int):
        self.references = [0] * num_blocks
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self.by_hash: dict[Hash, int] = {}
        self.hash_of: dict[int, Hash] = {}

    def take(self, count: int) -> list[int]:
        """``count`` blocks that nobody reads, least recently used first; their hashes are dropped."""
        blocks = [self.free.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            self.evict(block)
            self.references[block] = 1
        return blocks

    def touch(self, block: int) -> None:
        self.free.pop(block, None)
        self.references[block] += 1

    def release(self, blocks: list[int]) -> None:
        for block in reversed(blocks):
            self.references[block] -= 1
            if self.references[block] == 0:
                self.free[block] = None

    def publish(self, block: int, content: Hash) -> None:
        """Later duplicates of a content are not found, but keep their rows."""
        if block not in self.hash_of and content not in self.by_hash:
            self.by_hash[content] = block
            self.hash_of[block] = content

    def evict(self, block: int) -> None:
        content = self.hash_of.pop(block, None)
        if content is not None:
            del self.by_hash[content]

    def forget(self) -> None:
        """A reset of the engine's prefix cache."""
        self.by_hash.clear()
        self.hash_of.clear()


@dataclass
class EngineRequest:
    """A request of the engine. ``how``: in which way it enters its next step, see Scheduled."""

    req_id: str
    tokens: list[int]
    length: int
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    how: str = "new"
    known: bool = False


class Engine:
    """Requests, waiting and running, over one block pool."""

    def __init__(self, num_blocks: int, block_size: int, *, max_running: int = 5, v2_runner: bool = False):
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        self.max_running = max_running
        self.v2_runner = v2_runner
        self.waiting: list[EngineRequest] = []
        self.running: list[EngineRequest] = []
        self.finished: list[str] = []
        self.preempted: list[str] = []
        self._ordinal = 0

    # ---- what happens between steps

    def arrive(self, tokens: list[int], decode: int, req_id: str | None = None) -> None:
        self._ordinal += 1
        self.waiting.append(EngineRequest(req_id or f"r{self._ordinal}", tokens, len(tokens) + decode))

    def abort(self, index: int) -> str | None:
        """Abort some request, running or waiting. Returns its id."""
        everyone = [*self.running, *self.waiting]
        if not everyone:
            return None
        request = everyone[index % len(everyone)]
        self._end(request)
        return request.req_id

    def preempt(self, index: int) -> None:
        if self.running:
            self._preempt(self.running[index % len(self.running)])

    def come_again(self, index: int, back: int, *, replace: bool) -> None:
        """A running request comes again with its whole table: ``back`` computed tokens earlier, or with a new
        prompt on other blocks."""
        if not self.running:
            return
        request = self.running[index % len(self.running)]
        if replace:
            self.running.remove(request)
            self.pool.release(request.blocks)
            request.tokens = [token + 7 for token in request.tokens]
            request.blocks, request.computed, request.how = [], 0, "new"
            self.waiting.insert(0, request)
            return
        request.computed = max(0, request.computed - back)
        for block in request.blocks[request.computed // self.block_size :]:
            self.pool.evict(block)
        request.how = "new"

    # ---- steps

    def schedule(self, budget: int, chunk: int) -> Step:
        """One step of at most ``budget`` tokens, at most ``chunk`` a request."""
        batch: list[Scheduled] = []
        preempted_now = False
        for request in list(self.running):
            count = min(len(request.tokens) - request.computed, budget, chunk)
            while request in self.running and not self._allocate(request, count):
                victim = self.running[-1]
                preempted_now = True
                self._preempt(victim)
            if request in self.running and count > 0:
                batch.append(self._scheduled(request, count))
                budget -= count
        while self.waiting and not preempted_now and budget > 0 and len(self.running) < self.max_running:
            request = self.waiting[0]
            hit = self._hit_blocks(request.tokens)
            for block in hit:
                self.pool.touch(block)
            request.blocks, request.computed = hit, len(hit) * self.block_size
            count = min(len(request.tokens) - request.computed, budget, chunk)
            if not self._allocate(request, count):
                self.pool.release(request.blocks)
                request.blocks, request.computed = [], 0
                break
            self.running.append(self.waiting.pop(0))
            batch.append(self._scheduled(request, count))
            budget -= count
        finished, self.finished = self.finished, []
        preempted, self.preempted = self.preempted, []
        return Step(tuple(batch), tuple(finished), tuple(preempted))

    def advance(self, step: Step) -> None:
        """The step was computed: sample tokens, end what is done."""
        by_id = {request.req_id: request for request in self.running}
        for entry in step.batch:
            request = by_id.get(entry.req_id)
            if request is None or entry.how == "idle":
                continue
            request.computed = entry.first + entry.count
            if request.computed == len(request.tokens):
                if len(request.tokens) >= request.length:
                    self._end(request)
                else:
                    request.tokens.append((request.tokens[-1] * 5 + len(request.tokens)) % 97)

    # ---- inside

    def _scheduled(self, request: EngineRequest, count: int) -> Scheduled:
        entry = Scheduled(request.req_id, tuple(request.blocks), request.computed, count, request.how)
        request.known, request.how = True, "cached"
        self._publish(request, request.computed + count)
        return entry

    def _publish(self, request: EngineRequest, upto: int) -> None:
        size = self.block_size
        for index in range(upto // size):
            self.pool.publish(request.blocks[index], tuple(request.tokens[: (index + 1) * size]))

    def _hit_blocks(self, tokens: list[int]) -> list[int]:
        size, found = self.block_size, []
        for index in range((len(tokens) - 1) // size):
            block = self.pool.by_hash.get(tuple(tokens[: (index + 1) * size]))
            if block is None:
                break
            found.append(block)
        return found

    def _allocate(self, request: EngineRequest, count: int) -> bool:
        missing = -(-(request.computed + count) // self.block_size) - len(request.blocks)
        if missing > len(self.pool.free):
            return False
        request.blocks = request.blocks + self.pool.take(max(0, missing))
        return True

    def _preempt(self, request: EngineRequest) -> None:
        self.running.remove(request)
        self.pool.release(request.blocks)
        request.blocks, request.computed = [], 0
        request.how = "new" if self.v2_runner else "resumed"
        self.preempted.append(request.req_id)
        self.waiting.insert(0, request)

    def _end(self, request: EngineRequest) -> None:
        (self.running if request in self.running else self.waiting).remove(request)
        self.pool.release(request.blocks)
        if request.known:
            self.finished.append(request.req_id)
