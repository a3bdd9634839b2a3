"""The daemon's half of ``tests.crash.mutants``: consumers that break one rule of the log protocol. No torch here."""

from __future__ import annotations

from typing import Any

import posix_ipc

from stagecache_wire import layout
from stagecache_wire.records import BadRecordError, Kind, Record
from stagecached.consumer import IDLE_SLICE_S, Consumer

SPARE_WORD = layout.D_BASE + layout.PAGE // layout.WORD - 1
"""A daemon word that the real layout leaves alone: it survives a death, as a mutant's own state would."""


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
            record = self._read(done)
            self._do(record)
            if done % 8 == 0 or done == self._segments.head:
                self._publish(done)
            elif record.kind is Kind.SAVE:
                self._point("after_unpublished_save")


class GatherThenWrite(Consumer):
    """The gathers of a SAVE come before its write: they are for the hits of the step before."""

    def _do(self, record: Record) -> None:
        if record.kind is Kind.SAVE:
            self._gather(record)
            self._save(record)
            if len(record.gathers):
                self._point("after_both")
        else:
            super()._do(record)


def credit_of(session_id: str, page: int) -> posix_ipc.Semaphore:
    """The semaphore that stands for a page in the variants with credits."""
    return posix_ipc.Semaphore(f"/crash-test.{session_id}.{page}", posix_ipc.O_CREAT, initial_value=1)


class _Credits(Consumer):
    """Posts one credit for the page of a SAVE."""

    _page: int | None = None

    def _do(self, record: Record) -> None:
        self._page = record.page if record.kind is Kind.SAVE else None
        super()._do(record)

    def _post(self) -> None:
        if self._page is not None:
            credit = credit_of(self._segments.names.session_id, self._page)
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
        if self._words[SPARE_WORD] != self._next:
            self._point("before_allocated")
            self._words[SPARE_WORD] = self._next


class CountsDoorbells(Consumer):
    """One record for each time that the doorbell was rung; the words are not looked at otherwise."""

    def _run(self) -> None:
        self._words[layout.D_ASLEEP] = 1
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


class CountsVersions(Consumer):
    """The version of a slot is how many steps wrote, not which record did."""

    def _do(self, record: Record) -> None:
        if record.kind in (Kind.SAVE, Kind.LOST):
            self._words[SPARE_WORD] += 1
        if record.kind in (Kind.SAVE, Kind.LOST, Kind.RESET):
            self._point("after_version")
            record.sequence = self._words[SPARE_WORD]
        super()._do(record)


CONSUMERS: dict[str, type[Consumer]] = {
    "consumed before the effect": ConsumedFirst,
    "consumed only every few records": ConsumedSeldom,
    "gather and write in one record": GatherThenWrite,
    "page credit pushed before consumed": CreditBeforeConsumed,
    "page credit pushed after consumed": CreditAfterConsumed,
    "the daemon allocates extents": AllocatesExtents,
    "semaphore count as truth": CountsDoorbells,
    "version as a counter": CountsVersions,
}
