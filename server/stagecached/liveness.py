"""Whether a worker lives: its pidfd says so, else its lock; never a clock, and never a lost connection alone.

A worker whose pidfd the daemon has is watched by the event loop: its exit ends the session at once. One without (an
old kernel, or a session that was adopted and whose worker has not come back yet) is looked at every ``poll_s``
seconds: its lock is free once it is dead.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from stagecache_wire import locks

POLL_S: Final = 0.5


@dataclass
class _Watched:
    lock: Path
    pidfd: int | None = None
    locked: bool = False
    """The worker was seen to hold its lock: from then on a free lock says that it is dead."""


class Liveness:
    """Calls ``on_dead(session_id, why)`` once for each worker that died. All on the event loop."""

    def __init__(
        self,
        on_dead: Callable[[str, str], None],
        *,
        poll_s: float = POLL_S,
        is_held: Callable[[Path], bool] = locks.is_held,
    ) -> None:
        self._on_dead = on_dead
        self._poll_s = poll_s
        self._is_held = is_held
        self._watched: dict[str, _Watched] = {}

    def watch(self, session_id: str, lock: Path, pidfd: int | None) -> None:
        """Watch a worker; a pidfd given again replaces the earlier one. The descriptor is owned here from now on."""
        watched = self._watched.setdefault(session_id, _Watched(lock))
        if pidfd is None:
            return
        self._drop_pidfd(watched)
        os.set_inheritable(pidfd, False)
        watched.pidfd = pidfd
        asyncio.get_running_loop().add_reader(pidfd, self._dead, session_id, "its process ended")

    def holds_lock(self, session_id: str) -> bool:
        """Whether the worker holds its lock now, as it must from before it attaches."""
        watched = self._watched.get(session_id)
        if watched is None or not self._is_held(watched.lock):
            return False
        watched.locked = True
        return True

    def forget(self, session_id: str) -> None:
        """Stop watching. No error where it is not watched."""
        watched = self._watched.pop(session_id, None)
        if watched is not None:
            self._drop_pidfd(watched)

    def look(self, session_id: str) -> None:
        """Look now: a lost stream is a reason to look, and no more."""
        watched = self._watched.get(session_id)
        if watched is not None and watched.pidfd is None and watched.locked and not self._is_held(watched.lock):
            self._dead(session_id, "its lock is free")

    async def poll(self) -> None:
        """Look at every worker without pidfd, again and again; ends when cancelled."""
        while True:
            await asyncio.sleep(self._poll_s)
            for session_id in list(self._watched):
                self.look(session_id)

    def close(self) -> None:
        for session_id in list(self._watched):
            self.forget(session_id)

    def _dead(self, session_id: str, why: str) -> None:
        self.forget(session_id)
        self._on_dead(session_id, why)

    @staticmethod
    def _drop_pidfd(watched: _Watched) -> None:
        if watched.pidfd is not None:
            asyncio.get_running_loop().remove_reader(watched.pidfd)
            os.close(watched.pidfd)
            watched.pidfd = None
