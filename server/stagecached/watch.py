"""Open Watch streams: who is told what.

A worker hears of its own session, a scheduler-side shim of its stage's resets, both of a shutdown. A stream that does
not read is closed rather than buffered for ever; its owner opens another and finds the state in the first event.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Final

from stagecache_wire.v1 import stagecache_pb2 as pb
from stagecached.auth import Caller

MAX_PENDING_EVENTS: Final = 64


class Watcher:
    """One open stream: events wait here until the stream has sent them."""

    def __init__(self, caller: Caller, stage: str) -> None:
        """stage: of a scheduler, the stage whose resets it wants; of a worker, its own."""
        self.caller = caller
        self.stage = stage
        self._events: asyncio.Queue[pb.WatchEvent | None] = asyncio.Queue()
        self._closed = False

    def tell(self, event: pb.WatchEvent) -> None:
        """Queue an event; past ``MAX_PENDING_EVENTS`` the stream is closed instead."""
        if self._closed:
            return
        if self._events.qsize() >= MAX_PENDING_EVENTS:
            self.close()
        else:
            self._events.put_nowait(event)

    def close(self) -> None:
        """End the stream after what is queued."""
        if not self._closed:
            self._closed = True
            self._events.put_nowait(None)

    async def events(self) -> AsyncIterator[pb.WatchEvent]:
        """Events in order, until the watcher is closed."""
        while (event := await self._events.get()) is not None:
            yield event


class WatchHub:
    """All open streams. On the event loop only."""

    def __init__(self, boot_id: int) -> None:
        self._boot_id = boot_id
        self._watchers: set[Watcher] = set()

    def open(self, caller: Caller, stage: str) -> Watcher:
        """A new stream; its first event is HELLO with the boot id."""
        watcher = Watcher(caller, stage)
        watcher.tell(self._event(pb.WatchEvent.KIND_HELLO))
        self._watchers.add(watcher)
        return watcher

    def close(self, watcher: Watcher) -> None:
        self._watchers.discard(watcher)
        watcher.close()

    def schedulers(self, stage: str | None = None) -> int:
        """Scheduler-side shims that watch ``stage``, or any."""
        return len(self._schedulers(stage))

    def reset_schedulers(self, stage: str, cause: str) -> int:
        """Ask the schedulers of a stage for a new epoch. Returns how many were told."""
        told = self._schedulers(stage)
        for watcher in told:
            watcher.tell(self._event(pb.WatchEvent.KIND_RESET, cause))
        return len(told)

    def reset_session(self, session_id: str, cause: str) -> None:
        """Ask a worker itself for a new epoch."""
        for watcher in self._of_session(session_id):
            watcher.tell(self._event(pb.WatchEvent.KIND_RESET, cause))

    def session_failed(self, session_id: str, cause: str) -> None:
        """Tell a worker that a bad record ended its session."""
        for watcher in self._of_session(session_id):
            watcher.tell(self.failed_event(cause))

    def failed_event(self, cause: str) -> pb.WatchEvent:
        return self._event(pb.WatchEvent.KIND_FAILED, cause, pb.REASON_SESSION_FAILED)

    def session_ended(self, session_id: str) -> None:
        """End the streams of a session that is no more."""
        for watcher in self._of_session(session_id):
            watcher.close()

    def shutdown(self, cause: str) -> None:
        """Tell everybody, and end all streams."""
        for watcher in self._watchers:
            watcher.tell(self._event(pb.WatchEvent.KIND_SHUTDOWN, cause, pb.REASON_SHUTTING_DOWN))
            watcher.close()

    def _schedulers(self, stage: str | None) -> list[Watcher]:
        return [w for w in self._watchers if w.caller.role == "scheduler" and stage in (None, w.stage)]

    def _of_session(self, session_id: str) -> list[Watcher]:
        return [w for w in self._watchers if w.caller.role == "worker" and w.caller.session_id == session_id]

    def _event(
        self, kind: pb.WatchEvent.Kind, cause: str = "", reason: pb.Reason = pb.REASON_UNSPECIFIED
    ) -> pb.WatchEvent:
        return pb.WatchEvent(kind=kind, boot_id=self._boot_id, cause=cause, reason=reason)
