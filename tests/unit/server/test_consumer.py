"""The consumer: what each kind of record does, and what becomes of a bad one."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from stagecache_wire import layout
from stagecache_wire.presence import Presence, presence_of
from stagecache_wire.records import KeyMode, Kind, Record, key_words
from stagecached.consumer import Consumer
from stagecached.segments import SessionSegments
from tests.unit.server.session_kit import (
    KEYS,
    Failures,
    Log,
    consumer_of,
    fill_page,
    flush,
    hit,
    new_session,
    page_of,
    runs,
    save,
    slots,
)

ROWS, CLAIM, FAILED = KeyMode.ROWS, KeyMode.CLAIM, KeyMode.FAILED


@pytest.fixture
def segments() -> Iterator[SessionSegments]:
    with new_session() as made:
        yield made


def drained(segments: SessionSegments, *records: Record) -> Failures:
    """Work these off on this thread."""
    log = Log(segments)
    log._position = 4096 * segments.head
    for record in records:
        log.append(record)
    consumer, told = consumer_of(segments)
    consumer._drain()
    return told


def row(segments: SessionSegments, key_id: int, slot: int) -> bytes:
    store = segments.keys[key_id]
    return bytes(store.segments()[1].map[slot * store.row_bytes : (slot + 1) * store.row_bytes])


def presence(segments: SessionSegments, key_id: int, slot: int) -> Presence:
    claim = int(segments.keys[key_id].claims[slot])
    return presence_of(int(segments.slot_words[slot]), claim, segments.epoch_sequence)


# ------------------------------------------------------------------ each kind


@pytest.mark.parametrize("at", [runs((4, 6)), runs((20, 2), (4, 3), (30, 1)), slots(3, 9, 31, 0, 17, 8)])
def test_a_save_puts_each_row_of_the_page_at_its_slot(segments: SessionSegments, at: np.ndarray) -> None:
    fill_page(segments, 1, salt=1)
    record = save(1, at, (0, ROWS), (1, ROWS), (2, CLAIM))
    assert drained(segments, record) == []
    for key_id in (0, 1):
        page = page_of(segments.keys[key_id], 1)
        assert [row(segments, key_id, slot) for slot in record.slots()] == [bytes(line) for line in page[:6]]
        assert {presence(segments, key_id, slot) for slot in record.slots()} == {Presence.PRESENT}
    assert {presence(segments, 2, slot) for slot in record.slots()} == {Presence.PENDING}


def test_what_a_save_does_not_name_is_absent_and_what_it_refuses_unknown(segments: SessionSegments) -> None:
    fill_page(segments, 0, salt=1)
    told = drained(
        segments, save(0, runs((0, 4)), (0, ROWS), (1, ROWS), (2, ROWS)), save(0, runs((0, 2)), (0, ROWS), (1, FAILED))
    )
    assert told == []
    assert [presence(segments, key_id, 0).name for key_id in KEYS] == ["PRESENT", "UNKNOWN", "ABSENT"]
    assert [presence(segments, key_id, 3).name for key_id in KEYS] == ["PRESENT"] * 3


def test_a_gather_fills_its_extent_and_says_what_was_missing(segments: SessionSegments) -> None:
    """Rows that are not PRESENT read zeros, whatever the pool holds there (H5)."""
    fill_page(segments, 0, salt=1)
    drained(
        segments,
        save(0, runs((0, 8)), (0, ROWS), (1, ROWS)),
        save(1, runs((2, 2)), (0, ROWS)),
        hit(runs((6, 2), (0, 4)), (0, 3, 128), (1, 5, 1024)),
    )
    consumer, _ = consumer_of(segments)
    whole, partly = consumer.read_results([3, 5])
    assert (whole.sequence, whole.key_id, whole.arena_offset, whole.rows) == (3, 0, 128, 6)
    assert (whole.unknown, whole.absent, whole.pending, whole.first_missing) == (0, 0, 0, 6)
    assert (partly.absent, partly.absent_first, partly.absent_end, partly.unknown) == (2, 4, 6, 0)
    expected = b"".join(row(segments, 1, slot) for slot in (6, 7, 0, 1)) + bytes(24)
    assert segments.arena[1024 : 1024 + 6 * 12].tobytes() == expected
    assert any(row(segments, 1, 2)), "the pool itself holds an older row there"


def test_gathers_of_a_save_see_its_rows(segments: SessionSegments) -> None:
    fill_page(segments, 0, salt=1)
    fill_page(segments, 1, salt=2)
    record = save(1, runs((4, 4)), (0, ROWS))
    behind = hit(runs((0, 8)), (0, 1, 0))
    record.spans, record.span_runs, record.gathers = behind.spans, behind.span_runs, behind.gathers
    drained(segments, save(0, runs((0, 8)), (0, ROWS)), record)
    old, new = page_of(segments.keys[0], 0), page_of(segments.keys[0], 1)
    assert segments.arena[:64].tobytes() == old[:4].tobytes() + new[:4].tobytes()


def test_lost_slots_are_unknown_for_every_key(segments: SessionSegments) -> None:
    """W8"""
    fill_page(segments, 0, salt=1)
    drained(
        segments,
        save(0, runs((0, 4)), (0, ROWS), (1, ROWS)),
        Record(0, Kind.LOST, rows=2, runs=runs((1, 2))),
        hit(runs((0, 4)), (0, 1, 0)),
    )
    assert [presence(segments, 0, slot).name for slot in range(4)] == ["PRESENT", "UNKNOWN", "UNKNOWN", "PRESENT"]
    found = consumer_of(segments)[0].read_results([1])[0]
    assert (found.unknown, found.unknown_first, found.unknown_end) == (2, 1, 3)
    assert not segments.arena[8:24].any()


def test_a_flush_writes_only_where_its_claim_stands(segments: SessionSegments) -> None:
    """W3: a new tenant, with the key or without it, is never overwritten."""
    fill_page(segments, 0, salt=1)
    fill_page(segments, 1, salt=2)
    drained(
        segments,
        save(0, runs((0, 6)), (0, ROWS), (2, CLAIM)),
        save(0, runs((2, 1)), (0, ROWS), (2, CLAIM)),
        save(0, runs((3, 1)), (0, ROWS)),
        flush(1, slots(0, 2, 3, 5), [1, 1, 1, 1]),
    )
    page = page_of(segments.keys[2], 1)
    assert row(segments, 2, 0) == bytes(page[0])
    assert row(segments, 2, 5) == bytes(page[3])
    assert row(segments, 2, 2) == row(segments, 2, 3) == bytes(5)
    names = [presence(segments, 2, slot).name for slot in range(6)]
    assert names == ["PRESENT", "PENDING", "PENDING", "ABSENT", "PENDING", "PRESENT"]


def test_a_failed_write_makes_exactly_its_claims_unknown(segments: SessionSegments) -> None:
    """W5"""
    fill_page(segments, 0, salt=1)
    drained(
        segments,
        save(0, runs((0, 4)), (0, ROWS), (2, CLAIM)),
        save(0, runs((1, 1)), (0, ROWS), (2, ROWS)),
        flush(0, slots(0, 1), [1, 1], kind=Kind.FAIL),
    )
    assert [presence(segments, 2, slot).name for slot in range(3)] == ["UNKNOWN", "PRESENT", "PENDING"]
    assert presence(segments, 0, 0) is Presence.PRESENT


def test_a_reset_makes_everything_before_it_unknown(segments: SessionSegments) -> None:
    """R5"""
    fill_page(segments, 0, salt=1)
    drained(
        segments,
        save(0, runs((0, 4)), (0, ROWS)),
        Record(0, Kind.RESET, rows=7),
        save(0, runs((1, 1)), (0, ROWS)),
        hit(runs((0, 2)), (0, 1, 0)),
    )
    assert (segments.epoch, segments.epoch_sequence) == (7, 2)
    assert [presence(segments, 0, slot).name for slot in range(2)] == ["UNKNOWN", "PRESENT"]
    assert not segments.arena[:8].any()


def test_an_epoch_that_falls_fails_the_session(segments: SessionSegments) -> None:
    told = drained(segments, *(Record(0, Kind.RESET, rows=epoch) for epoch in (7, 7, 6)))
    assert told == ["record 3: epoch 6 after 7"]
    assert segments.epoch == 7


def test_a_closed_key_is_gone_and_told_once(segments: SessionSegments) -> None:
    told = drained(
        segments,
        Record(0, Kind.CLOSE_KEY, keys=key_words((1, ROWS))),
        Record(0, Kind.CLOSE_KEY, keys=key_words((1, ROWS))),
    )
    assert sorted(segments.keys) == [0, 2]
    assert told.closed == [1, 1], "a record that is done twice tells twice"
    assert told == []


# ------------------------------------------------------------- bad, waited for


def test_a_bad_record_fails_the_session_and_what_follows_is_not_done(segments: SessionSegments) -> None:
    told = drained(segments, save(5, runs((0, 2)), (0, ROWS)), save(0, runs((0, 2)), (0, ROWS)))
    assert told == ["record 1: page 5 of 2"]
    assert segments.status == layout.STATUS_FAILED
    assert segments.words[layout.D_FAIL_SEQUENCE] == 1
    assert segments.consumed == 0
    assert not segments.slot_words.any()


def test_an_entry_that_is_not_there_yet_fails_the_session(segments: SessionSegments) -> None:
    """``head`` comes last: where it is ahead of the entry, the worker broke the protocol."""
    segments.words[layout.W_HEAD] = 1
    consumer, told = consumer_of(segments)
    consumer._drain()
    assert told == ["record 1: entry carries sequence 0"]


def test_whoever_waits_for_a_sequence_is_woken(segments: SessionSegments) -> None:
    fill_page(segments, 0, salt=1)
    consumer, _ = consumer_of(segments)
    consumer.start()
    try:
        assert not consumer.wait_consumed(1, 0.05)
        got: list[bool] = []
        waiter = threading.Thread(target=lambda: got.append(consumer.wait_consumed(2, 10.0)))
        waiter.start()
        log = Log(segments)
        log.append(save(0, runs((0, 2)), (0, ROWS)))
        log.append(save(0, runs((2, 2)), (0, ROWS)))
        segments.daemon_doorbell.release()
        waiter.join(10.0)
        assert got == [True]
    finally:
        assert consumer.stop(5.0)
    assert not consumer.alive


def test_a_lost_doorbell_delays_a_record_and_no_more(segments: SessionSegments) -> None:
    """Counts mean nothing: the log is read again at every time-out."""
    fill_page(segments, 0, salt=1)
    consumer, _ = consumer_of(segments)
    consumer.start()
    Log(segments).append(save(0, runs((0, 2)), (0, ROWS)))
    assert consumer.wait_consumed(1, 10.0)
    for _ in range(3):
        segments.daemon_doorbell.release()
    assert consumer.stop(5.0)
    assert segments.consumed == 1


@pytest.fixture
def long_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    """A consumer that misses a record hangs for longer than these tests last."""
    monkeypatch.setattr("stagecached.consumer.IDLE_SLICE_S", 60.0)


def asleep(segments: SessionSegments) -> None:
    deadline = time.monotonic() + 10.0
    while not segments.words[layout.D_ASLEEP]:
        assert time.monotonic() < deadline, "the consumer never slept"
        time.sleep(0.001)


@pytest.mark.usefixtures("long_sleep")
def test_a_warm_consumer_finds_a_record_that_nobody_rang_for(segments: SessionSegments) -> None:
    fill_page(segments, 0, salt=1)
    consumer, _ = consumer_of(segments)
    consumer.warm_s = 30.0
    consumer.start()
    log = Log(segments)
    asleep(segments)
    log.append(save(0, runs((0, 2)), (0, ROWS)))
    segments.daemon_doorbell.release()
    assert consumer.wait_consumed(1, 10.0)
    while segments.words[layout.D_ASLEEP]:
        time.sleep(0.001)
    log.append(save(0, runs((2, 2)), (0, ROWS)))
    deadline = time.monotonic() + 10.0
    while segments.consumed < 2 and time.monotonic() < deadline:
        time.sleep(0.001)
    assert segments.consumed == 2
    assert consumer.stop(5.0)


@pytest.mark.usefixtures("long_sleep")
def test_an_idle_consumer_falls_asleep_and_says_so(segments: SessionSegments) -> None:
    fill_page(segments, 0, salt=1)
    consumer, _ = consumer_of(segments)
    consumer.warm_s = 0.02
    consumer.start()
    for sequence in (1, 2):
        asleep(segments)
        assert segments.consumed == sequence - 1
        Log(segments).append(save(0, runs((0, 2)), (0, ROWS)))
        segments.daemon_doorbell.release()
        assert consumer.wait_consumed(sequence, 10.0)
    asleep(segments)
    assert consumer.stop(5.0)


@pytest.mark.usefixtures("long_sleep")
def test_a_record_that_comes_as_the_consumer_falls_asleep_is_seen(segments: SessionSegments) -> None:
    """Its worker looked at the word before it was set, so it does not ring."""
    fill_page(segments, 0, salt=1)

    class Late(Consumer):
        def _point(self, name: str) -> None:
            if name == "after_asleep" and segments.head == 0:
                Log(segments).append(save(0, runs((0, 2)), (0, ROWS)))

    consumer, _ = consumer_of(segments, Late)
    consumer.start()
    deadline = time.monotonic() + 10.0
    while segments.consumed < 1 and time.monotonic() < deadline:
        time.sleep(0.001)
    assert segments.consumed == 1
    assert consumer.stop(5.0)


def test_a_stop_works_off_what_is_in_the_log(segments: SessionSegments) -> None:
    fill_page(segments, 0, salt=1)
    log = Log(segments)
    for _ in range(50):
        log.append(save(0, runs((0, 2)), (0, ROWS)))
    consumer, _ = consumer_of(segments)
    consumer.start()
    assert consumer.stop(10.0)
    assert segments.consumed == 50
