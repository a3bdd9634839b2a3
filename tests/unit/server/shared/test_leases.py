from collections.abc import Iterator

import pytest

from stagecached.shared import leases as leases_module
from stagecached.shared.layout import B_HELD, MAX_OWNERS, S_OWNERS, block_word
from stagecached.shared.leases import LeaseBook, TooManyLeasesError
from stagecached.shared.rebuild import rebuild
from stagecached.shared.segment import SharedSegment
from stagecached.shared.store import NamespaceStore, PublishOutcome
from tests.unit.server.shared.kit import Member, digests, new_segment, publish, stored

A, B = "00000000000000aa", "ffffffffffffffff"


class World:
    def __init__(self, store: NamespaceStore) -> None:
        self.store, self.member, self.leases = store, Member(store), LeaseBook(store)

    def acquire(self, owner: str, request: str, *numbers: int) -> int:
        return self.leases.acquire(owner, request, digests(*numbers), self.member.generation)

    def again(self) -> "World":
        """As the next daemon finds it."""
        store = NamespaceStore(SharedSegment.open(self.store.segment.name, self.store.geometry))
        rebuild(store)
        world = World(store)
        world.leases.recover()
        return world

    def noted(self) -> list[int]:
        """The words that a next daemon would see: bits of every block."""
        words = self.store.segment.words
        return [words[block_word(block_id) + B_HELD] for block_id in range(self.store.geometry.num_blocks)]


@pytest.fixture
def world() -> Iterator[World]:
    with new_segment(4) as segment:
        world = World(NamespaceStore(segment))
        for number in range(4):
            publish(world.member, number)
        yield world


def test_a_lease_holds_the_stored_prefix_and_no_more(world: World) -> None:
    assert world.acquire(A, "r", 0, 1, 9, 2) == 2
    assert world.acquire(A, "none", 9) == 0
    assert len(world.leases) == 1
    assert publish(world.member, 10) is publish(world.member, 11) is PublishOutcome.STORED
    assert publish(world.member, 12) is PublishOutcome.STORED
    assert stored(world.member, [0, 1, 2, 3]) == [True, True, False, False]


def test_a_repeated_acquire_replaces_the_span(world: World) -> None:
    world.acquire(A, "r", 0, 1)
    assert world.acquire(A, "r", 1, 2) == 2
    assert [bool(bits) for bits in world.noted()] == [False, True, True, False]
    assert world.acquire(A, "r", 9) == 0
    assert not any(world.noted())
    assert world.leases.owners() == []


def test_a_block_stays_held_until_its_last_lease_ends(world: World) -> None:
    for owner, request in ((A, "r1"), (A, "r2"), (B, "r1")):
        world.acquire(owner, request, 0)
    assert world.leases.release(A, "r1")
    assert not world.leases.release(A, "r1")
    assert world.noted()[0].bit_count() == 2
    assert world.leases.release_owner(A) == 1
    assert world.noted()[0].bit_count() == 1
    assert world.leases.release_owner(B) == 1
    assert not any(world.noted())
    assert len(world.leases) == 0


def test_the_tail_of_a_released_span_is_evicted_first(world: World) -> None:
    world.acquire(A, "r", 0, 1, 2, 3)
    world.leases.release(A, "r")
    publish(world.member, 10)
    assert stored(world.member, [0, 1, 2, 3]) == [True, True, True, False]


def test_a_next_daemon_holds_what_was_held_until_it_is_claimed_again(world: World) -> None:
    world.acquire(A, "r1", 0, 1)
    world.acquire(A, "r2", 1, 2)
    world.acquire(B, "r1", 3)
    again = world.again()
    assert sorted(again.leases.owners()) == [A, B]
    assert publish(again.member, 10) is PublishOutcome.NO_ROOM
    assert again.acquire(A, "r2", 1, 2) == 2  # one claim does not end what else was held
    assert again.store.counts()["held"] == 4
    assert again.leases.release_owner(A, keep=["r2"]) == 1
    assert again.store.counts()["held"] == 3
    assert again.leases.release_owner(B) == 1
    assert [bool(bits) for bits in again.noted()] == [False, True, True, False]


def test_leases_survive_a_second_daemon_too(world: World) -> None:
    world.acquire(A, "r", 0)
    assert world.again().again().store.counts()["held"] == 1


def test_more_owners_or_leases_than_there_is_room_for_are_refused(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(MAX_OWNERS):
        assert world.acquire(f"{number + 1:016x}", "r", 0) == 1
    with pytest.raises(TooManyLeasesError, match="64 clients"):
        world.acquire(B, "r", 0)
    monkeypatch.setattr(leases_module, "MAX_LEASES", 2)
    world.acquire(f"{1:016x}", "r2", 0)
    with pytest.raises(TooManyLeasesError, match="2 leases"):
        world.acquire(f"{1:016x}", "r3", 0)
    assert world.acquire(f"{1:016x}", "r2", 0, 1) == 2
    world.leases.release_owner(f"{1:016x}")
    assert world.acquire(B, "r", 0) == 1


def test_a_lease_on_content_that_a_reset_dropped_ends_with_its_memory_free(world: World) -> None:
    world.acquire(A, "r", 0, 1)
    world.member.reset()
    assert world.store.counts() == {"held": 2, "cached": 0, "free": 2}
    assert world.again().leases.owners() == []
    world.leases.release(A, "r")
    assert world.store.counts() == {"held": 0, "cached": 0, "free": 4}
    assert not any(world.noted())
    assert world.store.segment.words[S_OWNERS] == 0
