"""Consumers of several sessions and the event loop at one store: rows are right whoever interrupts whom."""

import random
import sys
import threading
from contextlib import contextmanager

from stagecached.shared.leases import LeaseBook
from stagecached.shared.store import NamespaceStore, PublishOutcome
from tests.unit.server.shared.kit import Member, digest, digests, holds, new_segment, publish, stored, write

CONTENTS = 24
BLOCKS = 8
TURNS = 400
OWNER = "00000000000000aa"


def worked(store: NamespaceStore, seed: int, faults: list[str]) -> None:
    """Publish, read, reset and leave at random."""
    rng = random.Random(seed)
    member = Member(store)
    try:
        for turn in range(TURNS):
            numbers = rng.sample(range(CONTENTS), 3)
            what = rng.random()
            if what < 0.5:
                publish(member, numbers[0])
            elif what < 0.95:
                stored(member, numbers)  # raises where a row is wrong
            elif turn % 7 == 0:
                member.reset()
            else:
                member.end()
                member = Member(store)
    except BaseException as error:
        faults.append(f"{seed}: {error!r}")


def test_rows_are_right_under_any_interleaving() -> None:
    faults: list[str] = []
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with new_segment(BLOCKS) as segment:
            store = NamespaceStore(segment)
            book = LeaseBook(store)
            threads = [threading.Thread(target=worked, args=(store, seed, faults)) for seed in range(3)]
            for thread in threads:
                thread.start()
            rng = random.Random(99)
            while any(thread.is_alive() for thread in threads):
                store.look(digests(*rng.sample(range(CONTENTS), 4)), store.base_generation)
                book.acquire(OWNER, f"r{rng.randrange(3)}", digests(rng.randrange(CONTENTS)), store.base_generation)
                if rng.random() < 0.2:
                    book.release_owner(OWNER)
                assert sum(store.counts().values()) == BLOCKS
            for thread in threads:
                thread.join()
            book.release_owner(OWNER)
            assert not faults
            assert store.counts()["held"] == 0
            assert len(list(store.pool.queue)) == BLOCKS
    finally:
        sys.setswitchinterval(interval)


def test_no_copy_is_made_under_the_lock() -> None:
    """A slow copy of one session holds nobody up."""
    with new_segment(4) as segment:
        store = NamespaceStore(segment)
        slow, quick = Member(store), Member(store)

        def copy(shared: object) -> bool:
            assert not store.lock.locked()
            assert publish(quick, 2) is PublishOutcome.STORED
            return write(digest(1), shared)  # type: ignore[arg-type]

        assert slow.publish(digest(1), copy) is PublishOutcome.STORED


class PinlessStore(NamespaceStore):
    """Rows are handed out without a reference: a control of the test above."""

    def pinned(self, block_hashes, generation):  # type: ignore[no-untyped-def, override]
        @contextmanager
        def unpinned():  # type: ignore[no-untyped-def]
            with NamespaceStore.pinned(self, block_hashes, generation) as found:
                pass
            yield found

        return unpinned()


def test_a_reader_without_a_pin_is_caught() -> None:
    with new_segment(1) as segment:
        member = Member(PinlessStore(segment))
        publish(member, 1)
        with member.rows([digest(1)]) as (rows,):
            assert publish(member, 2) is PublishOutcome.STORED
            assert not holds(digest(1), rows)
