"""Protocols that look fine: each variant of docs/architecture.md's table, as a small change of daemon, client or both.

A crash run must find every one of them, or it finds nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import posix_ipc
import torch

from stagecache.arena import Arena
from stagecache.cache import StageCache
from stagecache.hits import HitReader
from stagecache.log import LogWriter
from stagecache.pages import PageUse, StepPages
from stagecache.session import Session
from stagecache_wire import layout
from stagecache_wire.records import BadRecordError, Kind, Record
from stagecached.consumer import IDLE_SLICE_S, Consumer

SPARE_WORD = layout.D_BASE + 40
"""A daemon word that the real layout leaves alone: it survives a death, as a mutant's own state would."""


@contextlib.contextmanager
def unchanged() -> Iterator[None]:
    """The client as it is."""
    yield


@dataclass(frozen=True)
class Mutant:
    """One variant. ``consumer`` runs in the daemon; ``client`` patches this process while a run lasts."""

    name: str
    consumer: type[Consumer]
    client: Callable[[], AbstractContextManager[None]] = unchanged


# ------------------------------------------------- `consumed` at another time


class ConsumedFirst(Consumer):
    """`consumed` is stored before the effect."""

    def _do(self, record: Record) -> None:
        super()._publish(record.sequence)
        super()._do(record)

    def _publish(self, sequence: int) -> None:
        pass


class ConsumedSeldom(Consumer):
    """`consumed` is stored every few records, and when the log is empty."""

    def _drain(self) -> None:
        done = self._segments.consumed
        while done < self._segments.head:
            done += 1
            self._do(self._read(done))
            if done % 4 == 0 or done == self._segments.head:
                self._publish(done)


# --------------------------------------------- gather and write in one record


class GatherThenWrite(Consumer):
    """The gathers of a SAVE come before its write: they are for the hits of the step before."""

    def _do(self, record: Record) -> None:
        if record.kind is Kind.SAVE:
            self._gather(record)
            self._save(record)
        else:
            super()._do(record)


@contextlib.contextmanager
def gathers_ride_on_the_next_save() -> Iterator[None]:
    """Gathers wait for the next step's SAVE, whose record does them before it writes; a materialize that cannot wait
    logs them by themselves. Without a death, every row is right."""
    append, save, read = Session.append, StageCache._save, HitReader.read
    waiting: list[Any] = []
    ripe: list[Any] = []

    def hold(self: StageCache, planned: list[Any]) -> None:
        waiting.extend(planned)
        self._hits.spill(planned, self._merge_timeout_s)

    def ride(self: Session, record: Record) -> int:
        riding = [pair for pair in ripe if pair[1].extent is not None]
        ripe.clear()
        if not riding or not isinstance(record.kind, Kind):
            return append(self, record)
        carrier = HitReader._record(riding)
        if record.kind is Kind.SAVE:
            record.spans, record.span_runs, record.gathers = carrier.spans, carrier.span_runs, carrier.gathers
            sequence = append(self, record)
            HitReader.logged(riding, sequence)
            return sequence
        HitReader.logged(riding, append(self, carrier))
        return append(self, record)

    def save_and_ripen(self: StageCache, *args: Any) -> Any:
        step = save(self, *args)
        ripe.extend(waiting)
        waiting.clear()
        return step

    def read_now(self: HitReader, hit: Any, gather: Any, begin: int, timeout_s: float) -> Any:
        if gather.sequence == 0 and gather.extent is not None:
            ripe.extend(waiting)
            waiting.clear()
            riding = [pair for pair in ripe if pair[1].extent is not None]
            ripe.clear()
            HitReader.logged(riding, append(self._session, HitReader._record(riding)))
        return read(self, hit, gather, begin, timeout_s)

    with (
        mock.patch.object(StageCache, "_log_gathers", hold),
        mock.patch.object(StageCache, "_save", save_and_ripen),
        mock.patch.object(Session, "append", ride),
        mock.patch.object(HitReader, "read", read_now),
    ):
        yield


# ------------------------------------------------------ page credits pushed


def _credits(session_id: str, page: int) -> posix_ipc.Semaphore:
    return posix_ipc.Semaphore(f"/crash-test.{session_id}.{page}", posix_ipc.O_CREAT, initial_value=1)


class _Credits(Consumer):
    """Posts one credit for the page of a SAVE."""

    _page: int | None = None

    def _do(self, record: Record) -> None:
        self._page = record.page if record.kind is Kind.SAVE else None
        super()._do(record)

    def _post(self) -> None:
        if self._page is not None:
            credit = _credits(self._segments.names.session_id, self._page)
            credit.release()
            credit.close()


class CreditBeforeConsumed(_Credits):
    """The page's credit is posted, then `consumed` is stored."""

    def _publish(self, sequence: int) -> None:
        self._post()
        super()._publish(sequence)


class CreditAfterConsumed(_Credits):
    """`consumed` is stored, then the page's credit is posted."""

    def _publish(self, sequence: int) -> None:
        super()._publish(sequence)
        self._post()


@contextlib.contextmanager
def pages_by_credit() -> Iterator[None]:
    """A page is free when its credit can be taken, whatever `consumed` says."""
    made: dict[int, list[posix_ipc.Semaphore]] = {}

    def of(self: StepPages) -> list[posix_ipc.Semaphore]:
        if id(self) not in made:
            words = self._log._words
            session_id = f"{words[layout.H_SESSION_HIGH] << 64 | words[layout.H_SESSION_LOW]:016x}"
            made[id(self)] = [_credits(session_id, page) for page in range(len(self._uses))]
        return made[id(self)]

    def try_claim(self: StepPages, step_id: int) -> PageUse | None:
        for page, credit in enumerate(of(self)):
            use = self._uses[page]
            if use is None or use.handed_out:
                if use is not None and use.sequence == 0:
                    credit.release()  # no record of it was logged, so nobody else gives it back
                    use.sequence = -1
                try:
                    credit.acquire(0)
                except posix_ipc.BusyError:
                    continue
                claimed = self._uses[page] = PageUse(page, step_id)
                return claimed
        return None

    try:
        with mock.patch.object(StepPages, "try_claim", try_claim):
            yield
    finally:
        for credits in made.values():
            for credit in credits:
                credit.unlink()
                credit.close()


# ------------------------------------------------- the daemon allocates extents


class AllocatesExtents(Consumer):
    """The daemon chooses where in the arena rows go, and notes after `consumed` how far it got."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._next = self._words[SPARE_WORD]

    def _gather(self, record: Record) -> None:
        arena, room = len(self._segments.arena), self._segments.geometry.staging_capacity_tokens
        for gather in record.gathers:
            key = self._segments.keys[int(gather["key"])]
            size = (int(record.spans[gather["span"], 2]) + room) * key.row_bytes
            size = -(-size // 64) * 64
            if self._next + size > arena:
                self._next = 0
            gather["arena_offset"] = self._next
            self._next += size
        super()._gather(record)

    def _read(self, sequence: int) -> Record:
        record = super()._read(sequence)
        record.gathers = record.gathers.copy()
        return record

    def _publish(self, sequence: int) -> None:
        super()._publish(sequence)
        self._words[SPARE_WORD] = self._next


@contextlib.contextmanager
def extents_from_the_results() -> Iterator[None]:
    """The worker takes the extent from the result table."""
    read = HitReader.read

    def read_there(self: HitReader, hit: Any, gather: Any, begin: int, timeout_s: float) -> Any:
        raw = read(self, hit, gather, begin, timeout_s)
        assert gather.pieces is None
        offset = self._session.control.result(gather.result)[layout.R_ARENA_OFFSET]
        return torch.from_numpy(self._arena.data[offset : offset + len(raw)])

    with (
        mock.patch.object(HitReader, "read", read_there),
        mock.patch.object(Arena, "may_lease", lambda self, extent: False),
    ):
        yield


# ------------------------------------------------------ semaphores as the truth


class CountsDoorbells(Consumer):
    """One record for each time that the doorbell was rung; the words are not looked at otherwise."""

    def _run(self) -> None:
        while self._stop_at is None and self.failure is None:
            try:
                self._segments.daemon_doorbell.acquire(IDLE_SLICE_S)
            except posix_ipc.BusyError:
                continue
            sequence = self._segments.consumed + 1
            if sequence > self._segments.head:
                continue
            try:
                self._do(self._read(sequence))
            except BadRecordError as error:
                self._fail(sequence, str(error))
                return
            self._publish(sequence)


# ------------------------------------------------------- versions are counted


class CountsVersions(Consumer):
    """The version of a slot is how many steps wrote, not which record did."""

    def _do(self, record: Record) -> None:
        if record.kind in (Kind.SAVE, Kind.LOST):
            self._words[SPARE_WORD] += 1
        if record.kind in (Kind.SAVE, Kind.LOST, Kind.RESET):
            self._point("after_version")
            record.sequence = self._words[SPARE_WORD]
        super()._do(record)


@contextlib.contextmanager
def versions_counted() -> Iterator[None]:
    """The worker counts along, and names versions in its flushes."""
    append, add_deferred = LogWriter.append, StageCache._add_deferred
    written = [0]

    def count(self: LogWriter, record: Record, timeout_s: float) -> int:
        sequence = append(self, record, timeout_s)
        written[0] += record.kind in (Kind.SAVE, Kind.LOST)
        return sequence

    def add(self: StageCache, batch: Any, clones: Any, sequence: int) -> None:
        add_deferred(self, batch, clones, written[0])

    with mock.patch.object(LogWriter, "append", count), mock.patch.object(StageCache, "_add_deferred", add):
        yield


MUTANTS: tuple[Mutant, ...] = (
    Mutant("consumed before the effect", ConsumedFirst),
    Mutant("consumed only every few records", ConsumedSeldom),
    Mutant("gather and write in one record", GatherThenWrite, gathers_ride_on_the_next_save),
    Mutant("page credit pushed before consumed", CreditBeforeConsumed, pages_by_credit),
    Mutant("page credit pushed after consumed", CreditAfterConsumed, pages_by_credit),
    Mutant("the daemon allocates extents", AllocatesExtents, extents_from_the_results),
    Mutant("semaphore count as truth", CountsDoorbells),
    Mutant("version as a counter", CountsVersions, versions_counted),
)
BY_NAME = {mutant.name: mutant for mutant in MUTANTS}
