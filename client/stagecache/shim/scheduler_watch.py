"""The scheduler's connection to the daemon: it hears when an operator, or a worker that lost rows, wants a reset.

A thread of its own, so the engine never waits for it. While no daemon is there it asks again, with a jittered backoff;
losing the connection says nothing and resets nothing.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from stagecache.rpc import Watch

BACKOFF_S: Final = (0.05, 0.1, 0.2, 0.5, 1.0)
STOP_TIMEOUT_S: Final = 2.0


class SchedulerWatch:
    """Listens to the resets of one stage.

    Args:
        socket: the daemon's socket.
        stage: name of the stage, as its workers attach by it.
        on_reset: called on the watch's thread with the cause of each reset.

    Attributes:
        connected: the daemon has answered, and the stream is open.
        connections: how often that began.
        last_error: why the last try failed; empty once one did not.
    """

    def __init__(self, socket: str, stage: str, on_reset: Callable[[str], None]) -> None:
        self.connected = False
        self.connections = 0
        self.last_error = ""
        self._socket = socket
        self._stage = stage
        self._on_reset = on_reset
        self._stopped = threading.Event()
        self._open: Watch | None = None
        self._thread = threading.Thread(target=self._run, name="stagecache-scheduler", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the stream and the thread; may be called again."""
        self._stopped.set()
        opened = self._open
        if opened is not None:
            opened.cancel()
        if self._thread.is_alive() and self._thread is not threading.current_thread():  # A finalizer runs anywhere.
            self._thread.join(STOP_TIMEOUT_S)

    def _run(self) -> None:
        # gRPC is imported here: engines without a daemon, and the processes that they fork before, do without it.
        from stagecache.errors import StageCacheError

        failures = 0
        while not self._stopped.is_set():
            connections = self.connections
            try:
                self._listen()
                self.last_error = ""
            except StageCacheError as error:
                self.last_error = str(error)
            self.connected = False
            failures = failures + 1 if self.connections == connections else 0
            self._stopped.wait(BACKOFF_S[min(failures, len(BACKOFF_S) - 1)] * random.uniform(0.5, 1.5))

    def _listen(self) -> None:
        """One connection, from the handshake to its end."""
        from stagecache.rpc import Rpc, handshake
        from stagecache_wire.v1 import stagecache_pb2 as pb

        with Rpc(handshake(self._socket, "scheduler")) as rpc:
            self._open = rpc.watch(self._stage)
            if self._stopped.is_set():
                self._open.cancel()
            for event in self._open:
                if event.kind == pb.WatchEvent.KIND_HELLO:
                    self.connected = True
                    self.connections += 1
                elif event.kind == pb.WatchEvent.KIND_RESET:
                    self._on_reset(event.cause or "asked for by an operator")
