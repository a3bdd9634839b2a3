"""A store of shared blocks that dies between two shared stores, and what the next daemon makes of its segment.

A script of operations runs in a fork, which is killed at a named point; the parent opens the segment as a starting
daemon does and holds what it finds against the same script run without a death:

    what is found           lies between the states before and behind the operation that was cut short
    every row that is read  is of the hash that it is read under, all keys
    the order of eviction   is that of one of the two states
    what an owner holds     likewise lies between
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from stagecached.shared.leases import LeaseBook
from stagecached.shared.rebuild import rebuild
from stagecached.shared.segment import SharedRows, SharedSegment
from stagecached.shared.store import NamespaceStore
from tests.unit.server.shared.kit import (
    BLOCK_SIZE,
    KEY_IDS,
    KEYS,
    Member,
    digest,
    digests,
    holds,
    publish,
    rows_of,
    stored,
    write,
)

NUM_BLOCKS = 4
FIRST, SECOND = "00000000000000a1", "00000000000000b2"

Report = Callable[[str], None]


class World:
    """A store with two members and leases, as one daemon has them."""

    def __init__(self, store: NamespaceStore, generations: dict[str, int], reached: Report | None = None) -> None:
        """generations: of the members by name, kept by the caller as control segments would keep them."""
        self.store = store
        self.leases = LeaseBook(store)
        self._reached = reached
        self.members = {
            name: _Noted(store, generations, name, generations.get(name, store.base_generation)) for name in "ab"
        }
        if reached is not None:
            store.point = reached  # type: ignore[method-assign]

    def publish(self, name: str, number: int) -> None:
        """As a copy of several shared stores, with a point in the middle of a key and one between keys."""

        def torn(shared: SharedRows) -> bool:
            if self._reached is None:
                return write(digest(number), shared)
            for key_id, at in KEY_IDS.items():
                raw, rows = shared.by_key[key_id].view("u1").reshape(BLOCK_SIZE, -1), rows_of(digest(number), KEYS[at])
                raw[:1] = rows[:1]
                self._reached("inside_rows")
                raw[:] = rows
            return True

        self.members[name].publish(digest(number), torn)

    def acquire(self, owner: str, name: str, request: str, *numbers: int) -> None:
        self.leases.acquire(owner, request, digests(*numbers), self.members[name].generation)


class _Noted(Member):
    def __init__(self, store: NamespaceStore, generations: dict[str, int], name: str, generation: int) -> None:
        self._generations, self._name = generations, name
        super().__init__(store, generation)
        self._note_generation = self._write_down
        self._write_down(generation)

    def _write_down(self, generation: int) -> None:
        self._generations[self._name] = generation


Step = Callable[[World], object]
SCRIPT: tuple[Step, ...] = (
    *(lambda w, n=n: w.publish("a", n) for n in range(4)),  # the store is full
    lambda w: w.publish("b", 1),  # known: a use
    lambda w: w.acquire(FIRST, "a", "r1", 2, 3),
    lambda w: w.publish("b", 4),  # evicts 0
    lambda w: w.acquire(SECOND, "b", "r2", 2),
    lambda w: w.publish("a", 5),  # evicts 1
    lambda w: w.publish("a", 6),  # evicts 4: the leased ones stay
    lambda w: w.acquire(FIRST, "a", "r1", 2),
    lambda w: w.leases.release(SECOND, "r2"),
    lambda w: stored(w.members["b"], [5]),  # a use
    lambda w: w.members["b"].reset(),
    lambda w: w.publish("b", 7),
    lambda w: w.leases.release_owner(FIRST),
    lambda w: w.members["a"].reset(),  # nobody reaches the first generation any more
    lambda w: w.publish("a", 2),
    lambda w: w.publish("b", 8),
    lambda w: w.members["b"].reset(),
    lambda w: w.publish("b", 9),
)


@dataclass(frozen=True)
class State:
    """order: (member that reaches it, hash), next evicted first, held ones behind. held: (owner, hash)."""

    order: tuple[tuple[str, bytes], ...]
    held: frozenset[tuple[str, bytes]]

    @property
    def content(self) -> frozenset[tuple[str, bytes]]:
        return frozenset(self.order)


def state_of(world: World) -> State:
    """Every row that anybody may read is read and held against its hash."""
    store = world.store
    names: dict[int, str] = {}
    for name, member in world.members.items():
        names[member.generation] = names.get(member.generation, "") + name
    queue = list(store.pool.queue)
    blocks = [*queue, *(block for block in store.pool.blocks if block.ref_cnt)]
    order = []
    for block in blocks:
        if block.block_hash is None:
            continue
        block_hash, generation = block.block_hash[:32], int.from_bytes(block.block_hash[32:], "little")
        if generation not in names:
            continue
        rows = SharedRows({key_id: store.segment.regions[at][block.block_id] for key_id, at in KEY_IDS.items()})  # type: ignore[arg-type]
        assert holds(block_hash, rows), f"block {block.block_id} holds other rows than its hash says"
        order.append((names[generation], block_hash))
    held = frozenset(
        (owner, block.block_hash[:32])
        for owner in (FIRST, SECOND)
        if (entry := world.leases._owners.get(owner)) is not None
        for block in entry.held
        if block.block_hash is not None
    )
    return State(tuple(order), held)


def undisturbed(segment: SharedSegment) -> tuple[list[State], Counter[str]]:
    """The states before each step and behind the last one, and how often each point was reached."""
    visits: Counter[str] = Counter()
    world = World(NamespaceStore(segment), {}, lambda name: visits.update((name,)))
    states = [state_of(world)]
    for step in SCRIPT:
        step(world)
        states.append(state_of(world))
    return states, visits


def run_until_killed(
    segment: SharedSegment, kind: type[NamespaceStore], point: str, visit: int
) -> tuple[int, dict[str, int]]:
    """Run the script in a fork that dies at the ``visit``-th ``point``. The step in work, and the noted generations."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        with suppress(BaseException):
            os.close(read_end)
            _die_in_script(segment, kind, point, visit, write_end)
        os._exit(1)
    os.close(write_end)
    with os.fdopen(read_end) as lines:
        told = [line.split() for line in lines]
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status), f"the script did not come to {point} {visit} (status {status})"
    assert os.WTERMSIG(status) == signal.SIGKILL
    generations = {name: int(value) for kind_, name, value in told if kind_ == "generation"}
    return max(int(value) for kind_, _, value in told if kind_ == "step"), generations


def _die_in_script(segment: SharedSegment, kind: type[NamespaceStore], point: str, visit: int, out: int) -> None:
    visits = 0

    def reached(name: str) -> None:
        nonlocal visits
        visits += name == point
        if visits == visit and name == point:
            os.kill(os.getpid(), signal.SIGKILL)

    class Durable(dict[str, int]):
        """Written at once, as a word in a control segment."""

        def __setitem__(self, name: str, generation: int) -> None:
            super().__setitem__(name, generation)
            os.write(out, f"generation {name} {generation}\n".encode())

    world = World(kind(segment), Durable(), reached)
    for index, step in enumerate(SCRIPT):
        os.write(out, f"step - {index}\n".encode())
        step(world)


def check_death(kind: type[NamespaceStore], point: str, visit: int, states: list[State], name: str) -> None:
    """One death, one restart. name: of a segment that this makes and removes.

    Raises:
        AssertionError: what the restarted daemon has is not what it may have.
    """
    from stagecached.shared.layout import SharedGeometry
    from tests.unit.server.shared.kit import DIGEST

    geometry = SharedGeometry(DIGEST, NUM_BLOCKS, BLOCK_SIZE, KEYS)
    segment = SharedSegment.create(name, geometry)
    try:
        index, generations = run_until_killed(segment, kind, point, visit)
        again = SharedSegment.open(name, geometry)
        store = NamespaceStore(again)
        rebuild(store)
        world = World(store, generations)
        world.leases.recover()
        found, before, behind = state_of(world), states[index], states[index + 1]
        for what, low, seen, high in (
            ("content", before.content & behind.content, found.content, before.content | behind.content),
            ("held", before.held & behind.held, found.held, before.held | behind.held),
        ):
            assert _subset(low, seen), f"{what} lost at step {index}"
            assert _subset(seen, high), f"{what} out of nowhere at step {index}"
        held = {block_hash for _, block_hash in found.held}
        free = [one for one in found.order if one[1] not in held]
        assert any(free == [one for one in state.order if one in free] for state in (before, behind)), "order of use"
        for step in SCRIPT[index:]:  # the record is done again, and the rest
            step(world)
        state_of(world)
        assert {store.base_generation, *generations.values()} <= set(range(store.segment.words[65] + 1))
        for member in world.members.values():
            assert publish(member, 100) in (1, 2)
            assert stored(member, [100]) == [True]
    finally:
        segment.unlink()


def _subset(low: frozenset[tuple[str, bytes]], high: frozenset[tuple[str, bytes]]) -> bool:
    """Members' names may have been joined or parted by a reset that was cut short: only hashes are compared then."""
    return {block_hash for _, block_hash in low} <= {block_hash for _, block_hash in high}
