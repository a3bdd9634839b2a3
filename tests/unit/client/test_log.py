"""The worker's end of the log, on real segments: the ring wraps, nothing unread is overwritten, waits end."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from random import Random

import numpy as np
import posix_ipc
import pytest

from stagecache.errors import AbiMismatchError
from stagecache.log import LogFullError, LogWriter
from stagecache.mapping import ControlWords
from stagecache_wire import layout
from stagecache_wire.geometry import Geometry
from stagecache_wire.records import Kind, Record, decode
from stagecached.segments import SessionSegments
from stagecached.validate import read_entry
from tests.unit.server.session_kit import GEOMETRY, new_session


@pytest.fixture
def segments() -> Iterator[SessionSegments]:
    with new_session(keys={}) as made:
        yield made


@pytest.fixture
def log(segments: SessionSegments) -> LogWriter:
    return writer_of(segments)


def writer_of(segments: SessionSegments) -> LogWriter:
    names = segments.names
    control = ControlWords(names.control, names.arena, segments.geometry, names.session_id)
    return LogWriter(control, segments.daemon_doorbell, segments.worker_doorbell)


def lost(count: int, salt: int = 0) -> Record:
    """A record of 4 bytes a slot."""
    runs = (np.arange(count, dtype=np.uint32) + salt) % 32
    return Record(0, Kind.LOST, rows=count, unit_runs=True, runs=runs)


def read_next(segments: SessionSegments) -> Record:
    """What the daemon would read, and consumed."""
    sequence = segments.consumed + 1
    record = decode(*read_entry(segments, sequence))
    segments.words[layout.D_CONSUMED] = sequence
    return record


def test_what_is_appended_is_read_in_order(segments: SessionSegments, log: LogWriter) -> None:
    assert [log.append(lost(count), 0.0) for count in (1, 2, 0, 7)] == [1, 2, 3, 4]
    assert [read_next(segments).rows for _ in range(4)] == [1, 2, 0, 7]
    assert (log.head, log.posts, log.consumed) == (4, 4, 4)
    assert segments.daemon_doorbell.value == 4


def test_head_is_published_last(segments: SessionSegments, log: LogWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    """Payload and entry, then the entry's sequence word, then ``head``, then the doorbell."""
    seen: list[tuple[int, int, int, int]] = []
    at = segments.layout.entry_word(1)

    def look() -> None:
        words = segments.words
        seen.append((words[at + layout.E_KIND] & 255, words[at], words[layout.W_HEAD], segments.daemon_doorbell.value))

    monkeypatch.setattr("stagecache.log.fence", look)
    log.append(lost(3), 0.0)
    look()
    assert seen == [(int(Kind.LOST), 0, 0, 0), (int(Kind.LOST), 1, 0, 0), (int(Kind.LOST), 1, 1, 1)]


def test_a_record_that_can_wait_is_rung_for_only_while_the_daemon_sleeps(
    segments: SessionSegments, log: LogWriter
) -> None:
    for asleep, urgent, rung in ((0, False, 0), (1, False, 1), (0, True, 2), (0, False, 2)):
        segments.words[layout.D_ASLEEP] = asleep
        log.append(lost(1), 0.0, urgent=urgent)
        assert (segments.daemon_doorbell.value, log.posts) == (rung, rung)


def test_whoever_waits_rings_first_and_once(segments: SessionSegments, log: LogWriter) -> None:
    log.append(lost(1), 0.0, urgent=False)
    assert not log.wait_consumed(1, 0.0)
    assert not log.wait_consumed(1, 0.0)
    assert segments.daemon_doorbell.value == 1
    for _ in range(segments.layout.log_entries - 1):
        log.append(lost(0), 0.0, urgent=False)
    with pytest.raises(LogFullError):
        log.append(lost(0), 0.01, urgent=False)
    assert segments.daemon_doorbell.value == 2


@pytest.mark.parametrize("seed", range(6))
def test_the_ring_wraps_and_nothing_unread_is_overwritten(segments: SessionSegments, log: LogWriter, seed: int) -> None:
    """Small and very large payloads, a reader that lags at random; every record reads as it was written."""
    rng = Random(seed)
    largest = segments.layout.payload_bytes // 4
    waiting: deque[tuple[int, bytes]] = deque()
    wrapped = refused = 0
    last = 0
    for step in range(400):
        if rng.random() < 0.55:
            count = rng.choice((0, 1, 5, 300, rng.randrange(largest // 3)))
            record = lost(count, step)
            try:
                log.append(record, 0.0)
            except LogFullError:
                refused += 1
                assert waiting, "an empty log has room"
            else:
                waiting.append((count, record.runs.tobytes()))
                position = segments.words[segments.layout.entry_word(log.head) + layout.E_PAYLOAD_POSITION]
                wrapped += position // segments.layout.payload_bytes > last // segments.layout.payload_bytes
                last = position
        elif waiting:
            record = read_next(segments)
            assert (record.rows, record.runs.tobytes()) == waiting.popleft()
    while waiting:
        record = read_next(segments)
        assert (record.rows, record.runs.tobytes()) == waiting.popleft()
    assert wrapped >= 2
    assert refused > 0


def test_the_entry_ring_holds_as_many_records_as_it_has_entries(segments: SessionSegments, log: LogWriter) -> None:
    for _ in range(segments.layout.log_entries):
        log.append(lost(0), 0.0)
    assert not log.has_room(0)
    with pytest.raises(LogFullError, match=f"{segments.layout.log_entries} records"):
        log.append(lost(0), 0.0)
    assert (log.head, segments.head) == (segments.layout.log_entries, segments.layout.log_entries)
    read_next(segments)
    assert log.append(lost(0), 0.0) == segments.layout.log_entries + 1


def test_a_payload_never_wraps_inside(segments: SessionSegments, log: LogWriter) -> None:
    size = segments.layout.payload_bytes
    for _ in range(9):
        log.append(lost(size // 4 // 4 + 1000), 0.0)
        at = segments.layout.entry_word(log.head)
        position, length = (segments.words[at + word] for word in (layout.E_PAYLOAD_POSITION, layout.E_PAYLOAD_LENGTH))
        assert position % size + length <= size
        read_next(segments)


def test_a_record_that_the_ring_cannot_hold_is_refused_at_once(segments: SessionSegments, log: LogWriter) -> None:
    started = time.monotonic()
    with pytest.raises(LogFullError, match="does not fit the ring"):
        log.append(lost(segments.layout.payload_bytes // 4 + 2), 10.0)
    assert time.monotonic() - started < 5.0
    assert log.head == 0


def test_a_full_log_waits_for_the_daemon_and_gives_up_in_time(segments: SessionSegments, log: LogWriter) -> None:
    for _ in range(segments.layout.log_entries):
        log.append(lost(0), 0.0)
    with pytest.raises(LogFullError):
        log.append(lost(0), 0.05)
    threading.Timer(0.05, lambda: read_next(segments)).start()
    assert log.append(lost(0), 10.0) == segments.layout.log_entries + 1


def test_a_wait_sees_what_was_consumed_though_the_doorbell_was_lost(segments: SessionSegments, log: LogWriter) -> None:
    log.append(lost(1), 0.0)
    assert not log.wait_consumed(1, 0.03)
    threading.Timer(0.03, lambda: read_next(segments)).start()
    assert log.wait_consumed(1, 10.0)
    assert log.wait_consumed(1, 0.0)


def test_several_threads_wait_on_one_doorbell(segments: SessionSegments, log: LogWriter) -> None:
    for _ in range(3):
        log.append(lost(1), 0.0)
    got: list[bool] = []
    threads = [threading.Thread(target=lambda n=n: got.append(log.wait_consumed(n, 10.0))) for n in (1, 2, 3, 3)]
    for thread in threads:
        thread.start()
    for _ in range(3):
        read_next(segments)
        segments.worker_doorbell.release()
    for thread in threads:
        thread.join(10.0)
    assert got == [True] * 4


def test_counts_of_the_doorbell_mean_nothing(segments: SessionSegments, log: LogWriter) -> None:
    log.append(lost(1), 0.0)
    for _ in range(5):
        segments.worker_doorbell.release()
    assert not log.wait_consumed(1, 0.05)


def test_a_signal_does_not_end_a_wait(segments: SessionSegments, log: LogWriter) -> None:
    class Interrupted:
        def acquire(self, timeout: float) -> None:
            raise posix_ipc.SignalError("a signal came")

    log._worker_doorbell = Interrupted()
    log.append(lost(1), 0.0)
    assert not log.wait_consumed(1, 0.01)


def test_a_log_goes_on_where_it_stands(segments: SessionSegments, log: LogWriter) -> None:
    log.append(lost(1), 0.0)
    read_next(segments)
    assert writer_of(segments).head == 1


@pytest.mark.parametrize(
    ("word", "value"), [(layout.H_MAGIC, 1), (layout.H_ABI, layout.ABI + 1), (layout.H_SESSION_LOW, 1)]
)
def test_a_control_segment_of_another_layout_or_session_is_refused(
    segments: SessionSegments, word: int, value: int
) -> None:
    segments.words[word] = value
    with pytest.raises(AbiMismatchError, match=f"header word {word}"):
        writer_of(segments)


def test_a_control_segment_of_another_geometry_is_refused(segments: SessionSegments) -> None:
    names = segments.names
    other = Geometry(GEOMETRY.num_blocks + 1, 4, 16, 2, 1 << 16, 16).checked()
    with pytest.raises(AbiMismatchError):
        ControlWords(names.control, names.arena, other, names.session_id)
