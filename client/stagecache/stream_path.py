"""A session whose rows come from a device with streams: its sender, and what of its memory is pinned."""

from __future__ import annotations

import logging
import weakref
from functools import partial
from typing import TYPE_CHECKING

from stagecache.mapping import StagedKey
from stagecache.sender import LogSender
from stagecache.stream_device import StreamDevice
from stagecache_wire.geometry import page_stride

if TYPE_CHECKING:
    from stagecache.session import Session

logger = logging.getLogger("stagecache")


class StreamPath:
    """Composes session, device and sender; ``session.stream``. Engine thread only."""

    def __init__(self, session: Session, device: StreamDevice) -> None:
        """Pins arena and staging pages, and starts the sender: from here on it appends to the session's log."""
        self.device = device
        self.sender = LogSender(session, device.streams)
        weakref.finalize(self, self.sender.stop)
        self.sender.start()
        self._memory = [session.control.arena_segment.map]
        device.pins.add(self._memory[0], len(self._memory[0]))
        for key in session.keys:
            self.opened(key)
        device.on_sealed = self.sender.track

    def opened(self, key: StagedKey) -> None:
        """A key of the session: its pages are pinned."""
        self._memory.append(key.segment.map)
        self.device.pins.add(key.segment.map, page_stride(key.geometry, key.schema.row_bytes))

    def closed(self, key: StagedKey) -> None:
        """The key was given up: its pages are unpinned behind the copies that may still be on their way."""
        if key.segment.map in self._memory:
            self._memory.remove(key.segment.map)
            self.sender.then(partial(self.device.pins.remove, key.segment.map))

    def retire(self) -> None:
        """The session is over and another one takes its place: what is on its way lands, then its memory is unpinned
        and the sender ends. Waits for nothing.
        """
        for memory in self._memory:
            self.sender.then(partial(self.device.pins.remove, memory))
        self._memory.clear()
        self.sender.stop()

    def close(self, drain_s: float) -> None:
        """Publish what is on its way and unpin everything; before the session is closed."""
        if self.sender.close(drain_s):
            self.device.pins.close()
        else:  # Memory under a copy must not be unpinned.
            logger.warning("stagecache: copies from the device did not end in %g s; memory stays pinned", drain_s)
