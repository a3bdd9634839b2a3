"""Two replicas that share blocks: the rules of PUBLISH and FILL as a model, and the sequences that compare it.

- A row is made of its key, of the model's version and of the tokens up to it, so that equal hashes mean equal rows
  exactly where the model is the same.
- PUBLISH keeps a block whose every slot has every key, under its generation and hash; of the rows that are kept, which
  ones are evicted is the daemon's affair: the model asks it, before a FILL, what it holds, and never lets it hold what
  nobody published.
- FILL writes what is held as a step writes its rows; what is not held becomes unreadable.
- A reset after which the model may be another one leads into a generation of its own; joining leads into the common one
  of those who joined since the last such reset of one of its members.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from types import SimpleNamespace
from typing import Any, NamedTuple

from tests.model.engine import Engine, EngineRequest
from tests.model.real import RealCache
from tests.model.reference import ReferenceCache
from tests.model.steps import HIDDEN, Merged, Outputs, Refused, Rules, Scheduled, Schema, Step, Tensor

NUM_BLOCKS = 16
BLOCK_SIZE = 4
KEYS = {HIDDEN: Schema("float32", (128,)), "ctx": Schema("int64", (3,))}
RULES = Rules(BLOCK_SIZE, 16, schemas=KEYS)

NamedBlock = tuple[int, bytes]


def hash_of(tokens: Sequence[int]) -> bytes:
    """Of a block that ends behind these tokens."""
    return sha256(repr(tuple(tokens)).encode()).digest()


def row_of(key: str, version: int, tokens: Sequence[int]) -> bytes:
    """The row of the last of these tokens."""
    schema = KEYS[key]
    size = Tensor(schema.dtype, schema.row_shape, ()).row_bytes
    seed = sha256(f"{key} {version} {tuple(tokens)}".encode()).digest()
    return (seed * (size // len(seed) + 1))[:size]


@dataclass
class Node:
    """What was ever published. ``base``: the generation that who joins enters."""

    base: int = 1
    last: int = 1
    blocks: dict[tuple[int, bytes], list[dict[str, bytes]]] = field(default_factory=dict)

    def reset(self, generation: int) -> int:
        """A member of ``generation`` leaves it for one of its own."""
        if generation == self.base:
            self.last += 1
            self.base = self.last
        self.last += 1
        return self.last


class SharingReference(ReferenceCache):
    """The reference model of one replica."""

    def __init__(self, node: Node):
        super().__init__(RULES)
        self.node = node
        self.generation = node.base

    def join(self) -> None:
        self.generation = self.node.base

    def change_model(self) -> None:
        """R5."""
        self.reset()
        self.generation = self.node.reset(self.generation)

    def publish(self, blocks: Sequence[NamedBlock]) -> None:
        for block, block_hash in blocks:
            slots = range(block * BLOCK_SIZE, (block + 1) * BLOCK_SIZE)
            rows = [{key: self.read(key, slot, b"") for key in KEYS} for slot in slots]
            if all(row for of_slot in rows for row in of_slot.values()):
                self.node.blocks.setdefault((self.generation, block_hash), rows)  # type: ignore[arg-type]

    def fill(self, blocks: Sequence[NamedBlock], held: Sequence[bool]) -> None:
        """held: whether the daemon has each block. It never has what nobody published."""
        self.clock += 1
        for (block, block_hash), there in zip(blocks, held, strict=True):
            rows = self.node.blocks.get((self.generation, block_hash))
            assert rows is not None or not there, "the daemon holds a block that nobody published"
            for offset in range(BLOCK_SIZE):
                slot = block * BLOCK_SIZE + offset
                self.tenants[slot] = self.clock, not there
                if there:
                    assert rows is not None
                    for key in KEYS:
                        self.claims[key, slot] = self.clock, rows[offset][key]


class SharingEngine(Engine):
    """An engine whose KV may come from elsewhere: behind its own hits, ``external`` says how many blocks more."""

    def __init__(self, external: Any):
        super().__init__(NUM_BLOCKS, BLOCK_SIZE)
        self.fill: list[NamedBlock] = []
        self._external = external
        self._offered: list[NamedBlock] = []

    def _hit_blocks(self, tokens: list[int]) -> list[int]:
        found = super()._hit_blocks(tokens)
        hashes = [
            hash_of(tokens[: (index + 1) * BLOCK_SIZE]) for index in range(len(found), (len(tokens) - 1) // BLOCK_SIZE)
        ]
        for block in found:  # Not to be taken for what comes from elsewhere.
            self.pool.touch(block)
        count = min(self._external(hashes), len(self.pool.free))
        taken = self.pool.take(count)
        for block in found:
            self.pool.references[block] -= 1
        for block in taken:
            self.pool.references[block] = 0
        self._offered = list(zip(taken, hashes, strict=False))
        return found + taken

    def _scheduled(self, request: EngineRequest, count: int) -> Scheduled:
        if request.how in ("new", "resumed"):
            self.fill += self._offered
            self._offered = []
        return super()._scheduled(request, count)


class Event(NamedTuple):
    """One thing that happens to one of the two replicas; a to c, each 0 to 255, choose among its variants."""

    replica: int
    kind: str
    a: int
    b: int
    c: int


KINDS = ("step",) * 8 + ("arrive",) * 5 + ("preempt", "abort", "lose", "reset", "update", "join", "join")


class Mismatch(AssertionError):
    """The caches disagree; the text holds the calls up to there."""


class Replica:
    """One replica: its engine, its model and its session, which must agree."""

    def __init__(self, name: str, node: Node, real: RealCache, trace: list[str]):
        self.name, self.real, self.trace = name, real, trace
        self.model = SharingReference(node)
        self.engine = SharingEngine(self._offer)
        self.version = 1
        self.greedy = False
        self.filled = self.missing = 0

    def _offer(self, hashes: list[bytes]) -> int:
        """How many blocks a connector may give: those that are held, or, greedily, one more."""
        held = self.held(hashes)
        count = held.index(False) if False in held else len(held)
        return min(len(hashes), count + self.greedy)

    def held(self, hashes: list[bytes]) -> list[bool]:
        """What the daemon holds now, each hash by itself."""
        from stagecache_wire.v1 import stagecache_pb2 as pb

        if not hashes:
            return []
        request = pb.LookupBlocksRequest(hashes=b"".join(hashes), span_blocks=[1] * len(hashes))
        return [bool(count) for count in self.real.cache.session.rpc.lookup_blocks(request, 10.0).hit_blocks]

    # ---- events

    def arrive(self, event: Event) -> None:
        shared = [event.a % 4 * 31 + position for position in range(21 - event.b % 20)]
        self.greedy = event.c % 3 == 0
        self.engine.arrive([*shared, 200 + event.c % 4], decode=event.a // 4 % 5)

    def preempt(self, event: Event) -> None:
        self.engine.preempt(event.a)

    def abort(self, event: Event) -> None:
        self.engine.abort(event.a)

    def reset(self, event: Event) -> None:
        """Rows are lost, the model is the same."""
        self.trace.append(f"{self.name} reset")
        self.model.reset()
        self.real.cache.reset("test", same_model=True)
        self.engine.pool.forget()

    def update(self, event: Event) -> None:
        """Another model; the engine forgets its KV."""
        self.trace.append(f"{self.name} updated")
        self.version += 1 + event.a % 2
        self.model.change_model()
        self.real.cache.reset("test")
        self.engine.pool.forget()

    def join(self, event: Event) -> None:
        """Only where the model is what the namespace is named for."""
        if self.version == 1:
            self.trace.append(f"{self.name} joined")
            self.model.join()
            assert self.real.join().on

    def lose(self, event: Event) -> None:
        """A step that is never saved."""
        self._begin(self.engine.schedule(16, 16))

    def step(self, event: Event) -> None:
        step = self.engine.schedule(16, (16, 16, 5)[event.a % 3])
        full = self._full(step)
        self._begin(step, full)
        outputs = self._outputs(step)
        number = self._both("save", lambda cache: cache.save_outputs(outputs))
        if number is not None:
            self.model.publish(full)
            self.settle()
            ids = [request.req_id for request in step.batch]
            merged = self._both("materialize", lambda cache: cache.materialize(number[cache is not self.model], ids))
            if merged is not None:
                self._check(merged[0], step)
        self.engine.advance(step)

    def end(self) -> None:
        """Every request ends, so that the next sequence begins with none."""
        self._begin(Step((), finished=tuple(self.model.live)))

    # ---- parts of a step

    def settle(self) -> None:
        """The daemon has done all that was logged."""
        session = self.real.cache.session
        session.wait_consumed(session.log.head, 10.0, "the log")

    def _begin(self, step: Step, full: Sequence[NamedBlock] = ()) -> None:
        fill, self.engine.fill = self.engine.fill, []
        self.settle()
        held = self.held([block_hash for _, block_hash in fill])
        self.filled, self.missing = self.filled + sum(held), self.missing + len(held) - sum(held)
        self.trace.append(f"{self.name} {step}; fill {[block for block, _ in fill]} held {held}")
        self.real.say(fill, full)
        # As in the log: what the last step lost, then the fills, then this step's gathers.
        self.model.lose_unsaved()
        self.model.fill(fill, held)
        self._both("begin", lambda cache: cache.new_step_starts(step))

    def _tokens(self, request: Scheduled) -> list[int]:
        return next(running.tokens for running in self.engine.running if running.req_id == request.req_id)

    def _full(self, step: Step) -> list[NamedBlock]:
        return [
            (request.blocks[index], hash_of(self._tokens(request)[: (index + 1) * BLOCK_SIZE]))
            for request in step.batch
            for index in range(request.first // BLOCK_SIZE, (request.first + request.count) // BLOCK_SIZE)
        ]

    def _outputs(self, step: Step) -> Outputs:
        ends = [
            self._tokens(request)[: position + 1]
            for request in step.batch
            for position in range(request.first, request.first + request.count)
        ]
        made = {
            key: Tensor(schema.dtype, schema.row_shape, tuple(row_of(key, self.version, tokens) for tokens in ends))
            for key, schema in KEYS.items()
        }
        return Outputs(made.pop(HIDDEN), made, len(ends), len(ends))

    def _both(self, text: str, call: Any) -> tuple[Any, Any] | None:
        """The same on both. None where both refused."""
        expected, found = _outcome(call, self.model), _outcome(call, self.real)
        if isinstance(expected, Refused) or isinstance(found, Refused):
            if not (isinstance(expected, Refused) and isinstance(found, Refused) and expected.kinds & found.kinds):
                raise Mismatch(self.told(f"{self.name} {text}:\n  expected {expected!r}\n  found    {found!r}"))
            self.trace.append(f"  refused: {found}")
            return None
        if isinstance(expected, dict) and expected != found:
            raise Mismatch(self.told(f"{self.name} {text}:\n  expected {expected}\n  found    {found}"))
        return expected, found

    def _check(self, merged: Merged, step: Step) -> None:
        """What both agree on is right: the rows of these tokens by the model of now, up to the end of the step."""
        for key, by_request in merged.items():
            for req_id, tensor in by_request.items():
                request = next(one for one in step.batch if one.req_id == req_id)
                tokens, end = self._tokens(request), request.first + request.count
                first = end - len(tensor.rows)
                right = tuple(row_of(key, self.version, tokens[: at + 1]) for at in range(first, end))
                if tensor.rows != right:
                    raise Mismatch(self.told(f"{self.name}: {key} of {req_id} shows rows of other tokens"))

    def told(self, text: str) -> str:
        return "\n".join([*self.trace, "", text])


def _outcome(call: Any, cache: Any) -> Any:
    try:
        return call(cache)
    except Refused as error:
        return error


class Pair:
    """Two replicas on one node."""

    def __init__(self, caches: Sequence[SharingCache], node: Node):
        self.trace: list[str] = []
        self.replicas = [Replica(name, node, real, self.trace) for name, real in zip("AB", caches, strict=True)]

    def run(self, events: Sequence[Event]) -> None:
        """
        Raises:
            Mismatch: the first disagreement.
        """
        try:
            for event in events:
                replica = self.replicas[event.replica]
                getattr(replica, event.kind)(event)
        except Mismatch:
            raise
        except Exception as error:
            raise Mismatch(self.replicas[0].told(f"{type(error).__name__}: {error}\n{list(events)}")) from error


class SharingCache(RealCache):
    """A session that has joined; what the scheduler says of blocks goes on the next scheduler output."""

    def __init__(self, socket: str, stage: str):
        super().__init__(RULES, socket, num_blocks=NUM_BLOCKS, stage=stage)
        self._said: tuple[Sequence[NamedBlock], Sequence[NamedBlock]] = (), ()

    def join(self) -> Any:
        from stagecache.sharing import Namespace

        return self.cache.join_namespace(Namespace("version 1", "sha256", "seed", "float32"))

    def say(self, fill: Sequence[NamedBlock], full: Sequence[NamedBlock]) -> None:
        self._said = fill, full

    def new_step_starts(self, step: Step) -> None:
        of = self.outputs.of

        def with_blocks(step: Step) -> SimpleNamespace:
            output = of(step)
            fill, full = self._said
            output.stagecache_fill, output.stagecache_published = list(fill), {"all": list(full)}
            return output

        self.outputs.of = with_blocks  # type: ignore[method-assign]
        try:
            super().new_step_starts(step)
        finally:
            self.outputs.of = of  # type: ignore[method-assign]
