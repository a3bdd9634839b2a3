"""The sender: the thread that publishes records where rows come from a device, each after the copies that it announces.

The engine thread gives a record its sequence and goes on. The sender takes the records in that order, waits until
their copies have landed, and publishes. So it is the one thread that appends to the log, and a record of
``new_step_starts`` never overtakes the SAVE before it. A sequence that was given is always published, unless the
session ends: a record whose copies failed becomes the one that says so (W5, W8).
"""

from __future__ import annotations

import contextlib
import contextvars
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Final

import torch

from stagecache.copies import Copies
from stagecache.errors import SessionFailedError
from stagecache.log import WAIT_SLICE_S, LogFullError
from stagecache.streams import Streams
from stagecache.writes import IllegalTransitionError, Write, WriteState
from stagecache_wire.records import Kind, Loggable, Record, encode

if TYPE_CHECKING:
    from stagecache.session import Session

logger = logging.getLogger("stagecache")

MOST_WAITING: Final = 1024
"""Records that may wait for the sender; then the engine thread waits for it."""
QUEUE_TIMEOUT_S: Final = 30.0


@dataclass(slots=True)
class Lost:
    """A record whose copies failed. kind: of the record that was to be; writes: what it would have written."""

    kind: Kind
    rows: int
    writes: Sequence[Write]
    error: Exception


@dataclass(slots=True)
class _Item:
    record: Loggable | None = None
    copies: Copies | None = None
    writes: Sequence[Write] = ()
    urgent: bool = True
    context: contextvars.Context | None = None
    action: Callable[[], None] | None = None
    last: bool = False


class LogSender:
    """Publishes a session's records. ``append``, ``track`` and ``then`` are for the engine thread.

    As seen by who reads the log it stands in for the writer: ``head`` is the last sequence given, which may not be
    published yet.

    Attributes:
        failures: records whose copies failed, for the engine thread to take.
        broken: why the sender publishes nothing any more; None while it does.
    """

    def __init__(self, session: Session, streams: Streams) -> None:
        self.failures: deque[Lost] = deque()
        self.broken: SessionFailedError | None = None
        self.head = session.log.head
        self._session = weakref.ref(session)  # It holds us; its mapping goes with it.
        self._log = session.log
        self._streams = streams
        self._inbox: SimpleQueue[_Item] = SimpleQueue()
        self._ahead: deque[_Item] = deque()
        self._give_up_at: float | None = None
        self._thread = threading.Thread(target=self._run, name="stagecache-sender", daemon=True)

    def start(self) -> None:
        """Start the thread; whoever does sees to it that ``stop`` follows."""
        self._thread.start()

    @property
    def consumed(self) -> int:
        return self._log.consumed

    def listen(self, slice_s: float) -> None:
        """As the log's: sleep until the daemon rings, for ``slice_s`` seconds at most."""
        self._log.listen(slice_s)

    def append(
        self, record: Loggable, copies: Copies | None = None, writes: Sequence[Write] = (), *, urgent: bool = True
    ) -> int:
        """Give a record its sequence; it is published once ``copies`` have landed, and all records before it. Its
        arrays must not change any more.

        Raises:
            LogFullError: the record is larger than the log can hold.
            CallDeadlineError, DaemonLostError, SessionFailedError: too many records wait, and none goes.
        """
        longest = self._log.longest
        most = record.most_bytes()
        if most > longest and (size := len(encode(record)[1])) > longest:
            raise LogFullError(f"a record of {size} bytes does not fit the ring of {longest}")
        if self.head - self._log.head >= MOST_WAITING and (session := self._session()) is not None:
            session.wait(lambda: self.head - self._log.head < MOST_WAITING, QUEUE_TIMEOUT_S, "the sender", kind="log")
        record.sequence = self.head + 1
        # The trace that the record belongs to is in the context.
        item = _Item(record, copies, writes, urgent, contextvars.copy_context())
        try:
            self._inbox.put(item)
        finally:  # An interrupt right behind it changes nothing: the sequence is given.
            self.head = record.sequence
        return record.sequence

    def track(self, copies: Copies) -> None:
        """Land copies that were just started; a record that announces them follows, or none does."""
        self._inbox.put(_Item(copies=copies))

    def then(self, action: Callable[[], None]) -> None:
        """Do something behind everything given so far, on the sender thread."""
        self._inbox.put(_Item(action=action))

    def stop(self) -> None:
        """End the thread behind everything given so far; does not wait. Any thread."""
        self._inbox.put(_Item(last=True))

    def close(self, drain_s: float) -> bool:
        """Publish what was given, for ``drain_s`` seconds at most, and end the thread. Whether it ended."""
        self._give_up_at = time.monotonic() + drain_s
        self.stop()
        self._thread.join(drain_s + 10 * WAIT_SLICE_S)
        return not self._thread.is_alive()

    # ---------------------------------------------------------- sender thread

    def _run(self) -> None:
        with torch.inference_mode():  # So that tensors made in or out of it may be written.
            try:
                self._streams.enter_thread()
                while not (item := self._take()).last:
                    self._work_off(item)
            except BaseException as error:
                self._break(error)
                while not (item := self._take()).last:
                    if item.copies is not None:
                        item.copies.land()

    def _take(self) -> _Item:
        return self._ahead.popleft() if self._ahead else self._inbox.get()

    def _work_off(self, item: _Item) -> None:
        copies = item.copies
        if copies is not None:
            copies.land()
        if item.record is not None and item.context is not None:
            item.context.run(self._announce, item, item.record)
        if item.action is not None:
            item.action()

    def _announce(self, item: _Item, record: Loggable) -> None:
        """Publish the record of an item whose copies are over."""
        error = item.copies.error if item.copies is not None else None
        if error is not None:
            self.failures.append(Lost(record.kind, record.rows, item.writes, error))
            self._publish(_lost_form(record), urgent=True)
        elif self._publish(record, urgent=item.urgent):
            # The engine thread may have failed the step meanwhile.
            with contextlib.suppress(IllegalTransitionError):
                for write in item.writes:
                    write.advance(WriteState.HOST_READY, sequence=record.sequence)

    def _publish(self, record: Loggable, *, urgent: bool) -> bool:
        """Append to the log, waiting for room as long as the session lives. Whether it was."""
        sequence = record.sequence
        if sequence != self._log.head + 1 and not self._is_over():
            raise AssertionError(f"record {sequence} was to follow record {self._log.head}")
        while not self._is_over():
            try:
                self._log.append(record, 0.0, urgent=urgent)
                return True
            except LogFullError:
                self._land_ahead()
                if self._give_up_at is not None and time.monotonic() > self._give_up_at:
                    return False
                self._log.listen(WAIT_SLICE_S)
        return False

    def _is_over(self) -> bool:
        session = self._session()
        return session is None or session.has_ended()

    def _land_ahead(self) -> None:
        """The log is full: steps behind this record are still to be handed out."""
        with contextlib.suppress(Empty):
            while True:
                self._ahead.append(self._inbox.get_nowait())
        for item in self._ahead:
            if item.copies is not None and item.copies.is_near():
                item.copies.land()

    def _break(self, error: BaseException) -> None:
        logger.error("stagecache: the sender stopped; hits fail until the worker is restarted", exc_info=error)
        self.broken = SessionFailedError(f"the sender thread stopped: {error!r}.", remedy="Restart the worker.")


def _lost_form(record: Loggable) -> Record:
    """What stands in the log, under the same sequence, in place of a record whose rows never came (W5, W8)."""
    assert isinstance(record, Record)
    if record.kind is Kind.SAVE:
        return Record(record.sequence, Kind.LOST, rows=record.rows, unit_runs=record.unit_runs, runs=record.runs)
    assert record.kind is Kind.FLUSH
    record.kind = Kind.FAIL
    return record
