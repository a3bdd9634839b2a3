"""Records: what goes in comes out, and nothing else does."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagecache_wire import layout
from stagecache_wire.records import (
    GATHER_DTYPE,
    HASH_BYTES,
    NO_PAGE,
    OF_BLOCKS,
    OF_CLAIMS,
    BadRecordError,
    KeyMode,
    Kind,
    Record,
    decode,
    encode,
    expand_runs,
    key_words,
)

u32 = st.integers(0, (1 << 32) - 1)
u64 = st.integers(0, (1 << 64) - 1)


@st.composite
def any_record(draw: st.DrawFn) -> Record:
    """A record of any numbers: what they mean is not the codec's affair."""
    kind = draw(st.sampled_from(Kind))
    unit = kind in OF_BLOCKS or draw(st.booleans())
    pairs = draw(st.lists(st.tuples(u32, u32), max_size=5))
    runs = np.array([start for start, _ in pairs] if unit else pairs, np.uint32)
    gathers = draw(st.lists(st.tuples(u32, u32, u32, st.just(0), u64), max_size=4))
    size = HASH_BYTES * len(runs) if kind in OF_BLOCKS else 0
    return Record(
        draw(u64),
        kind,
        page=draw(st.sampled_from((0, 3, NO_PAGE))),
        rows=draw(u64),
        unit_runs=unit,
        keys=np.array(draw(st.lists(u32, max_size=5)), np.uint32),
        runs=runs if unit else runs.reshape(-1, 2),
        claims=np.array(draw(st.lists(u64, min_size=len(runs), max_size=len(runs))), np.uint64)
        if kind in OF_CLAIMS
        else np.empty(0, np.uint64),
        hashes=np.frombuffer(draw(st.binary(min_size=size, max_size=size)), np.uint8).reshape(-1, HASH_BYTES),
        spans=np.array(draw(st.lists(st.tuples(u32, u32, u32, u32), max_size=4)), np.uint32).reshape(-1, 4),
        span_runs=np.array(draw(st.lists(st.tuples(u32, u32), max_size=5)), np.uint32).reshape(-1, 2),
        gathers=np.array(gathers, GATHER_DTYPE),
    )


def contents(record: Record) -> list[object]:
    arrays = record.sections()
    return [
        (record.sequence, record.kind, record.page, record.rows),
        *((len(array), array.tobytes()) for array in arrays),
        len(record.runs) == 0 or record.unit_runs,
    ]


@given(any_record())
def test_a_record_comes_out_as_it_went_in(record: Record) -> None:
    words, payload = encode(record)
    assert words[layout.E_PAYLOAD_LENGTH] == len(payload)
    assert len(words) == layout.ENTRY_WORDS
    assert contents(decode(words, payload)) == contents(record)


@given(any_record())
def test_the_sections_of_a_payload_are_aligned(record: Record) -> None:
    _, payload = encode(record)
    assert len(payload) % 8 == 0
    decoded = decode(*encode(record))
    for array in (decoded.claims, decoded.spans, decoded.span_runs, decoded.gathers):
        assert not len(array) or array.ctypes.data % 4 == 0


@given(any_record(), st.integers(0, 7), u64)
def test_a_changed_word_is_refused_or_read_as_what_it_says(record: Record, word: int, value: int) -> None:
    """No word, whatever it holds, makes the codec read beyond the payload or fail in another way."""
    words, payload = encode(record)
    words[word] = value
    try:
        decoded = decode(words, payload)
    except BadRecordError:
        return
    assert contents(decode(*encode(decoded))) == contents(decoded)


@given(st.lists(u64, min_size=8, max_size=8), st.binary(max_size=200))
def test_noise_is_refused_or_is_a_record(words: list[int], payload: bytes) -> None:
    try:
        decode(words, payload)
    except BadRecordError:
        return


@given(st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 20)), max_size=10))
def test_runs_name_their_slots_in_order(pairs: list[tuple[int, int]]) -> None:
    expected = [slot for start, length in pairs for slot in range(start, start + length)]
    assert expand_runs(np.array(pairs, np.uint32).reshape(-1, 2)).tolist() == expected


def test_slots_are_those_of_either_form() -> None:
    assert Record(1, Kind.SAVE, runs=np.array([[4, 2], [9, 1]], np.uint32)).slots().tolist() == [4, 5, 9]
    assert Record(1, Kind.SAVE, unit_runs=True, runs=np.array([4, 9], np.uint32)).slots().tolist() == [4, 9]


def test_a_key_and_its_mode_share_a_word() -> None:
    keyed = [(0, KeyMode.ROWS), ((1 << 24) - 1, KeyMode.FAILED), (7, KeyMode.CLAIM)]
    assert Record(1, Kind.SAVE, keys=key_words(*keyed)).keyed_modes() == keyed


def test_a_decode_step_of_one_key_is_as_short_as_it_can_be() -> None:
    """32 requests: 64 bytes of entry, 8 of keys, 4 a slot."""
    record = Record(
        1,
        Kind.SAVE,
        page=0,
        rows=32,
        unit_runs=True,
        keys=key_words((0, KeyMode.ROWS)),
        runs=np.arange(32, dtype=np.uint32),
    )
    assert len(encode(record)[1]) == 8 + 32 * 4


def test_blocks_and_their_hashes_stay_together() -> None:
    pairs = [(7, bytes(range(32))), (0, b"\xff" * 32), (3, b"\0" * 32)]
    for kind in OF_BLOCKS:
        record = Record.of_blocks(kind, pairs)
        assert decode(*encode(record)).named_blocks() == pairs
        assert record.rows == 3
    with pytest.raises(ValueError, match="32 bytes"):
        Record.of_blocks(Kind.FILL, [(0, b"short")])


@pytest.mark.parametrize("missing", [1, 8, 16])
def test_a_payload_that_was_cut_is_refused(missing: int) -> None:
    words, payload = encode(Record(1, Kind.LOST, rows=4, runs=np.array([[0, 2], [4, 2]], np.uint32)))
    with pytest.raises(BadRecordError, match="do not fill"):
        decode(words, payload[:-missing])
