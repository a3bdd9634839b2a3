"""Pinned host memory: which mappings are registered with the device, and that they are before they go away."""

from __future__ import annotations

import ctypes
import logging
import mmap
import threading
import weakref
from typing import Any, Final

from stagecache.streams import PinError, Streams

logger = logging.getLogger("stagecache")

MAX_CHUNK: Final = 64 << 30
"""Most bytes of one registration."""


class Pins:
    """Mappings that are pinned for copies from the device. Each is held until it is unregistered, so that no registered
    memory is ever unmapped.

    Attributes:
        pinned_bytes, unpinned_bytes: of the mappings held; unpinned are those that the runtime refused.
        cause: why memory is unpinned; empty where none is.
    """

    def __init__(self, streams: Streams, max_chunk: int = MAX_CHUNK) -> None:
        self.pinned_bytes = 0
        self.unpinned_bytes = 0
        self.cause = ""
        self._streams = streams
        self._max_chunk = max_chunk
        self._held: dict[int, _Held] = {}
        self._ranges: tuple[tuple[int, int], ...] = ()
        """(start, end) of what is pinned; changed as a whole, so that ``covers`` needs no lock."""
        self._lock = threading.Lock()
        weakref.finalize(self, _unregister_all, streams, self._held).atexit = False

    def add(self, memory: mmap.mmap, unit: int) -> bool:
        """Pin a mapping. unit: bytes that one copy may touch; a chunk ends at a multiple of them. False: unpinned.

        One that is held already stays as it is.
        """
        size = len(memory)
        anchor = (ctypes.c_char * size).from_buffer(memory)
        address = ctypes.addressof(anchor)
        with self._lock:
            if address in self._held:
                return bool(self._held[address].chunks)
        chunk = max(self._max_chunk // unit, 1) * unit
        done: list[int] = []
        try:
            for offset in range(0, size, chunk):
                self._streams.pin(address + offset, min(chunk, size - offset))
                done.append(address + offset)
        except PinError as error:
            _unregister(self._streams, done)
            if not self.cause:
                logger.warning(
                    "stagecache: host memory of %d bytes is not pinned: %s. Copies from the device take a detour "
                    "through the driver's own memory, on the sender thread.",
                    size,
                    error,
                )
            self.cause = str(error)
            done = []
        except BaseException:  # An interrupt: it is pinned by whoever tries again.
            _unregister(self._streams, done)
            raise
        with self._lock:
            self._held[address] = _Held(anchor, size, done)
            self._count()
        return bool(done)

    def covers(self, address: int) -> bool:
        """Whether memory at ``address``, of a copy that lies in one mapping, is pinned."""
        return any(start <= address < end for start, end in self._ranges)

    def remove(self, memory: mmap.mmap) -> None:
        """Unpin a mapping and let go of it; any thread. No copy into it is on its way. One that was never added is left
        alone.
        """
        anchor = (ctypes.c_char * len(memory)).from_buffer(memory)
        with self._lock:
            held = self._held.pop(ctypes.addressof(anchor), None)
            self._count()
        if held is not None:
            _unregister(self._streams, held.chunks)

    def close(self) -> None:
        """Wait for the copy stream and unpin everything."""
        _unregister_all(self._streams, self._held)
        self._count()

    def _count(self) -> None:
        held = self._held.items()
        self._ranges = tuple((start, start + one.size) for start, one in held if one.chunks)
        self.pinned_bytes = sum(one.size for _, one in held if one.chunks)
        self.unpinned_bytes = sum(one.size for _, one in held if not one.chunks)


class _Held:
    """A mapping. anchor: keeps it mapped. chunks: addresses that are registered; none where it is unpinned."""

    __slots__ = ("anchor", "chunks", "size")

    def __init__(self, anchor: Any, size: int, chunks: list[int]) -> None:
        self.anchor = anchor
        self.size = size
        self.chunks = chunks


def _unregister(streams: Streams, addresses: list[int]) -> None:
    for address in addresses:
        try:
            streams.unpin(address)
        except PinError as error:
            logger.warning("stagecache: memory stays pinned: %s", error)


def _unregister_all(streams: Streams, held: dict[int, _Held]) -> None:
    if any(one.chunks for one in held.values()):
        try:
            streams.drain()
        except RuntimeError as error:
            logger.warning("stagecache: the copy stream: %s", error)
    for one in list(held.values()):
        _unregister(streams, one.chunks)
    held.clear()
