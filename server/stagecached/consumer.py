"""The thread that does what a session's log says, record by record, in order.

The order of shared stores in here is the crash contract (docs/architecture.md). A daemon may be killed between any
two of them; the next one starts at ``consumed`` + 1 and does the record again, which must be safe:

    every effect of the record, then its results, then ``consumed`` (one aligned 8-byte store), then the doorbell

Waking a thread costs the one who rings. So after a record the consumer stays *warm* for a while: it looks at ``head``
by itself (pace.py), and the worker rings only for what cannot wait so long. Then it falls *asleep*, says so in a word
of its own, and is rung for again.

``_point`` stands between any two shared stores. Here it does nothing; the crash tests kill the process in it.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import posix_ipc
from numpy.typing import NDArray

from stagecache_wire import layout, presence
from stagecache_wire.fence import fence, full_fence
from stagecache_wire.records import BadRecordError, KeyMode, Kind, Record, decode, expand_runs
from stagecache_wire.results import Result
from stagecached import lookup as lookup_module
from stagecached.keystore import KeyStore, Span
from stagecached.metrics.record_figures import RecordFigures
from stagecached.pace import WARM_S, Pace
from stagecached.segments import SessionSegments
from stagecached.sharing import BlockSharing
from stagecached.validate import REASON_SESSION_FAILED, check_record, read_entry

IDLE_SLICE_S: Final = 0.2
"""Longest wait for the doorbell before the log is read again: a count in a semaphore is no truth."""


class Consumer:
    """Works off one session's log on a thread of its own, and answers what was consumed.

    It waits for its doorbell and, for moments, for the lock of a namespace of shared blocks, under which no rows are
    copied. It holds no other lock while it works; ``_progress`` is taken only to wake threads of this daemon that wait
    for a sequence.
    """

    warm_s = WARM_S

    def __init__(
        self,
        segments: SessionSegments,
        on_failed: Callable[[int, str], None],
        on_key_closed: Callable[[int], None],
    ) -> None:
        """on_failed(reason, message): a bad record ended the session. on_key_closed(key_id): a key was given up.
        Both are called on the consumer's thread.
        """
        self._segments = segments
        self._words = segments.words
        self.figures = RecordFigures(segments.words)
        self.sharing = BlockSharing(segments, self.figures, self._point)
        self._on_failed = on_failed
        self._on_key_closed = on_key_closed
        self._stop_at: float | None = None
        self._progress = threading.Condition()
        self._waiters = 0
        self.busy_since: float | None = None
        """time.monotonic() at which the record in work was begun; None while idle."""
        self.failure: str | None = None
        self._thread = threading.Thread(target=self._run, name=f"consumer-{segments.names.session_id[:8]}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, drain_s: float) -> bool:
        """Work off what is in the log, for ``drain_s`` seconds at most, and end the thread. True if all was done."""
        self._stop_at = time.monotonic() + drain_s
        self._segments.daemon_doorbell.release()
        self._thread.join(drain_s + 2 * IDLE_SLICE_S + 1.0)
        return not self._thread.is_alive() and self._segments.consumed == self._segments.head

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def wait_consumed(self, sequence: int, timeout_s: float) -> bool:
        """Wait until the log is consumed up to ``sequence``. Any thread but the consumer's."""
        deadline = time.monotonic() + timeout_s
        with self._progress:
            self._waiters += 1
            if self._segments.consumed < sequence:
                self._segments.daemon_doorbell.release()
            try:
                while self._segments.consumed < sequence:
                    left = deadline - time.monotonic()
                    if left <= 0 or not self._thread.is_alive():
                        return self._segments.consumed >= sequence
                    self._progress.wait(min(left, IDLE_SLICE_S))
                return True
            finally:
                self._waiters -= 1

    def read_results(self, indices: Sequence[int]) -> list[Result]:
        """Entries of the result table.

        Raises:
            IndexError: an index outside the table.
        """
        results = []
        for index in indices:
            if not 0 <= index < self._segments.geometry.max_results:
                raise IndexError(f"result {index} of {self._segments.geometry.max_results}")
            at = self._segments.layout.result_word(index)
            results.append(Result.of(self._words[at : at + layout.RESULT_WORDS].tolist()))
        return results

    def lookup(
        self, block_ids: NDArray[np.int64], span_tokens: Sequence[int], key_ids: Sequence[int]
    ) -> lookup_module.LookupAnswer:
        """Presence of hit spans, key by key; see ``stagecached.lookup``."""
        return lookup_module.lookup(self._segments, block_ids, span_tokens, key_ids)

    # ---------------------------------------------------------------- the loop

    def _run(self) -> None:
        _never_preempt()
        pace: Pace | None = None
        while True:
            self._drain()
            if self.failure is not None:
                return
            consumed, now = self._segments.consumed, time.monotonic()
            stop_at = self._stop_at
            if stop_at is not None and (self._segments.head == consumed or now >= stop_at):
                return
            if pace is None:
                pace = Pace(consumed, self.warm_s)
            pace.done(consumed, self._published_at(consumed, now), now)
            wait_s = pace.next_look(now)
            if wait_s is None:
                self._sleep()
            else:
                self._awake()
                self._listen(wait_s)

    def _published_at(self, sequence: int, now: float) -> float:
        """time.monotonic() at which the worker published a record; ``now`` where that cannot be."""
        published = self.figures.published(sequence) / 1e9 if sequence else 0.0
        return published if now - 1.0 < published <= now else now

    def _listen(self, slice_s: float) -> None:
        with contextlib.suppress(posix_ipc.BusyError):
            self._segments.daemon_doorbell.acquire(slice_s)

    def _sleep(self) -> None:
        """Wait to be rung for. Said before the last look at ``head``, as the worker looks at this word after it stored
        ``head``: so either it rings or the record is seen here.
        """
        self._words[layout.D_ASLEEP] = 1
        full_fence()
        self._point("after_asleep")
        if self._segments.head == self._segments.consumed:
            self._listen(IDLE_SLICE_S)
        if self._segments.head != self._segments.consumed:
            self._awake()

    def _awake(self) -> None:
        """Records are to be done, or were: nobody need ring."""
        if self._words[layout.D_ASLEEP]:
            self._words[layout.D_ASLEEP] = 0
            self._point("after_awake")

    def _drain(self) -> None:
        """Do every record that is published and not consumed."""
        while self._segments.consumed < self._segments.head:
            fence()
            if self._stop_at is not None and time.monotonic() >= self._stop_at:
                return
            sequence = self._segments.consumed + 1
            self.busy_since = time.monotonic()
            begun_ns = time.monotonic_ns()
            try:
                record = self._read(sequence)
                self._do(record)
                self.figures.done(record, begun_ns)
                self._publish(sequence)
            except BadRecordError as error:
                self._fail(sequence, str(error))
                return
            except Exception as error:
                self._fail(sequence, f"{type(error).__name__} while it was done")
                raise
            finally:
                self.busy_since = None

    def _read(self, sequence: int) -> Record:
        words, payload = read_entry(self._segments, sequence)
        record = decode(words, payload)
        check_record(self._segments, record)
        return record

    def _publish(self, sequence: int) -> None:
        """One aligned store says that the record's effect is in place; after it, only doorbells."""
        self._point("before_consumed")
        fence()
        self._words[layout.D_CONSUMED] = sequence
        self._point("after_consumed")
        bell = self._segments.worker_doorbell
        # Rung only when silent, so that its count stays small. A wake-up that is lost when the worker takes the bell
        # at this very moment costs it one slice of its wait, never the record.
        if bell.value == 0:
            bell.release()
        self._point("after_doorbell")
        if self._waiters:
            with self._progress:
                self._progress.notify_all()

    def _fail(self, sequence: int, message: str) -> None:
        self.failure = f"record {sequence}: {message}"
        self._words[layout.D_FAIL_REASON] = REASON_SESSION_FAILED
        self._words[layout.D_FAIL_SEQUENCE] = sequence
        fence()
        self._segments.status = layout.STATUS_FAILED
        self._segments.worker_doorbell.release()
        with self._progress:
            self._progress.notify_all()
        self._on_failed(REASON_SESSION_FAILED, self.failure)

    # ---------------------------------------------------------------- effects

    def _do(self, record: Record) -> None:
        kind = record.kind
        if kind is Kind.SAVE:
            self._save(record)
            self._gather(record)
        elif kind is Kind.BEGIN:
            self._gather(record)
        elif kind is Kind.LOST:
            word = record.sequence << presence.SLOT_SHIFT | presence.LOST
            self._segments.slot_words[record.slots()] = word
            self._point("after_lost")
        elif kind in (Kind.FLUSH, Kind.FAIL):
            self._flush(record, failed=kind is Kind.FAIL)
        elif kind is Kind.RESET:
            self.sharing.reset(record)
            self._words[layout.D_EPOCH_SEQUENCE] = record.sequence
            self._point("between_epoch_words")
            self._words[layout.D_EPOCH] = record.rows
            self._point("after_epoch")
        elif kind is Kind.PUBLISH:
            self.sharing.publish(record)
        elif kind is Kind.FILL:
            self.sharing.fill(record)
        else:
            key_id, _ = record.keyed_modes()[0]
            self._segments.close_key(key_id)
            self._point("after_close_key")
            self._on_key_closed(key_id)

    def _save(self, record: Record) -> None:
        segments, sequence = self._segments, record.sequence
        slots = record.slots()
        span = Span.of(slots, single_run=len(record.runs) == 1)
        keyed = [(segments.keys[key_id], mode) for key_id, mode in record.keyed_modes()]
        for key, mode in keyed:
            key.claim(span, sequence, failed=mode is KeyMode.FAILED)
            self._point("after_claim")
        segments.slot_words[span.slots if span.run is None else span.run] = sequence << presence.SLOT_SHIFT
        self._point("after_slot_words")
        for key, mode in keyed:
            if mode is KeyMode.ROWS:
                self.figures.scattered(span.rows, key.scatter(record.page, span))
                self._point("after_scatter")
                key.mark_written(span, sequence)
                self._point("after_written")

    def _flush(self, record: Record, *, failed: bool) -> None:
        segments = self._segments
        key_id, _ = record.keyed_modes()[0]
        key = segments.keys[key_id]
        slots = record.slots()
        lengths = np.ones(len(record.runs), np.int64) if record.unit_runs else record.runs[:, 1].astype(np.int64)
        claims = np.repeat(record.claims, lengths)
        keep = key.standing(slots, claims, segments.slot_words)
        if not failed:
            size = key.flush(record.page, slots, claims, keep)
            self.figures.scattered(size // key.row_bytes, size)
            self._point("after_flush")
        key.settle(slots, claims, keep, failed=failed)
        self._point("after_settle")

    def _gather(self, record: Record) -> None:
        if not len(record.gathers):
            return
        begun_ns = time.monotonic_ns()
        segments = self._segments
        epoch_sequence = segments.epoch_sequence
        spans = self._spans(record)
        tenants = [segments.slot_words[span.slots if span.run is None else span.run] for span in spans]
        for span_index, key_id, result, _, offset in record.gathers.tolist():
            self._gather_one(
                record.sequence, spans[span_index], tenants[span_index], segments.keys[key_id], result, offset,
                epoch_sequence,
            )  # fmt: skip
        self.figures.spans_done(len(spans), sum(span.rows for span in spans), begun_ns)

    def _gather_one(
        self,
        sequence: int,
        span: Span,
        slot_words: NDArray[np.uint64],
        key: KeyStore,
        result: int,
        offset: int,
        epoch_sequence: int,
    ) -> None:
        segments = self._segments
        size = span.rows * key.row_bytes
        out = segments.arena[offset : offset + size].view(f"V{key.row_bytes}")
        found = key.gather(span, slot_words, epoch_sequence, out)
        self._point("after_gather")
        at = segments.layout.result_word(result)
        entry = Result(
            sequence,
            key.key_id,
            offset,
            span.rows,
            found.unknown,
            found.absent,
            found.pending,
            found.unknown_first,
            found.unknown_end,
            found.absent_first,
            found.absent_end,
        )
        for index, value in enumerate(entry.words()):
            self._words[at + index] = value
            self._point("inside_result")
        self.figures.gathered(span.rows, size)
        if found.unknown:
            self._words[layout.D_UNKNOWN_ROWS] += found.unknown

    @staticmethod
    def _spans(record: Record) -> list[Span]:
        return [
            Span.of(expand_runs(record.span_runs[first : first + count]), single_run=count == 1)
            for first, count, _, _ in record.spans.tolist()
        ]

    def _point(self, name: str) -> None:
        """Between two shared stores. Crash tests kill the process here."""


def _never_preempt() -> None:
    """Ask that this thread, when it is woken, does not take the CPU from whoever woke it: that is an engine in a step.

    As a batch thread it gets the same share of the CPU, and starts when one is free or the other's slice is over.
    """
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
