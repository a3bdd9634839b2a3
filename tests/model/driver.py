"""Runs one random sequence on a simulated engine, with two caches side by side that must agree on every result."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

from tests.model.chaos import Chaos
from tests.model.engine import Engine
from tests.model.reference import ReferenceCache
from tests.model.rows import rows_at
from tests.model.setups import CAPACITY, NUM_BLOCKS, Setup
from tests.model.steps import HIDDEN, Cache, Outputs, Refused, Scheduled, Schema, Step


class Event(NamedTuple):
    """One thing that happens. ``kind`` names a method of Run; a to d, each 0 to 255, choose among its variants."""

    kind: str
    a: int
    b: int
    c: int
    d: int


WITHOUT_HIDDEN = (10, 14)

KINDS = ("step",) * 11 + ("arrive",) * 4 + ("consume",) * 2 + ("abort", "preempt", "again", "reset", "misuse")


class Plan(NamedTuple):
    """A sequence. ``flavour``: bit 0 chaos in place of the engine, bit 1 the V2 runner's way to resume, bit 2
    materialize on another thread."""

    setup: int
    flavour: int
    events: tuple[Event, ...]


class Mismatch(AssertionError):
    """The caches disagree; the text holds the calls up to there."""


class Run:
    """One sequence."""

    def __init__(self, plan: Plan, setup: Setup, model: ReferenceCache, cache: Cache, pool: ThreadPoolExecutor | None):
        self.plan, self.setup, self.model, self.cache = plan, setup, model, cache
        self.trace: list[str] = [f"setup {setup.name!r}, flavour {plan.flavour}"]
        self.engine = Engine(NUM_BLOCKS, setup.rules.block_size, v2_runner=bool(plan.flavour & 2))
        self.chaos = Chaos(NUM_BLOCKS, setup.rules.block_size, self._readable) if plan.flavour & 1 else None
        self._pool = pool if plan.flavour & 4 else None
        self._late: list[tuple[Future[Any], Any, str]] = []
        self._open: list[tuple[int, int, list[str]]] = []
        self._writes = 0
        self._new_epoch = False
        self._keys = list(setup.keys)

    def execute(self) -> None:
        """Run it all, then consume what is open and finish every request.

        Raises:
            Mismatch: the first disagreement.
        """
        try:
            for event in self.plan.events:
                getattr(self, event.kind)(event)
            while self._open:
                self._take(0, 0, 0)
            self._begin(Step((), finished=tuple(self.model.live)))
            self._join()
            self._both("reset()", lambda cache: cache.reset())
        except Mismatch:
            raise
        except Exception as error:
            raise Mismatch(self._told(f"{type(error).__name__}: {error}")) from error
        unchanged = getattr(self.cache, "held_unchanged", None)
        if unchanged is not None and not unchanged():
            raise Mismatch(self._told("rows that were handed out changed (S3)"))

    # ---- events

    def arrive(self, event: Event) -> None:
        """A prompt: one of three shared beginnings, cut somewhere, and a tail of its own."""
        if self.chaos is not None:
            return self.step(event)
        shared = [event.a % 3 * 31 + position for position in range(event.b % 22)]
        tail = [200 + event.c * 8 + position for position in range(1 + event.d % 5)]
        self.engine.arrive(shared + tail, decode=event.a // 3 % 6)
        return None

    def abort(self, event: Event) -> None:
        self.engine.abort(event.a)

    def preempt(self, event: Event) -> None:
        self.engine.preempt(event.a)

    def again(self, event: Event) -> None:
        self.engine.come_again(event.a, event.b % 6, replace=event.c % 3 == 0)

    def reset(self, event: Event) -> None:
        """The cache's rows go, at once or with the next step; most often the engine's hashes with them."""
        if event.c % 2:
            self._new_epoch = True
        else:
            self._both("reset()", lambda cache: cache.reset())
        if event.a % 5:
            self.engine.pool.forget()

    def consume(self, event: Event) -> None:
        if self._open:
            self._take(event.a % len(self._open), event.b, event.c)

    def misuse(self, event: Event) -> None:
        """Calls that must be refused and change nothing."""
        last = self.model.last_step_id
        if event.a % 3 == 0 and self._open:
            number, real, _ = self._open.pop(event.b % len(self._open))
            self._both(
                f"materialize({number}, ['nobody'])",
                lambda cache: cache.materialize(number if cache is self.model else real, ["nobody"]),
            )
            with suppress(Refused):  # Whether the refused call consumed the step is not said.
                self.cache.discard_step(real)
        elif event.a % 3 == 1:
            self._bad_hit(event)
        elif last and all(number != last for number, _, _ in self._open):
            self._both("discard of a consumed step", lambda cache: cache.discard_step(10**9))

    def step(self, event: Event) -> None:
        """Schedule, begin, save in one of many ways, and perhaps consume."""
        way = event.b % 40
        capacity = 4 * CAPACITY if way == 1 else CAPACITY
        if self.chaos is not None:
            step = self.chaos.step(event.a << 8 | event.d, capacity)
        else:
            step = self.engine.schedule(capacity if event.a % 3 or way == 1 else 6, (24, 24, 5, 9)[event.a // 3 % 4])
        self._begin(step)
        if way not in (0, 12, 13):
            self._save(event, step, way)
        elif event.c % 2:
            self._evict(step)
        self.engine.advance(step)

    # ---- parts of a step

    def _bad_hit(self, event: Event) -> None:
        """A step whose only arrival has a hit that is not aligned, or not covered; the request is aborted then."""
        size = self.setup.rules.block_size
        blocks = (event.b % NUM_BLOCKS, (event.b + 1) % NUM_BLOCKS)
        first = size + 1 + event.c % 3 if event.d % 2 else 3 * size
        self._begin(Step((Scheduled("bad", blocks, first, 1, "new"),)))
        for block in blocks:
            self.engine.pool.evict(block)
        self._begin(Step((), finished=("bad",)))

    def _begin(self, step: Step) -> None:
        step, self._new_epoch = replace(step, new_epoch=self._new_epoch), False
        text = str(step)
        for request in step.batch:
            if request.how == "new" and request.req_id in self.model.live and request.req_id not in step.finished:
                text = text.replace(str(request), f"{str(request).removesuffix(' new')} again")
        self._both(f"new_step_starts({text})", lambda cache: cache.new_step_starts(step))

    def _save(self, event: Event, step: Step, way: int) -> None:
        while len(self._open) >= self.setup.rules.depth:
            self._take(0, event.a, event.c)
        outputs = self._outputs(event, step, way)
        given = ", ".join([*(["hidden"] if outputs.hidden else []), *outputs.mm])
        text = f"save_outputs({given}; n={outputs.unpadded} of {outputs.padded})"
        numbers = self._both(text, lambda cache: cache.save_outputs(outputs))
        if numbers is None:
            if event.c % 2:
                self._evict(step)
            return
        self._open.append((*numbers, [request.req_id for request in step.batch]))
        if event.c % 8 < 5:
            self._take(len(self._open) - 1, 0, event.d)
        elif event.c % 8 == 5:
            self._take(len(self._open) - 1, event.d, event.c)

    def _outputs(self, event: Event, step: Step, way: int) -> Outputs:
        n = step.tokens
        padded = n + (event.d >> 6 if n else 0)
        positions = [at for request in step.batch for at in range(request.first, request.first + request.tokens)]
        values: dict[str, Any] = {}
        for index, key in enumerate(self._keys):
            self._writes += 1
            schema = self.setup.keys[key]
            if way == 2 + index and key in self.model.schemas:
                schema = Schema(schema.dtype, (*schema.row_shape, 2))
            elif way == 6 + index and key in self.model.schemas:
                schema = Schema("float32" if schema.dtype == "int64" else "int64", schema.row_shape)
            extra = padded - n if (event.d >> index) & 1 else 0
            emitted = key == HIDDEN or (event.d >> index & 3) != 3
            if n and emitted and not (key == HIDDEN and way in WITHOUT_HIDDEN):
                values[key] = rows_at(schema, self._writes, positions, extra)
        hidden = values.pop(HIDDEN, None)
        for key in self.setup.per_request:
            if step.batch and event.d & 4:
                self._writes += 1
                values[key] = rows_at(Schema("float32", (2,)), self._writes, range(len(step.batch)))
        if self.setup.leftovers and event.d % 4 == 1:
            values.update(self._leftovers(step, n, padded))
        unpadded = n + (event.a % 2 or -1) if way == 11 and n > 1 else n
        return Outputs(hidden, values, unpadded, max(unpadded, padded))

    def _leftovers(self, step: Step, n: int, padded: int) -> dict[str, Any]:
        self._writes += 1
        odd = rows_at(Schema("float32", (2,)), self._writes, range(padded + 2))
        each = [rows_at(Schema("int64", ()), self._writes, range(index + 1)) for index in range(len(step.batch))]
        found = {"ref": odd, "each": each, "nested": {"all": odd, "each": each}, "rate": self._writes}
        if "table" in self.setup.rules.roles and n:
            found["table"] = rows_at(Schema("float32", (2,)), self._writes, range(n))
        return found

    def _take(self, index: int, how: int, which: int) -> None:
        """Consume an open step: materialize for all of its requests or some, or discard."""
        number, real, req_ids = self._open.pop(index)
        if how % 8 == 7:
            self._both(
                f"discard_step({number})",
                lambda cache: cache.discard_step(number if cache is self.model else real),
            )
            return
        if how % 8 == 6:
            req_ids = [req_id for place, req_id in enumerate(req_ids) if which >> place % 8 & 1]
        self._both(
            f"materialize({number}, {' '.join(req_ids)})",
            lambda cache: cache.materialize(number if cache is self.model else real, req_ids),
            late=True,
        )
        if self.setup.rules.explicit_acks:
            self._ack(req_ids, how, which)

    def _ack(self, req_ids: list[str], how: int, which: int) -> None:
        """The caller received what it was handed out, or a little less; or says so of more."""
        self._join()
        for place, req_id in enumerate(req_ids):
            live = self.model.live.get(req_id)
            if live is not None and (which + how) >> place % 8 & 1:
                upto = max(0, max(period.end for period in live.periods) - which % 4 + 1)
                self._both(f"ack({req_id}, {upto})", lambda cache, req_id=req_id, upto=upto: cache.ack(req_id, upto))

    def _evict(self, step: Step) -> None:
        """The engine learns that rows were lost, and forgets the hashes of the blocks."""
        for request in step.batch:
            for block in request.blocks:
                self.engine.pool.evict(block)

    # ---- both caches

    def _both(self, text: str, call: Callable[[Cache], Any], *, late: bool = False) -> tuple[Any, Any] | None:
        """Do the same on both. None where both refused; else both results, which only steps ids may differ in."""
        self.trace.append(text)
        consumes = late or text.startswith(("discard", "materialize"))
        if consumes:
            self._join()
        expected = _outcome(call, self.model)
        if late and self._pool is not None:
            self._late.append((self._pool.submit(_outcome, call, self.cache), expected, text))
            return None
        found = _outcome(call, self.cache)
        self._compare(expected, found, text)
        return None if isinstance(expected, Refused) else (expected, found)

    def _join(self) -> None:
        while self._late:
            future, expected, text = self._late.pop(0)
            self._compare(expected, future.result(), text)

    def _compare(self, expected: Any, found: Any, text: str) -> None:
        if isinstance(expected, Refused) or isinstance(found, Refused):
            if not (isinstance(expected, Refused) and isinstance(found, Refused) and expected.kinds & found.kinds):
                raise Mismatch(self._told(f"{text}:\n  expected {expected!r}\n  found    {found!r}"))
            self.trace.append(f"  refused: {found}")
        elif isinstance(expected, dict) and expected != found:
            raise Mismatch(self._told(f"{text}: {_difference(expected, found)}"))

    def _told(self, text: str) -> str:
        return "\n".join([*self.trace, "", text, f"plan = {self.plan!r}"])

    def _readable(self, slot: int) -> bool:
        if self.setup.rules.needs_hidden:
            return self.model.read(HIDDEN, slot, b"") is not None
        return self.model.read(self._keys[0], slot, b"") is not None


def _outcome(call: Callable[[Cache], Any], cache: Cache) -> Any:
    try:
        return call(cache)
    except Refused as error:
        return error


def _difference(expected: dict[str, Any], found: dict[str, Any]) -> str:
    lines = []
    for key in sorted({*expected, *found}):
        ours, theirs = expected.get(key, {}), found.get(key, {})
        lines += [
            f"\n  {key} of {req_id}\n    expected {ours.get(req_id)}\n    found    {theirs.get(req_id)}"
            for req_id in sorted({*ours, *theirs})
            if ours.get(req_id) != theirs.get(req_id)
        ]
    return "".join(lines)
