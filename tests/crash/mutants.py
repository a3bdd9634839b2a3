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

from stagecache.arena import Arena
from stagecache.hits import HitReader
from stagecache.log import LogWriter
from stagecache.pages import PageUse, StepPages
from stagecache.saver import StepSaver
from stagecache.session import Session
from stagecache_wire import layout
from stagecache_wire.records import Kind, Record, decode, encode
from tests.crash.mutant_consumers import credit_of


@contextlib.contextmanager
def unchanged() -> Iterator[None]:
    """The client as it is."""
    yield


@dataclass(frozen=True)
class Mutant:
    """One variant: the consumer of that name runs in the daemon, ``client`` patches this process while a run lasts.

    points: where a death must do harm, the mutant's own ones among them. farthest: the last visit to die at.
    """

    name: str
    points: tuple[str, ...]
    client: Callable[[], AbstractContextManager[None]] = unchanged
    farthest: int = 4


@contextlib.contextmanager
def gathers_ride_on_the_next_save() -> Iterator[None]:
    """Gathers wait for the next step's SAVE, whose record does them before it writes; a materialize that cannot wait
    logs them by themselves. Without a death, every row is right."""
    append, save, read = Session.append, StepSaver.save, HitReader.read
    waiting: list[Any] = []
    ripe: list[Any] = []

    def hold(self: StepSaver, planned: list[Any]) -> None:
        waiting.extend(planned)
        self.hits.spill(planned, self._merge_timeout_s)

    def take(*lists: list[Any]) -> list[Any]:
        pairs = [pair for some in lists for pair in some if pair[1].extent is not None]
        for some in lists:
            some.clear()
        return pairs

    def alone(session: Session, pairs: list[Any]) -> None:
        if pairs:
            HitReader.logged(pairs, append(session, HitReader._record(pairs)))

    def ride(self: Session, record: Record, *where: Any, **how: Any) -> int:
        if record.kind in (Kind.RESET, Kind.LOST, Kind.CLOSE_KEY):
            alone(self, take(ripe, waiting))
        riding = take(ripe) if record.kind is Kind.SAVE else []
        if riding:
            carrier = decode(*encode(HitReader._record(riding)))
            record.spans, record.span_runs, record.gathers = carrier.spans, carrier.span_runs, carrier.gathers
        sequence = append(self, record, *where, **how)
        HitReader.logged(riding, sequence)
        return sequence

    def save_and_ripen(self: StepSaver, *args: Any) -> Any:
        step = save(self, *args)
        ripe.extend(waiting)
        waiting.clear()
        return step

    def read_now(self: HitReader, hit: Any, gather: Any, *rest: Any) -> Any:
        if gather.sequence == 0 and gather.extent is not None:
            alone(self._session, take(ripe, waiting))
        return read(self, hit, gather, *rest)

    with (
        mock.patch.object(StepSaver, "_log_gathers", hold),
        mock.patch.object(StepSaver, "save", save_and_ripen),
        mock.patch.object(Session, "append", ride),
        mock.patch.object(HitReader, "read", read_now),
    ):
        yield


@contextlib.contextmanager
def pages_by_credit() -> Iterator[None]:
    """A page is free when its credit can be taken, whatever `consumed` says."""
    made: dict[int, list[posix_ipc.Semaphore]] = {}

    def of(self: StepPages) -> list[posix_ipc.Semaphore]:
        if id(self) not in made:
            words = self._log._words
            session_id = f"{words[layout.H_SESSION_HIGH] << 64 | words[layout.H_SESSION_LOW]:016x}"
            made[id(self)] = [credit_of(session_id, page) for page in range(len(self._uses))]
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


@contextlib.contextmanager
def extents_from_the_results() -> Iterator[None]:
    """The worker takes the extent from the result table."""
    read = HitReader.read

    def read_there(self: HitReader, hit: Any, gather: Any, *rest: Any) -> Any:
        raw = read(self, hit, gather, *rest)
        assert gather.pieces is None
        offset = self._session.control.result(gather.result).arena_offset
        return self._arena.data[offset : offset + len(raw)]

    with (
        mock.patch.object(HitReader, "read", read_there),
        mock.patch.object(Arena, "may_lease", return_value=False),
    ):
        yield


@contextlib.contextmanager
def versions_counted() -> Iterator[None]:
    """The worker counts along, and names versions in its flushes."""
    append, add_deferred = LogWriter.append, StepSaver._add_deferred
    written = [0]

    def count(self: LogWriter, record: Record, timeout_s: float, **how: Any) -> int:
        sequence = append(self, record, timeout_s, **how)
        written[0] += record.kind in (Kind.SAVE, Kind.LOST)
        return sequence

    def add(self: StepSaver, batch: Any, clones: Any, sequence: int) -> None:
        add_deferred(self, batch, clones, written[0])

    with mock.patch.object(LogWriter, "append", count), mock.patch.object(StepSaver, "_add_deferred", add):
        yield


_EFFECTS = ("after_slot_words", "after_scatter", "after_written", "before_consumed")

MUTANTS = (
    Mutant("consumed before the effect", ("after_consumed", "after_doorbell", *_EFFECTS[:-1])),
    Mutant("consumed only every few records", ("after_unpublished_save",)),
    Mutant("gather and write in one record", ("after_both",), gathers_ride_on_the_next_save, farthest=3),
    Mutant("page credit pushed before consumed", ("before_consumed",), pages_by_credit),
    Mutant("page credit pushed after consumed", ("after_consumed", "after_doorbell"), pages_by_credit),
    Mutant("the daemon allocates extents", ("before_allocated",), extents_from_the_results),
    Mutant("semaphore count as truth", _EFFECTS),
    Mutant("version as a counter", ("after_version", *_EFFECTS), versions_counted),
)
