"""The store against a model of it: a list of contents in order of use, and who holds what."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from stagecache_wire.v1 import stagecache_pb2 as pb
from stagecached.shared.leases import LeaseBook
from stagecached.shared.rebuild import rebuild
from stagecached.shared.segment import SharedSegment
from stagecached.shared.store import NamespaceStore, PublishOutcome
from tests.unit.server.shared.kit import Member, digest, digests, new_segment, publish, stored, write

BLOCKS = 3
CONTENTS = 6
OWNER = "00000000000000aa"
NUMBERS = st.lists(st.integers(0, CONTENTS - 1), min_size=1, max_size=3, unique=True)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("publish"), st.integers(0, CONTENTS - 1)),
        st.tuples(st.just("read"), NUMBERS),
        st.tuples(st.just("look"), NUMBERS),
        st.tuples(st.just("acquire"), st.integers(0, 1), NUMBERS),
        st.tuples(st.just("release"), st.integers(0, 1)),
        st.tuples(st.just("restart")),
    ),
    max_size=25,
)


class Model:
    """order: contents that nobody holds, next evicted first. leases: request to the contents that it holds."""

    def __init__(self) -> None:
        self.order: list[int] = []
        self.leases: dict[int, list[int]] = {}

    @property
    def held(self) -> set[int]:
        return {number for span in self.leases.values() for number in span}

    @property
    def there(self) -> set[int]:
        return {*self.order, *self.held}

    def use(self, numbers: list[int]) -> None:
        """In the order of eviction."""
        for number in numbers:
            if number in self.order:
                self.order.remove(number)
                self.order.append(number)

    def publish(self, number: int) -> PublishOutcome:
        if number in self.there:
            self.use([number])
            return PublishOutcome.KNOWN
        if len(self.there) == BLOCKS:
            if not self.order:
                return PublishOutcome.NO_ROOM
            self.order.pop(0)
        self.order.append(number)
        return PublishOutcome.STORED

    def prefix(self, numbers: list[int]) -> list[int]:
        missing = next((at for at, number in enumerate(numbers) if number not in self.there), len(numbers))
        return numbers[:missing]

    def acquire(self, request: int, numbers: list[int]) -> int:
        span = self.prefix(numbers)
        self.order = [number for number in self.order if number not in span]
        before = self.leases.pop(request, [])
        if span:
            self.leases[request] = span
        self._free(before)
        return len(span)

    def release(self, request: int) -> bool:
        before = self.leases.pop(request, [])
        self._free(before)
        return bool(before)

    def _free(self, span: list[int]) -> None:
        self.order += [number for number in reversed(span) if number not in self.held]


@given(STEPS)
def test_the_store_does_what_its_model_does(steps: list[tuple[object, ...]]) -> None:
    model = Model()
    with new_segment(BLOCKS) as segment:
        store = NamespaceStore(segment)
        member, leases = Member(store), LeaseBook(store)
        for step in steps:
            what, *rest = step
            if what == "publish":
                assert publish(member, rest[0]) is model.publish(rest[0])  # type: ignore[arg-type]
            elif what == "read":
                numbers: list[int] = rest[0]  # type: ignore[assignment]
                assert stored(member, numbers) == [number in model.there for number in numbers]
                model.use([number for number in reversed(numbers) if number in model.there])
            elif what == "look":
                numbers = rest[0]  # type: ignore[assignment]
                assert store.look(digests(*numbers), member.generation).blocks == len(model.prefix(numbers))
            elif what == "acquire":
                request, numbers = rest  # type: ignore[assignment]
                held = leases.acquire(OWNER, str(request), digests(*numbers), member.generation)
                assert held == model.acquire(request, numbers)  # type: ignore[arg-type]
            elif what == "release":
                assert leases.release(OWNER, str(rest[0])) == model.release(rest[0])  # type: ignore[arg-type]
            else:  # a new daemon on the segment, which then claims its leases again
                store = NamespaceStore(SharedSegment.open(segment.name, segment.geometry))
                rebuild(store)
                member, leases = Member(store), LeaseBook(store)
                leases.recover()
                assert {number for number in range(CONTENTS) if store.pool.get_cached_block(key(member, number))} == (
                    model.there
                )
                for request, span in model.leases.items():
                    assert leases.acquire(OWNER, str(request), digests(*span), member.generation) == len(span)
                leases.release_owner(OWNER, keep=list(map(str, model.leases)))
            order = [block.block_hash for block in store.pool.queue if block.block_hash is not None]
            assert order == [key(member, number) for number in model.order]
            assert store.counts()["held"] == len(model.held)


def key(member: Member, number: int) -> bytes:
    return digest(number) + member.generation.to_bytes(8, "little")


def test_a_lookup_says_why_a_prefix_ends() -> None:
    with new_segment(1) as segment:
        store = NamespaceStore(segment)
        member, other = Member(store), Member(store)

        def end(who: Member, *numbers: int) -> tuple[pb.BlockState, pb.PrefixEnd]:
            found = store.look(digests(*numbers), who.generation)
            return found.state, found.end

        def copy(shared: object) -> bool:
            assert end(other, 1) == (pb.BLOCK_STATE_PENDING, pb.PREFIX_END_BEING_COPIED)
            return write(digest(1), shared)  # type: ignore[arg-type]

        assert end(member, 1) == (pb.BLOCK_STATE_MISS, pb.PREFIX_END_NOT_STORED)
        member.publish(digest(1), copy)
        assert end(member, 1) == (pb.BLOCK_STATE_HIT, pb.PREFIX_END_WHOLE)
        member.reset()
        assert end(member, 1) == (pb.BLOCK_STATE_MISS, pb.PREFIX_END_RESET)
        assert end(other, 1) == (pb.BLOCK_STATE_HIT, pb.PREFIX_END_WHOLE)
        publish(member, 2)
        assert end(other, 1) == (pb.BLOCK_STATE_MISS, pb.PREFIX_END_EVICTED)
