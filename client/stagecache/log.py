"""The worker's end of the step log: appends records, in order, and waits for what the daemon has consumed.

One thread appends (on the CPU: the engine's). Payload and entry are written first, then the entry's sequence word,
then ``head``; nothing is trusted but the words. The daemon's doorbell is rung for a record that cannot wait, and for
any while the daemon says that it is asleep; else the daemon finds it by itself within 20 ms. Whoever waits for the
daemon rings first.
"""

from __future__ import annotations

import struct
import threading
import time
from collections import deque
from typing import Final

import posix_ipc

from stagecache.errors import StageCacheError
from stagecache.interrupts import Wakeups
from stagecache.mapping import ControlWords
from stagecache_wire import layout
from stagecache_wire.fence import fence, full_fence
from stagecache_wire.records import Loggable, encode

WAIT_SLICE_S: Final = 0.02
"""Longest sleep on the doorbell before the words are read again."""


_pack_entry: Final = struct.Struct(f"{layout.ENTRY_WORDS}Q").pack_into
"""Not for a word that somebody reads meanwhile, who may see it half written; nobody reads an entry before ``head``."""

_RECLAIM_AT: Final = 64
"""Records in the ring from which on an append looks which ones were consumed."""


class LogFullError(StageCacheError):
    """The ring has no room, and the daemon did not consume in time; or the record is larger than the ring."""


class LogWriter:
    """Appends records to the log of one session.

    Attributes:
        head: sequence of the last record published.
        posts: how often the daemon's doorbell was rung.
    """

    def __init__(
        self, control: ControlWords, daemon_doorbell: posix_ipc.Semaphore, worker_doorbell: posix_ipc.Semaphore
    ) -> None:
        self._control = control
        self._words = control.words
        self._layout = control.layout
        self._entries_word = control.layout.entries_word
        self._log_entries = control.layout.log_entries
        self._ring_bytes = control.layout.payload_bytes
        self._payload_base = control.layout.payload_word * layout.WORD
        self._daemon_doorbell = daemon_doorbell
        self._worker_doorbell = worker_doorbell
        self._in_ring: deque[tuple[int, int]] = deque()
        self._position = 0
        self._tail = 0
        self._heard_until = 0
        self._listening = threading.RLock()
        """Reentrant, so that a thread may listen again which was interrupted when it had just taken it."""
        self._heard = Wakeups()
        self.head = control.words[layout.W_HEAD]
        self.posts = 0

    @property
    def consumed(self) -> int:
        return self._words[layout.D_CONSUMED]

    @property
    def longest(self) -> int:
        """Bytes of the longest payload that may be appended."""
        return self._layout.payload_bytes

    def has_room(self, payload_bytes: int) -> bool:
        """Whether a record with so long a payload may be appended now."""
        if self.head + 1 - self.consumed > self._layout.log_entries:
            return False
        self._reclaim()
        return self._start(payload_bytes) + payload_bytes - self._tail <= self._layout.payload_bytes

    def append(self, record: Loggable, timeout_s: float, *, urgent: bool = True) -> int:
        """Publish a record. Returns its sequence. urgent: ring for it even where the daemon looks by itself.

        Raises:
            LogFullError: no room within ``timeout_s`` seconds; nothing was published.
        """
        sequence = self.head + 1
        record.sequence = sequence
        words, payload = encode(record)
        size, ring, position, shared = len(payload), self._ring_bytes, self._position, self._words
        if size > ring:
            raise LogFullError(f"a record of {size} bytes does not fit the ring of {ring}")
        left = ring - position % ring
        if size > left:
            position += left
        if sequence - shared[layout.D_CONSUMED] > self._log_entries or (
            position + size - self._tail > ring and not self.has_room(size)
        ):
            self._wait_room(size, timeout_s)
            position = self._start(size)
        if size:
            offset = self._payload_base + position % ring
            self._control.bytes[offset : offset + size] = payload
        words[layout.E_PAYLOAD_POSITION] = position
        words[layout.E_SEQUENCE] = 0
        at = self._entries_word + (sequence - 1) % self._log_entries * layout.ENTRY_WORDS
        _pack_entry(self._control.bytes, layout.WORD * at, *words)
        fence()
        shared[at] = sequence
        shared[layout.W_TIMES + (sequence - 1) % layout.TIME_ENTRIES] = time.monotonic_ns()
        fence()
        shared[layout.W_HEAD] = sequence
        self.head = sequence
        self._position = position + size
        self._in_ring.append((sequence, self._position))
        if len(self._in_ring) > _RECLAIM_AT:
            self._reclaim()
        full_fence()
        if urgent or shared[layout.D_ASLEEP]:
            self.ring()
        return sequence

    def ring(self) -> None:
        """Wake the daemon, unless it was rung for all there is. Any thread."""
        head = self.head
        if self._heard_until < head:
            self._heard_until = head
            self._daemon_doorbell.release()
            self.posts += 1

    def wait_consumed(self, sequence: int, timeout_s: float) -> bool:
        """Wait until the daemon has consumed up to ``sequence``. Any thread, several at once. True if it has."""
        if self.consumed >= sequence:
            fence()
            return True
        self.ring()
        deadline = time.monotonic() + timeout_s
        while self.consumed < sequence:
            left = min(deadline - time.monotonic(), WAIT_SLICE_S)
            if left <= 0:
                return False
            self.listen(left)
        fence()
        return True

    def listen(self, slice_s: float) -> None:
        """Sleep until the daemon rings, for ``slice_s`` seconds at most. One thread listens for all."""
        if self._listening.acquire(blocking=False):
            try:
                self._worker_doorbell.acquire(slice_s)
            except (posix_ipc.BusyError, posix_ipc.SignalError):
                pass
            finally:
                self._listening.release()
                self._heard.wake()
        else:
            self._heard.sleeper()(min(slice_s, 0.002))

    def _start(self, size: int) -> int:
        """Position at which a payload would begin: it never wraps inside."""
        ring = self._layout.payload_bytes
        left = ring - self._position % ring
        return self._position if size <= left else self._position + left

    def _reclaim(self) -> None:
        consumed = self.consumed
        while self._in_ring and self._in_ring[0][0] <= consumed:
            self._tail = self._in_ring.popleft()[1]
        if not self._in_ring and self._position % self._layout.payload_bytes:
            # Nothing is in the ring: begin at its start, so that the longest payload finds room.
            self._position += -self._position % self._layout.payload_bytes
            self._tail = self._position

    def _wait_room(self, size: int, timeout_s: float) -> None:
        self.ring()
        deadline = time.monotonic() + timeout_s
        while not self.has_room(size):
            left = min(deadline - time.monotonic(), WAIT_SLICE_S)
            if left <= 0:
                raise LogFullError(
                    f"{self.head - self.consumed} records wait for the daemon, and the log has no room for another"
                )
            self.listen(left)
