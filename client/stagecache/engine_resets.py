"""Rows were lost behind hashes that the engine has published: ask its scheduler to forget them, instead of failing hits
until they are evicted (W8).

The way is the daemon: Reset by a worker tells the scheduler-side shims of its own stage, which reset the engine's
prefix cache before the next step; their epoch then comes back with the scheduler output.
"""

from __future__ import annotations

import logging
import threading
from typing import Final

from stagecache.errors import StageCacheError
from stagecache.rpc import Rpc
from stagecache_wire.v1 import stagecache_pb2 as pb

logger = logging.getLogger("stagecache")

ASK_TIMEOUT_S: Final = 5.0
TRIES: Final = 5


class EngineResets:
    """Asks from a thread of its own, one at a time; what is lost meanwhile is covered by the same reset or the next.

    Attributes:
        asked: how often the daemon passed it on.
    """

    def __init__(self, rpc: Rpc, stage: str) -> None:
        self.asked = 0
        self._rpc = rpc
        self._stage = stage
        self._thread: threading.Thread | None = None

    def ask(self, cause: str) -> None:
        """Ask for a reset of the stage's engine. Returns at once; the engine thread may call it."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._ask, args=(cause,), name="stagecache-ask-reset", daemon=True)
            self._thread.start()

    def _ask(self, cause: str) -> None:
        for _ in range(TRIES):
            try:
                self._rpc.reset(pb.ResetRequest(stage=self._stage, cause=cause), ASK_TIMEOUT_S)
                self.asked += 1
                return
            except StageCacheError as error:
                last = error
        logger.warning("stagecache: the engine was not asked to forget its prefix cache (%s): %s", cause, last)
