"""PUBLISH and FILL: what is kept for the node, and what comes back into a pool."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from stagecache_wire import layout
from stagecache_wire.figures import SHARED_BLOCKS, Daemon
from stagecache_wire.geometry import KeySchema
from stagecache_wire.presence import Presence, presence_of
from stagecache_wire.records import KeyMode, Kind, Record, key_words
from stagecached.segments import SessionSegments
from stagecached.sharing import Membership
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
from tests.unit.server.sharing_kit import KeptBlocks

ROWS, CLAIM, FAILED = KeyMode.ROWS, KeyMode.CLAIM, KeyMode.FAILED
A, B, C = (bytes([number]) * 32 for number in (1, 2, 3))
TWO_KEYS = (HIDDEN, WIDE)


@pytest.fixture
def here() -> Iterator[SessionSegments]:
    with new_session() as made:
        yield made


@pytest.fixture
def there() -> Iterator[SessionSegments]:
    """Another session, whose key ids are others."""
    with new_session(keys={5: WIDE, 6: LATE, 7: HIDDEN}) as made:
        yield made


def drained(segments: SessionSegments, membership: Membership | None, *records: Record) -> dict[str, int]:
    """Work these off on this thread; what became of the blocks that they name."""
    log = Log(segments)
    log._position = 4096 * segments.head
    for record in records:
        log.append(record)
    first = layout.D_FIGURES + Daemon.SHARED
    before = segments.words[first : first + len(SHARED_BLOCKS)].tolist()
    consumer, told = consumer_of(segments)
    consumer.sharing.membership = membership
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


def test_what_one_session_published_another_is_filled_with(here: SessionSegments, there: SessionSegments) -> None:
    kept = KeptBlocks(TWO_KEYS, GEOMETRY.block_size)
    fill_page(here, 0, salt=1)
    told = drained(here, kept, save(0, runs((0, 8)), (0, ROWS), (1, ROWS)), publish((0, A), (1, B)))
    assert told == {"kept": 2}
    assert drained(there, kept, fill((6, B), (3, A))) == {"filled": 2}
    for schema in TWO_KEYS:
        assert rows_of(there, schema, 3) == rows_of(here, schema, 0)
        assert rows_of(there, schema, 6) == rows_of(here, schema, 1)
        assert rows_of(there, schema, 3) != rows_of(there, schema, 6)
        assert presence(there, schema, 3) == presence(there, schema, 6) == {"PRESENT"}
    assert presence(there, LATE, 3) == {"ABSENT"}


def test_a_filled_block_may_be_published_again(here: SessionSegments, there: SessionSegments) -> None:
    kept = KeptBlocks(TWO_KEYS, GEOMETRY.block_size)
    fill_page(here, 0, salt=1)
    drained(here, kept, save(0, runs((0, 4)), (0, ROWS), (1, ROWS)), publish((0, A)))
    drained(there, kept, fill((5, A)))
    kept.blocks.clear()
    assert drained(there, kept, publish((5, A))) == {"kept": 1}
    assert drained(here, kept, fill((7, A))) == {"filled": 1}
    assert rows_of(here, HIDDEN, 7) == rows_of(here, HIDDEN, 0)


def test_a_hash_that_is_not_kept_makes_its_slots_unknown(here: SessionSegments) -> None:
    """Also over an older tenant's rows, which no hit may show."""
    kept = KeptBlocks(TWO_KEYS, GEOMETRY.block_size)
    fill_page(here, 0, salt=1)
    assert drained(here, kept, save(0, runs((0, 8)), (0, ROWS), (1, ROWS)), fill((1, C))) == {"missing": 1}
    assert presence(here, HIDDEN, 0) == {"PRESENT"}
    assert presence(here, HIDDEN, 1) == presence(here, WIDE, 1) == presence(here, LATE, 1) == {"UNKNOWN"}


def test_without_a_namespace_nothing_is_kept_and_nothing_filled(here: SessionSegments) -> None:
    fill_page(here, 0, salt=1)
    record = save(0, runs((0, 4)), (0, ROWS), (1, ROWS))
    assert drained(here, None, record, publish((0, A)), fill((2, A))) == {"closed": 1, "missing": 1}
    assert presence(here, HIDDEN, 2) == {"UNKNOWN"}


def test_whoever_published_first_stays(here: SessionSegments, there: SessionSegments) -> None:
    kept = KeptBlocks((HIDDEN,), GEOMETRY.block_size)
    fill_page(here, 0, salt=1)
    fill_page(there, 0, salt=2)
    drained(here, kept, save(0, runs((0, 4)), (0, ROWS)), publish((0, A)))
    assert drained(there, kept, save(0, runs((0, 4)), (7, ROWS)), publish((0, A))) == {"held": 1}
    drained(there, kept, fill((1, A)))
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
def test_only_a_block_whose_every_row_is_there_is_kept(here: SessionSegments, what: str, records: list[Record]) -> None:
    kept = KeptBlocks(TWO_KEYS, GEOMETRY.block_size)
    fill_page(here, 0, salt=1)
    fill_page(here, 1, salt=2)
    assert drained(here, kept, *records, publish((0, A))) == {"incomplete": 1}, what
    assert not kept.blocks


def test_a_block_of_several_steps_and_a_flush_is_kept_once_it_is_whole(here: SessionSegments) -> None:
    """W3: deferred rows come later; an older tenant's key does not stand in the way."""
    kept = KeptBlocks((HIDDEN, LATE), GEOMETRY.block_size)
    for page in (0, 1):
        fill_page(here, page, salt=page)
    told = drained(
        here,
        kept,
        save(0, runs((0, 4)), (0, ROWS), (1, ROWS)),
        save(0, runs((0, 3)), (0, ROWS), (2, CLAIM)),
        save(1, slots(3), (0, ROWS), (2, CLAIM)),
        publish((0, A)),
        flush(0, slots(0, 1, 2, 3), [2, 2, 2, 3]),
        publish((0, A)),
    )
    assert told == {"incomplete": 1, "kept": 1}
    page = page_of(here.keys[2], 0)
    assert kept.blocks[A]["late"].tobytes() == bytes(page[:4].reshape(-1))


def test_what_has_no_room_is_left_out_and_the_rest_of_the_record_goes_on(here: SessionSegments) -> None:
    kept = KeptBlocks((HIDDEN,), GEOMETRY.block_size, num_blocks=1)
    fill_page(here, 0, salt=1)
    told = drained(here, kept, save(0, runs((0, 8)), (0, ROWS)), publish((0, A), (1, B), (2, A)))
    assert told == {"kept": 1, "no_room": 1, "incomplete": 1}


def test_a_filled_block_has_a_tenant_like_any_other(here: SessionSegments) -> None:
    """A later step overwrites it, a reset makes it unreadable (R4, R5)."""
    kept = KeptBlocks((HIDDEN,), GEOMETRY.block_size)
    fill_page(here, 0, salt=1)
    drained(here, kept, save(0, runs((0, 4)), (0, ROWS)), publish((0, A)), fill((1, A), (2, A)))
    fill_page(here, 1, salt=2)
    drained(here, kept, save(1, runs((4, 4)), (0, ROWS)))
    assert rows_of(here, HIDDEN, 1) == bytes(page_of(here.keys[0], 1)[:4].reshape(-1))
    drained(here, kept, Record(0, Kind.RESET, rows=1))
    assert presence(here, HIDDEN, 2) == {"UNKNOWN"}
    assert kept.resets == [here.consumed]
    assert not kept.blocks


def test_a_namespace_whose_keys_are_not_the_sessions_takes_and_gives_nothing(here: SessionSegments) -> None:
    other = KeySchema("wide", "bfloat16", (6,))
    kept = KeptBlocks((HIDDEN, other), GEOMETRY.block_size)
    kept.blocks[A] = {schema.name: np.zeros(4, f"V{schema.row_bytes}") for schema in kept.schemas}
    fill_page(here, 0, salt=1)
    told = drained(here, kept, save(0, runs((0, 4)), (0, ROWS), (1, ROWS)), publish((0, B)), fill((1, A)))
    assert told == {"incomplete": 1, "missing": 1}
