"""Presence of hit spans for people and schedulers."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import numpy as np
import pytest

from stagecache_wire.presence import Presence, presence_of
from stagecache_wire.records import KeyMode, Kind, Record
from stagecached.lookup import lookup
from stagecached.segments import SessionSegments
from tests.unit.server.session_kit import GEOMETRY, KEYS, Log, consumer_of, fill_page, new_session, runs, save

ROWS, CLAIM = KeyMode.ROWS, KeyMode.CLAIM


@pytest.fixture
def segments() -> Iterator[SessionSegments]:
    with new_session() as made:
        fill_page(made, 0, salt=1)
        log = Log(made)
        log.append(save(0, runs((0, 8), (16, 4)), (0, ROWS), (1, ROWS), (2, CLAIM)))
        log.append(save(0, runs((6, 2)), (0, ROWS)))
        log.append(Record(0, Kind.LOST, rows=1, runs=runs((17, 1))))
        consumer_of(made)[0]._drain()
        yield made


def blocks(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int64)


def test_each_span_is_told_key_by_key(segments: SessionSegments) -> None:
    answer = lookup(segments, blocks(0, 1, 4), [8, 3], [])
    assert answer.key_ids == [0, 1, 2]
    assert answer.readable == [8, 6, 0, 1, 1, 0]
    assert answer.first_missing_slot == [-1, 6, 0, 17, 17, 16]
    assert answer.pending == [0, 0, 6, 0, 0, 2]
    assert answer.absent == [0, 2, 2, 0, 0, 0]
    assert answer.unknown == [0, 0, 0, 1, 1, 1]
    assert answer.consumed == 3


def test_only_the_keys_asked_for_are_told_in_the_order_asked(segments: SessionSegments) -> None:
    answer = lookup(segments, blocks(1), [4], [2, 0])
    assert (answer.key_ids, answer.readable) == ([2, 0], [0, 4])


def test_a_span_may_end_inside_a_block_and_name_blocks_in_any_order(segments: SessionSegments) -> None:
    answer = lookup(segments, blocks(4, 0), [5], [0])
    assert (answer.readable, answer.first_missing_slot, answer.unknown) == ([1], [17], [1])


def test_counts_agree_with_the_rule_slot_by_slot(segments: SessionSegments) -> None:
    rng = Random(1)
    for _ in range(30):
        chosen = [rng.randrange(GEOMETRY.num_blocks) for _ in range(rng.randint(1, 4))]
        tokens = len(chosen) * 4 - rng.randrange(4)
        answer = lookup(segments, blocks(*chosen), [tokens], [])
        slots = [block * 4 + offset for block in chosen for offset in range(4)][:tokens]
        for index, key_id in enumerate(KEYS):
            store = segments.keys[key_id]
            found = [presence_of(int(segments.slot_words[slot]), int(store.claims[slot]), 0) for slot in slots]
            missing = [slot for slot, it in zip(slots, found, strict=True) if it is not Presence.PRESENT]
            assert answer.first_missing_slot[index] == (missing[0] if missing else -1)
            assert answer.unknown[index] == found.count(Presence.UNKNOWN)
            assert answer.absent[index] == found.count(Presence.ABSENT)
            assert answer.pending[index] == found.count(Presence.PENDING)


@pytest.mark.parametrize(
    ("chosen", "tokens", "match"),
    [
        ((8,), [4], "outside 0 to 7"),
        ((-1,), [4], "outside 0 to 7"),
        ((0, 1), [4], "2 block ids"),
        ((0,), [5], "1 block ids"),
    ],
)
def test_spans_that_do_not_fit_are_refused(
    segments: SessionSegments, chosen: tuple[int, ...], tokens: list[int], match: str
) -> None:
    with pytest.raises(ValueError, match=match):
        lookup(segments, blocks(*chosen), tokens, [])


def test_a_key_that_is_not_open_is_refused(segments: SessionSegments) -> None:
    with pytest.raises(KeyError):
        lookup(segments, blocks(0), [4], [9])


def test_no_spans_is_an_empty_answer(segments: SessionSegments) -> None:
    answer = lookup(segments, blocks(), [], [])
    assert (answer.key_ids, answer.readable) == ([0, 1, 2], [])
