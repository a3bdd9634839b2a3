"""Copies of one step, or of one flush, on their way from the device to host memory."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from stagecache.arena import Extent
from stagecache.errors import CallDeadlineError, FailedWriteError
from stagecache.host_slab import HostSlab
from stagecache.interrupts import Latch
from stagecache.streams import CopyPair, StreamEvent, Streams


class Copies:
    """What was given to the copy stream, or is to be. Nothing reads its host memory before it has *landed*.

    It holds the sources until then: freed earlier, their memory could be the next forward's. Copies into memory that is
    not pinned would block, so they are given to the copy stream by the thread that lands them.

    Attributes:
        error: why the copies failed; None where they did not.
    """

    def __init__(
        self,
        streams: Streams,
        ready: StreamEvent,
        pairs: Sequence[CopyPair],
        late: Sequence[CopyPair],
        slab: HostSlab,
        extents: list[Extent],
    ) -> None:
        """ready: event of the compute stream behind all sources; the copy stream waits for it already. pairs: given to
        the copy stream by ``start``. late: given to it by ``land``. extents: of the slab, used by both.
        """
        self.error: Exception | None = None
        self._streams = streams
        self._ready = ready
        self._pairs = pairs
        self._late = late
        self._event: StreamEvent | None = None
        self._slab = slab
        self._extents = extents
        self._released = False
        self._lock = threading.Lock()
        self._landed = Latch()

    def start(self) -> None:
        """Give the copies to the copy stream; engine thread. A failure is kept in ``error``."""
        try:
            if self._pairs:
                self._streams.copy(self._pairs)
        except Exception as error:
            self.error = error
        try:
            self._event = self._streams.mark_copies()
        except Exception as error:
            self.error = self.error or error

    @property
    def done(self) -> bool:
        """Whether they landed, or failed: no copy of them is on its way."""
        return self._landed.is_set()

    def is_near(self) -> bool:
        """Whether ``land`` would wait for no more than the copies themselves."""
        try:
            return self._ready.done()
        except Exception:
            return True  # ``land`` will meet the error.

    def land(self) -> None:
        """Wait until all is in host memory. Sender thread; twice does nothing. A failure is kept in ``error``."""
        if self._landed.is_set():
            return
        try:
            if self._late and self.error is None:
                self._streams.copy(self._late)
                self._event = self._streams.mark_copies()
            if self._event is not None:
                self._event.wait()
        except Exception as error:
            self.error = self.error or error
        self._pairs = self._late = ()
        with self._lock:
            self._landed.set()
            if self._released:
                self._slab.give_back(self._extents)

    def wait(self, timeout_s: float, what: str) -> None:
        """Wait until they landed, on any thread.

        Raises:
            CallDeadlineError: not within ``timeout_s`` seconds; names ``what``.
            FailedWriteError: they failed.
        """
        if not self._landed.wait(timeout_s):
            raise CallDeadlineError(f"{what}: rows are not in host memory after {timeout_s:g} s; is the device stuck?")
        if self.error is not None:
            raise FailedWriteError(f"{what}: the copy to host memory failed: {self.error}") from self.error

    def release(self) -> None:
        """Nobody reads the slab's part of it any more. Any thread; twice does nothing."""
        with self._lock:
            before, self._released = self._released, True
            if not before and self._landed.is_set():
                self._slab.give_back(self._extents)
