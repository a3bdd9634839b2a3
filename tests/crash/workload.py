"""Steps of an engine that makes the log work hard: freed blocks are reused by the very next allocation, also in the
step that frees them; hits name blocks of others, of this step, in any order; some steps are never saved.

Only what the cache sees matters, so there are no tokens: a hit may name any full block whose rows are there.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import sha256
from random import Random
from typing import Any

import numpy as np

from stagecache.step import NewRequest, SchedulerStep
from tests.crash.oracle import HIDDEN, Oracle, RowKind

KINDS: dict[str, RowKind] = {
    HIDDEN: RowKind("float32", (3,), 12),
    "ctx": RowKind("bfloat16", (2, 2), 8),
    "flags": RowKind("bool", (5,), 5),
    "late": RowKind("int64", (2,), 16),
}
"""Keys declared at attach. ``late`` is deferred."""
SHARED = (HIDDEN, "ctx")
"""What a block that is shared consists of."""
DEFERRED = frozenset({"late"})
PASSING = RowKind("float32", (1,), 4)
"""Keys that look per-token in a pure decode step, and turn out not to be (K1)."""


@dataclass
class Live:
    """A request that runs."""

    req_id: str
    blocks: list[int]
    computed: int


@dataclass
class Part:
    """One request of a step: positions [first, first + count) are computed, the first ``hit`` come from the cache."""

    req_id: str
    blocks: list[int]
    first: int
    count: int
    hit: int = 0

    def slots(self, size: int, begin: int, end: int) -> list[int]:
        return [self.blocks[at // size] * size + at % size for at in range(begin, end)]


@dataclass
class Step:
    """What the scheduler planned, and what the forward then yields.

    unreadable: a hit on rows that are not there. save: False where the forward never comes to its save.
    rows: by key, one bytes a token; leftover: name of a key that comes with one row too many.
    """

    plan: SchedulerStep
    parts: list[Part]
    unreadable: bool = False
    save: bool = True
    reset_before: bool = False
    rows: dict[str, list[bytes]] = field(default_factory=dict)
    leftover: str = ""
    fill: list[tuple[int, bytes]] = field(default_factory=list)
    publish: list[tuple[int, bytes]] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return sum(part.count for part in self.parts)


class Workload:
    """Makes steps, and knows what each must give."""

    def __init__(
        self,
        seed: int,
        *,
        num_blocks: int = 20,
        block_size: int = 4,
        capacity: int = 24,
        churn: float = 0.25,
        resets: float = 0.06,
        passing_keys: bool = True,
        sharing: bool = False,
        salt: int = 0,
    ) -> None:
        """churn: how many of the running requests end in a step. resets: how often a new epoch begins. salt: another
        gives the same steps other rows. sharing: full blocks are published and free ones filled; then each step has
        rows of the same keys.
        """
        self.rng = Random(seed)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.capacity = capacity
        self.churn = churn
        self.reset_rate = resets
        self.passing_keys = passing_keys
        self.sharing = sharing
        self.shared: dict[bytes, dict[str, list[bytes]]] = {}
        """Rows by key of the blocks that were published since the last reset, by their hashes."""
        self.oracle = Oracle()
        self.live: dict[str, Live] = {}
        self.resets = 0
        self.lost = 0
        self._limbo: list[str] = []
        self._references = [0] * num_blocks
        self._free = list(range(num_blocks))
        self._full: set[int] = set()
        self._ordinal = 0
        self._serial = salt << 32
        self._passing = ""

    def next(self) -> Step:
        """The next step; its effect on the oracle comes with ``saved`` or ``was_lost``."""
        rng = self.rng
        plan = SchedulerStep()
        step = Step(plan, [], reset_before=rng.random() < self.reset_rate, save=rng.random() > 0.07)
        if step.reset_before:
            self.resets += 1
            self.oracle.reset()
            self.shared.clear()
        plan.finished_req_ids = {*self._limbo, *(name for name in self.live if rng.random() < self.churn)}
        self._limbo = []
        plan.preempted_req_ids = {
            name for name in self.live if name not in plan.finished_req_ids and rng.random() < 0.06
        } or None
        for name in sorted({*plan.finished_req_ids, *(plan.preempted_req_ids or ())}):
            request = self.live.pop(name, None)
            if request is not None:
                self._release(request.blocks)
        self._limbo = sorted(plan.preempted_req_ids or ())
        if self.sharing:
            self._fill(step)
        budget = self.capacity
        pure_decode = rng.random() < 0.3
        for request in list(self.live.values()):
            budget -= self._go_on(step, request, min(budget, 1 if pure_decode else rng.choice((1, 1, 1, 2, 5))))
        for _ in range(0 if pure_decode and self.live else rng.choice((0, 1, 1, 2, 3))):
            if len(self.live) < 7:
                budget -= self._arrive(step, budget)
        self._outputs(step)
        return step

    def saved(self, step: Step) -> dict[str, dict[str, bytes]]:
        """The save came through: what materialize must give, by key and request."""
        size = self.block_size
        slots = [slot for part in step.parts for slot in part.slots(size, part.first, part.first + part.count)]
        if step.tokens:
            self.oracle.save(slots, {key: rows for key, rows in step.rows.items() if key != step.leftover})
        expected: dict[str, dict[str, bytes]] = {}
        for key, rows in step.rows.items():
            of_key = expected[key] = {}
            at = 0
            for part in step.parts:
                if key == step.leftover:
                    of_key[part.req_id] = b"".join(rows)
                    continue
                kind = KINDS.get(key, PASSING)
                head = self.oracle.read(key, part.slots(size, 0, part.hit), kind)
                of_key[part.req_id] = b"".join([*head, *rows[at : at + part.count]])
                at += part.count
        if step.leftover:
            self.oracle.drop_key(step.leftover)
        if self.sharing:
            self._publish(step)
        return expected

    def _fill(self, step: Step) -> None:
        """Free blocks get rows from elsewhere, now and then of a hash that nobody published."""
        rng, size = self.rng, self.block_size
        for block in rng.sample(self._free, min(len(self._free), rng.choice((0, 0, 1, 2)))):
            name = rng.choice(sorted(self.shared)) if self.shared and rng.random() < 0.9 else rng.randbytes(32)
            step.fill.append((block, name))
            slots = list(range(block * size, (block + 1) * size))
            if name in self.shared:
                self.oracle.save(slots, self.shared[name])
            else:
                self.oracle.lose(slots)
            self._full.add(block)

    def _publish(self, step: Step) -> None:
        """Blocks that a saved step made full, with all of their rows there."""
        size = self.block_size
        for part in step.parts:
            for block in part.blocks[part.first // size : (part.first + part.count) // size]:
                slots = range(block * size, (block + 1) * size)
                if self.oracle.readable(slots):
                    rows = {key: self.oracle.read(key, slots, KINDS[key]) for key in SHARED}
                    name = sha256(b"".join(rows[HIDDEN])).digest()
                    step.publish.append((block, name))
                    self.shared[name] = rows

    def was_lost(self, step: Step) -> None:
        """The step was never saved: what it would have written is unknown now."""
        self.lost += bool(step.tokens)
        for part in step.parts:
            self.oracle.lose(part.slots(self.block_size, part.first, part.first + part.count))

    # ---- inside

    def _release(self, blocks: list[int]) -> None:
        for block in blocks:
            self._references[block] -= 1
            if self._references[block] == 0:
                self._free.append(block)

    def _take(self) -> int | None:
        """The block that was freed last: its rows are overwritten as soon as can be."""
        if not self._free:
            return None
        block = self._free.pop()
        self._full.discard(block)
        self._references[block] = 1
        return block

    def _go_on(self, step: Step, request: Live, wanted: int) -> int:
        before = len(request.blocks)
        count = self._grow(request, wanted)
        cached = step.plan.scheduled_cached_reqs
        cached.req_ids.append(request.req_id)
        added = request.blocks[before:]
        cached.new_block_ids.append((added,) if added else None)
        cached.num_computed_tokens.append(request.computed)
        self._schedule(step, request, count, 0)
        return count

    def _arrive(self, step: Step, budget: int) -> int:
        rng, size = self.rng, self.block_size
        written = {slot for part in step.parts for slot in part.slots(size, part.first, part.first + part.count)}

        def is_good(block: int) -> bool:
            return self.oracle.readable(
                slot for slot in range(block * size, block * size + size) if slot not in written
            )

        good = [block for block in sorted(self._full) if is_good(block)]
        hit = rng.sample(good, min(len(good), rng.choice((0, 1, 1, 2, 3))))
        bad = [block for block in self._free if not is_good(block)][:1] if rng.random() < 0.04 else []
        hit += bad
        for block in hit:
            if self._references[block] == 0:
                self._free.remove(block)
            self._references[block] += 1
        self._ordinal += 1
        request = Live(f"r{self._ordinal}", hit, len(hit) * size)
        count = self._grow(request, min(budget, rng.choice((1, 2, 3, 4, 5, 8))))
        if count == 0:
            self._release(request.blocks)
            return 0
        step.unreadable = step.unreadable or bool(bad)
        self.live[request.req_id] = request
        step.plan.scheduled_new_reqs.append(NewRequest(request.req_id, request.computed, (list(request.blocks),)))
        self._schedule(step, request, count, request.computed)
        return count

    def _grow(self, request: Live, wanted: int) -> int:
        """Blocks for ``wanted`` more tokens; how many of them found room."""
        size = self.block_size
        while len(request.blocks) * size < request.computed + wanted:
            block = self._take()
            if block is None:
                break
            request.blocks.append(block)
        return min(wanted, len(request.blocks) * size - request.computed)

    def _schedule(self, step: Step, request: Live, count: int, hit: int) -> None:
        size = self.block_size
        step.parts.append(Part(request.req_id, list(request.blocks), request.computed, count, hit))
        if count:
            step.plan.num_scheduled_tokens[request.req_id] = count
        first, request.computed = request.computed, request.computed + count
        self._full.update(request.blocks[first // size : request.computed // size])

    def _outputs(self, step: Step) -> None:
        n, rng = step.tokens, self.rng
        for key, kind in KINDS.items():
            if key in SHARED if self.sharing else key == HIDDEN or rng.random() < 0.75:
                step.rows[key] = self._rows(kind, n)
        if not step.save or not n:
            return
        if self._passing:
            step.rows[self._passing] = self._rows(PASSING, n + 1)
            step.leftover, self._passing = self._passing, ""
        elif self.passing_keys and n == len(step.parts) and rng.random() < 0.6:
            self._ordinal += 1
            self._passing = f"passing{self._ordinal}"
            step.rows[self._passing] = self._rows(PASSING, n)

    def _rows(self, kind: RowKind, count: int) -> list[bytes]:
        self._serial += count
        return [kind.row(serial) for serial in range(self._serial - count, self._serial)]


class View:
    """The live batch of a workload's step."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._parts: list[Part] = []

    def show(self, step: Step) -> None:
        self._parts = step.parts

    def req_ids(self) -> list[str]:
        return [part.req_id for part in self._parts]

    def num_computed(self) -> np.ndarray[Any, Any]:
        return np.array([part.first for part in self._parts], np.int32)

    def block_table(self) -> np.ndarray[Any, Any]:
        table = np.zeros((max(1, len(self._parts)), 64), np.int32)
        for row, part in enumerate(self._parts):
            table[row, : len(part.blocks)] = part.blocks
        return table
