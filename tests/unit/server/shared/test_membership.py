from collections.abc import Iterator

import pytest

from stagecached.shared.store import NamespaceStore, PublishOutcome
from tests.unit.server.shared.kit import Member, digest, holds, new_segment, publish, stored, write


@pytest.fixture
def store() -> Iterator[NamespaceStore]:
    with new_segment(4) as segment:
        yield NamespaceStore(segment)


def test_what_one_member_published_another_reads(store: NamespaceStore) -> None:
    first, second = Member(store), Member(store)
    assert publish(first, 1) is PublishOutcome.STORED
    assert stored(second, [1, 2]) == [True, False]
    assert store.figures.filled == 1


def test_the_first_copy_of_a_content_is_kept(store: NamespaceStore) -> None:
    first, second = Member(store), Member(store)
    publish(first, 1)
    copies: list[object] = []
    assert second.publish(digest(1), lambda shared: bool(copies.append(shared))) is PublishOutcome.KNOWN
    assert not copies
    assert store.counts() == {"held": 0, "cached": 1, "free": 3}


def test_the_least_recently_used_block_goes_first_and_a_read_is_a_use(store: NamespaceStore) -> None:
    member = Member(store)
    for number in range(4):
        publish(member, number)
    assert stored(member, [0]) == [True]
    publish(member, 4)
    assert stored(member, range(5)) == [True, False, True, True, True]
    assert store.figures.evictions["capacity"] == 1


def test_a_block_that_is_read_is_never_evicted(store: NamespaceStore) -> None:
    member = Member(store)
    for number in range(4):
        publish(member, number)
    with member.rows([digest(number) for number in range(4)]) as found:
        assert publish(member, 4) is PublishOutcome.NO_ROOM
        assert all(holds(digest(number), rows) for number, rows in enumerate(found))
    assert publish(member, 4) is PublishOutcome.STORED


def test_a_copy_that_fails_leaves_a_free_block(store: NamespaceStore) -> None:
    member = Member(store)

    def breaks(shared: object) -> bool:
        raise OSError("no rows")

    with pytest.raises(OSError, match="no rows"):
        member.publish(digest(1), breaks)
    assert member.publish(digest(1), lambda shared: False) is PublishOutcome.CHANGED
    assert store.counts() == {"held": 0, "cached": 0, "free": 4}
    assert publish(member, 1) is PublishOutcome.STORED


def test_content_that_is_being_copied_is_known_and_not_yet_read(store: NamespaceStore) -> None:
    first, second = Member(store), Member(store)

    def meanwhile(shared: object) -> bool:
        assert publish(second, 1) is PublishOutcome.KNOWN
        assert stored(second, [1]) == [False]
        return write(digest(1), shared)  # type: ignore[arg-type]

    assert first.publish(digest(1), meanwhile) is PublishOutcome.STORED


def test_a_session_that_was_reset_reads_nothing_from_before_and_nobody_reads_its_rows(store: NamespaceStore) -> None:
    """R5"""
    reset, other = Member(store), Member(store)
    publish(other, 1)
    reset.reset()
    assert stored(reset, [1]) == [False]
    assert publish(reset, 1) is PublishOutcome.STORED
    publish(reset, 2)
    assert stored(other, [1, 2]) == [True, False]
    assert stored(reset, [1, 2]) == [True, True]


def test_resets_of_two_sessions_do_not_bring_them_together(store: NamespaceStore) -> None:
    """R5: one was reset for a new model, the other twice for something else; who knows?"""
    first, second = Member(store), Member(store)
    first.reset()
    first.reset()
    second.reset()
    publish(first, 1)
    assert stored(second, [1]) == [False]


def test_who_joins_after_a_reset_finds_nothing_from_before_it(store: NamespaceStore) -> None:
    """R5"""
    first = Member(store)
    publish(first, 1)
    first.reset()
    late = Member(store)
    assert stored(late, [1]) == [False]
    assert publish(late, 1) is PublishOutcome.STORED
    assert stored(Member(store), [1]) == [True]


def test_a_reset_that_is_done_twice_is_a_reset(store: NamespaceStore) -> None:
    """A record is done again where the daemon was killed before it was counted as done."""
    first, second = Member(store), Member(store)
    publish(second, 1)
    first.reset()
    again = Member(store, first.noted[-1])
    again.reset()
    assert stored(again, [1]) == [False]
    assert stored(second, [1]) == [True]


def test_blocks_of_a_generation_that_nobody_can_reach_are_dropped(store: NamespaceStore) -> None:
    first = Member(store)
    publish(first, 1)
    first.reset()
    assert store.counts() == {"held": 0, "cached": 0, "free": 4}
    assert store.figures.evictions["reset"] == 1
    publish(first, 2)
    first.end()
    assert store.counts()["cached"] == 0


def test_a_block_that_is_read_while_a_reset_drops_it_stays_whole(store: NamespaceStore) -> None:
    member = Member(store)
    publish(member, 1)
    with member.rows([digest(1)]) as (rows,):
        member.reset()
        for number in range(2, 5):
            assert publish(member, number) is PublishOutcome.STORED
        assert publish(member, 5) is PublishOutcome.STORED  # evicts 2, not the block that is read
        assert holds(digest(1), rows)
        assert store.counts() == {"held": 1, "cached": 3, "free": 0}
    assert store.counts() == {"held": 0, "cached": 3, "free": 1}


def test_a_reset_while_rows_are_copied_keeps_nothing_of_them(store: NamespaceStore) -> None:
    member = Member(store)

    def reset_meanwhile(shared: object) -> bool:
        member.reset()
        return write(digest(1), shared)  # type: ignore[arg-type]

    assert member.publish(digest(1), reset_meanwhile) is PublishOutcome.CHANGED
    assert stored(member, [1]) == [False]
    assert store.counts()["free"] == 4


def test_an_ended_member_publishes_and_reads_nothing(store: NamespaceStore) -> None:
    member, other = Member(store), Member(store)
    publish(member, 1)
    member.end()
    member.end()
    assert publish(member, 2) is PublishOutcome.NOT_JOINED
    assert stored(member, [1]) == [False]
    assert stored(other, [1]) == [True]
