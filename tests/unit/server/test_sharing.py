"""PUBLISH and FILL: what is kept for the node, and what comes back into a pool."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from stagecache_wire import layout
from stagecache_wire.figures import SHARED_BLOCKS, Daemon
from stagecache_wire.geometry import KeySchema
from stagecache_wire.presence import Presence, presence_of
from stagecache_wire.records import SAME_MODEL, KeyMode, Kind, Record, key_words
from stagecached.segments import SessionSegments
from tests.unit.server.session_kit import (
    GEOMETRY,
    HIDDEN,
    LATE,
    WIDE,
    Log,
    consumer_of,
    fill_page,
    flush,
    new_session,
    page_of,
    runs,
    save,
    slots,
)
from tests.unit.server.sharing_kit import Namespace, namespace

ROWS, CLAIM, FAILED = KeyMode.ROWS, KeyMode.CLAIM, KeyMode.FAILED
A, B, C = (bytes([number]) * 32 for number in (1, 2, 3))
TWO_KEYS = (HIDDEN, WIDE)


@pytest.fixture
def one_key() -> Iterator[Namespace]:
    with namespace((HIDDEN,)) as made:
        yield made


@pytest.fixture
def two_keys() -> Iterator[Namespace]:
    with namespace(TWO_KEYS) as made:
        yield made


@pytest.fixture
def here() -> Iterator[SessionSegments]:
    with new_session() as made:
        yield made


@pytest.fixture
def there() -> Iterator[SessionSegments]:
    """Another session, whose key ids are others."""
    with new_session(keys={5: WIDE, 6: LATE, 7: HIDDEN}) as made:
        yield made


def drained(segments: SessionSegments, *records: Record) -> dict[str, int]:
    """Work these off on this thread; what became of the blocks that they name."""
    log = Log(segments)
    log._position = 4096 * segments.head
    for record in records:
        log.append(record)
    first = layout.D_FIGURES + Daemon.SHARED
    before = segments.words[first : first + len(SHARED_BLOCKS)].tolist()
    consumer, told = consumer_of(segments)
    consumer._drain()
    assert told == []
    after = segments.words[first : first + len(SHARED_BLOCKS)].tolist()
    return {name: now - then for name, then, now in zip(SHARED_BLOCKS, before, after, strict=True) if now != then}


def publish(*pairs: tuple[int, bytes]) -> Record:
    return Record.of_blocks(Kind.PUBLISH, pairs)


def fill(*pairs: tuple[int, bytes]) -> Record:
    return Record.of_blocks(Kind.FILL, pairs)


def rows_of(segments: SessionSegments, schema: KeySchema, block: int) -> bytes:
    store = next(store for store in segments.keys.values() if store.schema == schema)
    size = GEOMETRY.block_size * store.row_bytes
    return bytes(store.segments()[1].map[block * size : (block + 1) * size])


def presence(segments: SessionSegments, schema: KeySchema, block: int) -> set[str]:
    store = next(store for store in segments.keys.values() if store.schema == schema)
    size = GEOMETRY.block_size
    return {
        Presence(presence_of(int(segments.slot_words[slot]), int(store.claims[slot]), segments.epoch_sequence)).name
        for slot in range(block * size, (block + 1) * size)
    }


def test_what_one_session_published_another_is_filled_with(
    here: SessionSegments, there: SessionSegments, two_keys: Namespace
) -> None:
    two_keys.join(here)
    two_keys.join(there)
    fill_page(here, 0, salt=1)
    told = drained(here, save(0, runs((0, 8)), (0, ROWS), (1, ROWS)), publish((0, A), (1, B)))
    assert told == {"stored": 2}
    assert drained(there, fill((6, B), (3, A))) == {"filled": 2}
    for schema in TWO_KEYS:
        assert rows_of(there, schema, 3) == rows_of(here, schema, 0)
        assert rows_of(there, schema, 6) == rows_of(here, schema, 1)
        assert rows_of(there, schema, 3) != rows_of(there, schema, 6)
        assert presence(there, schema, 3) == presence(there, schema, 6) == {"PRESENT"}
    assert presence(there, LATE, 3) == {"ABSENT"}


def test_a_filled_block_may_be_published_again(
    here: SessionSegments, there: SessionSegments, two_keys: Namespace
) -> None:
    two_keys.join(here)
    two_keys.join(there)
    fill_page(here, 0, salt=1)
    drained(here, save(0, runs((0, 4)), (0, ROWS), (1, ROWS)), publish((0, A)))
    drained(there, fill((5, A)))
    two_keys.evict_all()
    assert drained(there, publish((5, A))) == {"stored": 1}
    assert drained(here, fill((7, A))) == {"filled": 1}
    assert rows_of(here, HIDDEN, 7) == rows_of(here, HIDDEN, 0)


def test_a_hash_that_is_not_kept_makes_its_slots_unknown(here: SessionSegments, two_keys: Namespace) -> None:
    """Also over an older tenant's rows, which no hit may show."""
    two_keys.join(here)
    fill_page(here, 0, salt=1)
    assert drained(here, save(0, runs((0, 8)), (0, ROWS), (1, ROWS)), fill((1, C))) == {"missing": 1}
    assert presence(here, HIDDEN, 0) == {"PRESENT"}
    assert presence(here, HIDDEN, 1) == presence(here, WIDE, 1) == presence(here, LATE, 1) == {"UNKNOWN"}


def test_without_a_namespace_nothing_is_kept_and_nothing_filled(here: SessionSegments) -> None:
    fill_page(here, 0, salt=1)
    record = save(0, runs((0, 4)), (0, ROWS), (1, ROWS))
    assert drained(here, record, publish((0, A)), fill((2, A))) == {"not_joined": 1, "missing": 1}
    assert presence(here, HIDDEN, 2) == {"UNKNOWN"}


def test_whoever_published_first_stays(here: SessionSegments, there: SessionSegments, one_key: Namespace) -> None:
    one_key.join(here)
    one_key.join(there)
    fill_page(here, 0, salt=1)
    fill_page(there, 0, salt=2)
    drained(here, save(0, runs((0, 4)), (0, ROWS)), publish((0, A)))
    assert drained(there, save(0, runs((0, 4)), (7, ROWS)), publish((0, A))) == {"known": 1}
    drained(there, fill((1, A)))
    assert rows_of(there, HIDDEN, 1) == rows_of(here, HIDDEN, 0) != rows_of(there, HIDDEN, 0)


@pytest.mark.parametrize(
    ("what", "records"),
    [
        ("half a block", [save(0, runs((0, 3)), (0, ROWS), (1, ROWS))]),
        ("a key that was refused", [save(0, runs((0, 4)), (0, ROWS), (1, FAILED))]),
        ("a key not written", [save(0, runs((0, 4)), (0, ROWS))]),
        ("a key whose rows are not in yet", [save(0, runs((0, 4)), (0, ROWS), (1, CLAIM))]),
        ("a key beyond the namespace", [save(0, runs((0, 4)), (0, ROWS), (1, ROWS), (2, ROWS))]),
        ("a key beyond the namespace, in one row", [
            save(0, runs((0, 3)), (0, ROWS), (1, ROWS)), save(1, slots(3), (0, ROWS), (1, ROWS), (2, ROWS)),
        ]),
        ("a key beyond the namespace, to come", [save(0, runs((0, 4)), (0, ROWS), (1, ROWS), (2, CLAIM))]),
        ("a lost step", [
            save(0, runs((0, 4)), (0, ROWS), (1, ROWS)), Record(0, Kind.LOST, rows=1, unit_runs=True, runs=slots(2)),
        ]),
        ("an older epoch", [save(0, runs((0, 4)), (0, ROWS), (1, ROWS)), Record(0, Kind.RESET, rows=1)]),
        ("a key that is closed", [
            save(0, runs((0, 4)), (0, ROWS), (1, ROWS)), Record(0, Kind.CLOSE_KEY, keys=key_words((1, ROWS))),
        ]),
    ],
)  # fmt: skip
def test_only_a_block_whose_every_row_is_there_is_kept(
    here: SessionSegments, two_keys: Namespace, what: str, records: list[Record]
) -> None:
    membership = two_keys.join(here)
    fill_page(here, 0, salt=1)
    fill_page(here, 1, salt=2)
    assert drained(here, *records, publish((0, A))) == {"not_present": 1}, what
    assert two_keys.rows(membership, A, HIDDEN) is None


def test_a_block_of_several_steps_and_a_flush_is_kept_once_it_is_whole(here: SessionSegments) -> None:
    """W3: deferred rows come later; an older tenant's key does not stand in the way."""
    for page in (0, 1):
        fill_page(here, page, salt=page)
    with namespace((HIDDEN, LATE)) as kept:
        membership = kept.join(here)
        told = drained(
            here,
            save(0, runs((0, 4)), (0, ROWS), (1, ROWS)),
            save(0, runs((0, 3)), (0, ROWS), (2, CLAIM)),
            save(1, slots(3), (0, ROWS), (2, CLAIM)),
            publish((0, A)),
            flush(0, slots(0, 1, 2, 3), [2, 2, 2, 3]),
            publish((0, A)),
        )
        assert told == {"not_present": 1, "stored": 1}
        assert kept.rows(membership, A, LATE) == bytes(page_of(here.keys[2], 0)[:4].reshape(-1))


def test_what_has_no_room_is_left_out_and_the_rest_of_the_record_goes_on(here: SessionSegments) -> None:
    """A block that is read is not evicted for another one; once it is not, the oldest goes."""
    fill_page(here, 0, salt=1)
    with namespace((HIDDEN,), num_blocks=1) as kept:
        membership = kept.join(here)
        drained(here, save(0, runs((0, 8)), (0, ROWS)), publish((0, A)))
        with membership.rows([A]):
            assert drained(here, publish((0, A), (1, B), (2, A))) == {"known": 1, "no_room": 1, "not_present": 1}
        assert drained(here, publish((1, B))) == {"stored": 1}
        assert kept.rows(membership, A, HIDDEN) is None
        assert kept.rows(membership, B, HIDDEN) == rows_of(here, HIDDEN, 1)


def test_a_filled_block_has_a_tenant_like_any_other(here: SessionSegments, one_key: Namespace) -> None:
    """A later step overwrites it, a reset makes it unreadable (R4, R5)."""
    one_key.join(here)
    fill_page(here, 0, salt=1)
    drained(here, save(0, runs((0, 4)), (0, ROWS)), publish((0, A)), fill((1, A), (2, A)))
    fill_page(here, 1, salt=2)
    drained(here, save(1, runs((4, 4)), (0, ROWS)))
    assert rows_of(here, HIDDEN, 1) == bytes(page_of(here.keys[0], 1)[:4].reshape(-1))
    drained(here, Record(0, Kind.RESET, rows=1))
    assert presence(here, HIDDEN, 2) == {"UNKNOWN"}


def test_after_a_reset_nothing_older_is_shared_unless_the_model_is_the_same(
    here: SessionSegments, there: SessionSegments, one_key: Namespace
) -> None:
    """R5: nothing that others go on with is taken from or given to a session whose model may be another one."""
    one_key.join(here)
    one_key.join(there)
    fill_page(here, 0, salt=1)
    drained(here, save(0, runs((0, 4)), (0, ROWS)), publish((0, A)))
    drained(here, Record(0, Kind.RESET, page=SAME_MODEL, rows=1))
    assert drained(here, fill((1, A))) == {"filled": 1}
    drained(here, Record(0, Kind.RESET, rows=2))
    assert drained(here, fill((1, A))) == {"missing": 1}
    assert drained(there, fill((1, A))) == {"filled": 1}
    fill_page(here, 1, salt=2)
    assert drained(here, save(1, runs((0, 4)), (0, ROWS)), publish((0, A), (1, C))) == {"stored": 1, "not_present": 1}
    assert drained(there, fill((2, A), (3, C))) == {"filled": 1, "missing": 1}
    assert rows_of(there, HIDDEN, 2) == rows_of(there, HIDDEN, 1) != rows_of(here, HIDDEN, 0)
    assert drained(here, fill((5, A))) == {"filled": 1}
    assert rows_of(here, HIDDEN, 5) == rows_of(here, HIDDEN, 0)


def test_a_namespace_with_a_key_that_the_session_closed_takes_and_gives_nothing(
    here: SessionSegments, there: SessionSegments, two_keys: Namespace
) -> None:
    two_keys.join(here)
    two_keys.join(there)
    fill_page(there, 0, salt=1)
    drained(there, save(0, runs((0, 4)), (7, ROWS), (5, ROWS)), publish((0, A)))
    closed = Record(0, Kind.CLOSE_KEY, keys=key_words((1, ROWS)))
    told = drained(here, save(0, runs((0, 4)), (0, ROWS), (1, ROWS)), closed, publish((0, B)), fill((1, A)))
    assert told == {"not_present": 1, "missing": 1}
    assert presence(here, HIDDEN, 1) == {"UNKNOWN"}
