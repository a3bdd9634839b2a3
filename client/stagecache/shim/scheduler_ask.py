"""A worker's way to its scheduler when rows are lost (W8).

Hits on lost rows fail until their blocks are evicted; the engine can forget them sooner. Where the scheduler shares
the worker's process it is told directly. Otherwise the daemon tells it: the worker asks as any observer may, and the
scheduler's own connection (``scheduler_watch``) hears of it. Either way the new epoch comes back with the scheduler
output, in its place among the steps.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from typing import Final

from stagecache.errors import StageCacheError
from stagecache.shim.scheduler import request_reset

logger = logging.getLogger("vllm.stagecache")

MIN_INTERVAL_S: Final = 5.0
"""Between two resets that one worker asks for: rows that are lost step after step must not cost all prefix caching."""
GIVE_UP_S: Final = 30.0
"""How long a daemon that is not there, or that has no scheduler yet, is asked again."""
_RETRY_S: Final = 0.5


class ResetAsker:
    """Has the engine of one stage forget its prefix cache; calling it returns at once, from any thread.

    Args:
        socket: the daemon's socket.
        stage: name of the stage, as its workers attach by it.
        min_interval_s: seconds between two resets; what is lost meanwhile is answered by the next.
        give_up_s: seconds after which an ask that the daemon does not take is dropped, with a warning.
    """

    def __init__(
        self, socket: str, stage: str, *, min_interval_s: float = MIN_INTERVAL_S, give_up_s: float = GIVE_UP_S
    ) -> None:
        self._socket = socket
        self._stage = stage
        self._min_interval_s = min_interval_s
        self._give_up_s = give_up_s
        self._lock = threading.Lock()
        self._causes: list[str] = []
        self._busy = False
        self._stopped = threading.Event()

    def __call__(self, cause: str) -> None:
        with self._lock:
            self._causes.append(cause)
            if self._busy or self._stopped.is_set():
                return
            self._busy = True
        untold = self._tell_here()
        threading.Thread(target=self._run, args=(untold,), name="stagecache-reset", daemon=True).start()

    def stop(self) -> None:
        """Ask no more; for when the worker detaches."""
        self._stopped.set()

    def _tell_here(self) -> str:
        """Tell the schedulers of this process what was asked for until now; the cause, where there are none."""
        with self._lock:
            causes, self._causes = self._causes, []
        cause = ", ".join(dict.fromkeys(causes))
        return "" if request_reset(cause, self._stage) else cause

    def _run(self, untold: str) -> None:
        """Deliver what was asked, then what is asked meanwhile, until nothing is left to ask."""
        while not self._stopped.is_set():
            if untold:
                self._deliver(untold)
            self._stopped.wait(self._min_interval_s)
            with self._lock:
                self._busy = bool(self._causes)
                if not self._busy:
                    return
            untold = self._tell_here()

    def _deliver(self, cause: str) -> None:
        from stagecache.control import connect_observer

        deadline = time.monotonic() + self._give_up_s
        while not self._stopped.is_set():
            try:
                with connect_observer(self._socket) as daemon:
                    daemon.reset(self._stage, cause=cause)
                return
            except StageCacheError as error:
                if time.monotonic() >= deadline:
                    logger.warning(
                        "stagecache: rows of stage %s were lost (%s), and its scheduler cannot be told: hits on them "
                        "fail until they are evicted. %s",
                        self._stage,
                        cause,
                        error,
                    )
                    return
            self._stopped.wait(_RETRY_S * random.uniform(0.5, 1.5))
