"""One key's rows: the array form of presence equals the scalar rule, and copies go where they are told."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from stagecache_wire import presence, shm
from stagecache_wire.geometry import Geometry, KeySchema, key_bytes
from stagecache_wire.presence import Presence, presence_of
from stagecached import keystore
from stagecached.keystore import KeyStore, Span, adopt_key, classify, create_key
from stagecached.segments import SessionSegments
from tests.unit.server.session_kit import GEOMETRY, WIDE, fill_page, new_session, page_of, session_names


@pytest.fixture
def segments() -> Iterator[SessionSegments]:
    with new_session() as made:
        yield made


# -------------------------------------------------------------------- presence


@st.composite
def words(draw: st.DrawFn) -> tuple[int, int]:
    """A slot word and a claim word as records leave them: a claim that is newer than the slot's writer is of a record
    in work, whose bytes are not in yet."""
    writer = draw(st.integers(0, 6))
    lost = draw(st.booleans()) and writer > 0
    claimer = draw(st.integers(0, 7))
    flags = draw(st.sampled_from((0, presence.WRITTEN, presence.FAILED)))
    if claimer > writer and flags == presence.WRITTEN:
        flags = 0
    if claimer == 0:
        flags = 0
    return writer << presence.SLOT_SHIFT | lost, claimer << presence.CLAIM_SHIFT | flags


@given(st.lists(words(), max_size=24), st.integers(0, 6))
@example([(2, 5)], 0)
@example([(2, 5)], 1)
@example([], 0)
def test_presence_over_arrays_is_the_scalar_rule(rows: list[tuple[int, int]], epoch_sequence: int) -> None:
    slot_words = np.array([slot for slot, _ in rows], np.uint64)
    claims = np.array([claim for _, claim in rows], np.uint64)
    found, mask = classify(slot_words, claims, epoch_sequence)
    expected = [presence_of(slot, claim, epoch_sequence) for slot, claim in rows]
    present = np.ones(len(rows), bool) if mask is None else mask
    assert present.tolist() == [it is Presence.PRESENT for it in expected]
    for name in ("unknown", "absent", "pending"):
        assert getattr(found, name) == expected.count(Presence[name.upper()]), name
    bad = [index for index, it in enumerate(expected) if it in (Presence.UNKNOWN, Presence.PENDING)]
    absent = [index for index, it in enumerate(expected) if it is Presence.ABSENT]
    assert (found.unknown_first, found.unknown_end) == ((bad[0], bad[-1] + 1) if bad else (len(rows), 0))
    assert (found.absent_first, found.absent_end) == ((absent[0], absent[-1] + 1) if absent else (len(rows), 0))
    assert found.first_missing == min([*bad, *absent, len(rows)])


def test_presence_has_each_of_its_values() -> None:
    assert presence_of(0, 0, 0) is Presence.UNKNOWN
    assert presence_of(3 << 1, 3 << 2 | 1, 0) is Presence.PRESENT
    assert presence_of(3 << 1, 3 << 2, 0) is Presence.PENDING
    assert presence_of(3 << 1, 2 << 2 | 1, 0) is Presence.ABSENT
    assert presence_of(3 << 1, 3 << 2 | 2, 0) is Presence.UNKNOWN
    assert presence_of(3 << 1 | 1, 3 << 2 | 1, 0) is Presence.UNKNOWN
    assert presence_of(3 << 1, 3 << 2 | 1, 3) is Presence.UNKNOWN


# ----------------------------------------------------------------------- rows

some_slots = st.lists(st.integers(0, GEOMETRY.num_slots - 1), min_size=1, max_size=12, unique=True)


@given(some_slots, st.booleans())
def test_a_gather_gives_back_what_a_scatter_put_in(numbers: list[int], together: bool) -> None:
    if together:
        first = min(numbers[0], GEOMETRY.num_slots - len(numbers))
        numbers = list(range(first, first + len(numbers)))
    span = Span.of(np.array(numbers, np.int64), single_run=together)
    with new_session() as segments:
        store = segments.keys[1]
        fill_page(segments, 1, salt=sum(numbers))
        assert store.scatter(1, span) == len(numbers) * store.row_bytes
        store.claim(span, 5, failed=False)
        store.mark_written(span, 5)
        segments.slot_words[span.slots] = 5 << presence.SLOT_SHIFT
        out = np.empty(len(numbers), f"V{store.row_bytes}")
        found = store.gather(span, segments.slot_words[span.slots], 0, out)
        assert found.first_missing == len(numbers)
        assert out.tobytes() == page_of(store, 1)[: len(numbers)].tobytes()
        assert store.present_slots(segments.slot_words, 0) == len(numbers)
        assert (store.rows_scattered, store.rows_gathered) == (len(numbers), len(numbers))


def test_a_gather_leaves_nothing_of_rows_that_are_not_present(segments: SessionSegments) -> None:
    store = segments.keys[1]
    fill_page(segments, 0, salt=1)
    span = Span.of(np.arange(4, dtype=np.int64), single_run=True)
    store.scatter(0, span)
    store.claim(span, 1, failed=False)
    store.mark_written(span, 1)
    segments.slot_words[:4] = 1 << presence.SLOT_SHIFT
    segments.slot_words[2] = 2 << presence.SLOT_SHIFT
    out = np.full(4 * store.row_bytes, 0xEE, np.uint8)
    store.gather(span, segments.slot_words[:4], 0, out.view(f"V{store.row_bytes}"))
    rows = out.reshape(4, -1)
    assert not rows[2].any()
    assert (rows[[0, 1, 3]] == page_of(store, 0)[[0, 1, 3]]).all()


def test_only_standing_claims_are_flushed_and_settled(segments: SessionSegments) -> None:
    """W3: neither a newer claim, nor a newer writer without the key."""
    store = segments.keys[2]
    slots = np.array([7, 3, 5], np.int64)
    store.claims[slots] = [4 << 2, 4 << 2, 6 << 2]
    segments.slot_words[slots] = [4 << 1, 9 << 1, 6 << 1]
    claims = np.array([4, 4, 4], np.uint64)
    keep = store.standing(slots, claims, segments.slot_words)
    assert keep.tolist() == [True, False, False]
    fill_page(segments, 0, salt=1)
    assert store.flush(0, slots, claims, keep) == store.row_bytes
    store.settle(slots, claims, keep, failed=False)
    assert store.claims[slots].tolist() == [4 << 2 | 1, 4 << 2, 6 << 2]


# ------------------------------------------------------------------- segments


def test_a_key_that_does_not_fit_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    create = shm.create_segment

    def full_after_two(name: str, size: int, mode: int) -> shm.Segment:
        if len(made) == 2:
            raise shm.ShmFullError(size, 0)
        made.append(name)
        return create(name, size, mode)

    monkeypatch.setattr(keystore.shm, "create_segment", full_after_two)
    with session_names() as names:
        with pytest.raises(shm.ShmFullError):
            create_key(names, 0, WIDE, GEOMETRY, 0o600)
        assert [path.name for path in shm.SHM_DIRECTORY.iterdir() if names.session_id in path.name] == []


def test_an_adopted_key_is_the_same_memory(segments: SessionSegments) -> None:
    store = segments.keys[1]
    again = adopt_key(segments.names, 1, WIDE, GEOMETRY)
    store.claims[3] = 77
    assert again.claims[3] == 77
    assert [part.size for part in again.segments()] == [part.size for part in store.segments()]
    assert store.pool_bytes + store.staging_bytes + store.table_bytes == key_bytes(GEOMETRY, WIDE.row_bytes)


@pytest.mark.parametrize(
    ("geometry", "schema"),
    [
        (Geometry(64, 4, 16, 2, 1 << 16, 16).checked(), WIDE),
        (GEOMETRY, KeySchema("wide", "bfloat16", (300, 2))),
        (Geometry(8, 4, 4096, 2, 1 << 16, 16).checked(), WIDE),
        (GEOMETRY, KeySchema("wide", "bfloat16", (1, 2))),
    ],
    ids=["more slots", "wider rows", "larger pages", "narrower rows"],
)
def test_a_key_of_another_size_than_told_is_not_adopted(
    segments: SessionSegments, geometry: Geometry, schema: KeySchema
) -> None:
    with pytest.raises(ValueError, match="not as long"):
        adopt_key(segments.names, 1, schema, geometry)


def test_a_key_whose_part_is_gone_is_not_adopted(segments: SessionSegments) -> None:
    shm.unlink_segment(segments.names.pool(1))
    with pytest.raises(FileNotFoundError):
        adopt_key(segments.names, 1, WIDE, GEOMETRY)


def test_a_row_is_moved_whole_whatever_its_width() -> None:
    """Rows of 1 to 70 bytes, most of them no multiple of a word."""
    with session_names() as names:
        for width in (1, 2, 3, 7, 8, 12, 17, 70):
            schema = KeySchema("k", "uint8", (width,))
            store: KeyStore = create_key(names, width, schema, GEOMETRY, 0o600)
            try:
                page_of(store, 0)[:] = np.arange(16 * width, dtype=np.uint8).reshape(16, width)
                span = Span.of(np.array([9, 2, 30], np.int64), single_run=False)
                store.scatter(0, span)
                out = np.empty(3, f"V{width}")
                words = np.full(3, 2, np.uint64)
                store.claims[span.slots] = 5
                store.gather(span, words, 0, out)
                assert out.tobytes() == bytes(range(3 * width))
            finally:
                for part in store.segments():
                    shm.unlink_segment(part.name)
