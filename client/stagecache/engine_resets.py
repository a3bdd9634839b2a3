"""Rows were lost behind hashes that the engine has published: ask its scheduler to forget them, instead of failing hits
until they are evicted (W8).

The way is the daemon: Reset by a worker tells the scheduler-side shims of its own stage, which reset the engine's
prefix cache before the next step; their epoch then comes back with the scheduler output.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from typing import Final

from stagecache.errors import StageCacheError
from stagecache.rpc import Rpc
from stagecache_wire.v1 import stagecache_pb2 as pb

logger = logging.getLogger("stagecache")

ASK_TIMEOUT_S: Final = 5.0
GIVE_UP_S: Final = 30.0
"""How long it is asked again where no scheduler watches: after an outage its shim comes back some time later."""
RETRY_S: Final = 0.5
MIN_INTERVAL_S: Final = 5.0
"""Between two resets, so that steps which are lost one after another do not cost all prefix caching."""


class EngineResets:
    """Asks from a thread of its own; what is lost meanwhile is answered by one more reset.

    Attributes:
        asked: how often the daemon passed it on.
    """

    def __init__(
        self, rpc: Rpc, stage: str, *, give_up_s: float = GIVE_UP_S, min_interval_s: float = MIN_INTERVAL_S
    ) -> None:
        self.asked = 0
        self._rpc = rpc
        self._stage = stage
        self._give_up_s = give_up_s
        self._min_interval_s = min_interval_s
        self._lock = threading.Lock()
        self._wanted = ""
        self._asking = False

    def ask(self, cause: str) -> None:
        """Ask for a reset of the stage's engine. Returns at once; the engine thread may call it."""
        with self._lock:
            self._wanted = cause
            if self._asking:
                return
        threading.Thread(target=self._run, name="stagecache-ask-reset", daemon=True).start()

    def _run(self) -> None:
        with self._lock:  # In here, so that an interrupt which keeps the thread from starting keeps nobody from asking.
            if self._asking:
                return
            self._asking = True
        while True:
            with self._lock:
                cause, self._wanted = self._wanted, ""
                if not cause:
                    self._asking = False
                    return
            self._ask(cause)
            time.sleep(self._min_interval_s)

    def _ask(self, cause: str) -> None:
        deadline = time.monotonic() + self._give_up_s
        while True:
            try:
                self._rpc.reset(pb.ResetRequest(stage=self._stage, cause=cause), ASK_TIMEOUT_S)
                self.asked += 1
                return
            except StageCacheError as error:
                if self._rpc.closed:
                    return
                if time.monotonic() >= deadline:
                    logger.warning("stagecache: the engine was not asked to forget its hashes (%s): %s", cause, error)
                    return
            time.sleep(RETRY_S * random.uniform(0.5, 1.5))
