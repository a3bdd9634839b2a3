"""A consumer may die at any point of any record and do it again: afterwards every shared byte is as if it had not.

Simulated in one process, so that every point of every kind of record has its turn; tests/crash kills real daemons.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from random import Random

from stagecache_wire.geometry import KeySchema
from stagecache_wire.presence import Presence, presence_of
from stagecache_wire.records import KeyMode, Kind, Record, key_words
from stagecached.consumer import Consumer
from stagecached.segments import SessionSegments
from tests.unit.server.session_kit import (
    GEOMETRY,
    KEYS,
    Log,
    consumer_of,
    fill_page,
    flush,
    hit,
    new_session,
    runs,
    save,
    session_names,
    slots,
    snapshot,
)
from tests.unit.server.sharing_kit import namespace

ROWS, CLAIM, FAILED = KeyMode.ROWS, KeyMode.CLAIM, KeyMode.FAILED

A, B, C = (bytes([number]) * 32 for number in (1, 2, 3))
SHARED_KEY = KEYS[0]

POINTS_AFTER_CONSUMED = 2
"""Of each record: past them it is not done again."""


class DeathError(BaseException):
    """Stands for SIGKILL: nothing between here and the test may catch it."""


def script() -> list[Callable[[SessionSegments], Record]]:
    """Records of every kind; pages are filled before they are named."""

    def filled(page: int, salt: int, record: Record) -> Callable[[SessionSegments], Record]:
        def make(segments: SessionSegments) -> Record:
            fill_page(segments, page, salt)
            return record

        return make

    def plain(record: Record) -> Callable[[SessionSegments], Record]:
        return lambda _: record

    behind = save(1, runs((12, 4)), (0, ROWS))
    found = hit(runs((10, 5)), (0, 4, 4096))
    behind.spans, behind.span_runs, behind.gathers = found.spans, found.span_runs, found.gathers
    return [
        filled(0, 1, save(0, runs((0, 8)), (0, ROWS), (1, ROWS), (2, CLAIM))),
        filled(1, 2, save(1, slots(9, 10, 11), (0, ROWS), (2, CLAIM))),
        filled(0, 3, flush(0, slots(0, 1, 9), [1, 1, 2])),
        plain(hit(runs((0, 6), (9, 2)), (0, 1, 0), (1, 2, 512), (2, 3, 1024))),
        filled(1, 4, save(1, runs((2, 4)), (0, ROWS), (1, FAILED))),
        plain(flush(0, slots(10, 3), [2, 1], kind=Kind.FAIL)),
        plain(Record(0, Kind.LOST, rows=3, runs=runs((0, 1), (6, 2)))),
        plain(Record.of_blocks(Kind.PUBLISH, [(0, A), (2, B)])),
        filled(0, 5, behind),
        plain(Record.of_blocks(Kind.PUBLISH, [(3, B), (4, C)])),
        plain(Record.of_blocks(Kind.FILL, [(4, B), (6, C), (1, B)])),
        plain(hit(runs((16, 4)), (0, 7, 8192))),
        plain(hit(runs((0, 8)), (0, 1, 2048), (2, 2, 3072))),
        plain(Record(0, Kind.CLOSE_KEY, keys=key_words((1, ROWS)))),
        plain(Record.of_blocks(Kind.PUBLISH, [(4, A)])),
        plain(Record(0, Kind.RESET, rows=1)),
        plain(Record.of_blocks(Kind.FILL, [(5, A)])),
        filled(1, 6, save(1, slots(1, 5), (0, ROWS), (2, ROWS))),
        plain(hit(runs((0, 3), (5, 1)), (0, 5, 5000), (2, 6, 6000))),
    ]


@contextmanager
def mortal_run(deaths: list[tuple[int, int]], *, once: bool = True) -> Iterator[tuple[dict[str, bytes], list[int]]]:
    """Work the script off. The consumer dies at each (record, visit of a point in it) of ``deaths``, in order, and a
    new one adopts the segments. Yields what is in shared memory at the end, and how many points each record has.

    once: every death must come. A record that is done again may have fewer points: a block is kept already.
    """
    visits: list[int] = []
    left = list(deaths)

    class Mortal(Consumer):
        def _point(self, name: str) -> None:
            visits[-1] += 1
            if left and left[0] == (len(visits) - 1, visits[-1]):
                left.pop(0)
                raise DeathError(name)

    with session_names() as names, namespace([SHARED_KEY]) as kept:
        segments = SessionSegments.create(names, GEOMETRY, 1)
        for key_id, schema in KEYS.items():
            segments.open_key(key_id, schema)
        log = Log(segments)
        generation: int | None = None
        try:
            for make in script():
                log._segments = segments
                log.append(make(segments))
                visits.append(0)
                while segments.consumed < segments.head:
                    consumer, told = consumer_of(segments, Mortal)
                    if segments.shared is None:
                        kept.join(segments, generation)
                    try:
                        consumer._drain()
                    except DeathError:
                        visits[-1] = 0
                        assert segments.shared is not None
                        generation = segments.shared.generation
                        segments = SessionSegments.adopt(names, GEOMETRY, open_keys(segments), 2)
                    assert told == []
                while not once and left and left[0][0] < len(visits):
                    left.pop(0)
            assert not left, f"no such points: {left}"
            shared = segments.shared or kept.join(segments, generation)
            rows = {name.hex(): kept.rows(shared, name, SHARED_KEY) or b"" for name in (A, B, C)}
            yield {**snapshot(segments), **rows}, visits
        finally:
            segments.unlink()


def open_keys(segments: SessionSegments) -> dict[int, KeySchema]:
    return {key_id: store.schema for key_id, store in segments.keys.items()}


def test_a_consumer_that_dies_at_any_point_of_any_record_leaves_no_trace() -> None:
    """The shared bytes after a death and the record done again are those of a run without: at every point."""
    with mortal_run([]) as (expected, points):
        assert sum(points) > 80
    for record, count in enumerate(points):
        for visit in range(1, count + 1):
            with mortal_run([(record, visit)]) as (found, _):
                assert found == expected, f"died at point {visit} of record {record}"


def test_a_block_whose_hash_goes_between_a_death_and_the_redo_is_whole_or_unknown() -> None:
    """A FILL that was done stays done; one that was cut short and cannot be done again makes its slots UNKNOWN."""
    seen = set()
    for visit in range(1, 8):
        with new_session() as segments, namespace([SHARED_KEY]) as kept:
            kept.join(segments)
            log = Log(segments)
            fill_page(segments, 0, 1)
            for record in (save(0, runs((0, 4)), (0, ROWS)), Record.of_blocks(Kind.PUBLISH, [(0, A)])):
                log.append(record)
            consumer_of(segments)[0]._drain()
            filled = log.append(Record.of_blocks(Kind.FILL, [(2, A)]))
            left = [visit]

            class Mortal(Consumer):
                def _point(self, name: str, left: list[int] = left) -> None:
                    left[0] -= 1
                    if left[0] == 0:
                        raise DeathError(name)

            with suppress(DeathError):
                consumer_of(segments, Mortal)[0]._drain()
            died = segments.consumed < filled
            kept.evict_all()
            again, told = consumer_of(segments)
            again._drain()
            assert told == []
            claims = segments.keys[0].claims
            state = {
                Presence(presence_of(int(segments.slot_words[slot]), int(claims[slot]), 0)).name
                for slot in range(8, 12)
            }
            pool = bytes(segments.keys[0].segments()[1].map)
            assert state == {"UNKNOWN"} or (state == {"PRESENT"} and pool[64:96] == pool[:32])
            assert died or state == {"PRESENT"}
            seen |= state
    assert seen == {"PRESENT", "UNKNOWN"}


def test_a_consumer_that_dies_again_and_again_leaves_no_trace() -> None:
    with mortal_run([]) as (expected, points):
        pass
    rng = Random(4)
    for _ in range(40):
        record = rng.randrange(len(points))
        deaths = [(record, rng.randint(1, points[record] - POINTS_AFTER_CONSUMED)) for _ in range(3)]
        later = rng.randrange(record, len(points))
        if later > record:
            deaths.append((later, rng.randint(1, points[later])))
        with mortal_run(deaths, once=False) as (found, _):
            assert found == expected, f"died at {deaths}"


def test_the_comparison_would_see_a_record_that_is_done_twice_wrongly() -> None:
    """The control: a death after which a record is skipped is seen."""
    with mortal_run([]) as (expected, _):
        pass

    class Skips(Consumer):
        def _do(self, record: Record) -> None:
            if record.kind is not Kind.FLUSH:
                super()._do(record)

    with new_session() as segments:
        log = Log(segments)
        consumer, _ = consumer_of(segments, Skips)
        for make in script():
            log.append(make(segments))
            consumer._drain()
        assert snapshot(segments) != expected
