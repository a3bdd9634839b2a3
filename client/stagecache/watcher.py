"""The session's kept-open stream: resets asked for by an operator, failures, and a daemon that comes back.

Its loss says nothing about anybody's life. After it, the watcher shakes hands again with the old credentials, so that
a restarted daemon watches this process' life by its pidfd, with a jittered backoff.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable
from typing import Final

from stagecache.errors import AbiMismatchError, StageCacheError, TokenRefusedError, UnknownSessionError
from stagecache.rpc import Rpc, Watch, handshake
from stagecache_wire.v1 import stagecache_pb2 as pb

logger = logging.getLogger("stagecache")

BACKOFF_S: Final = (0.05, 0.1, 0.2, 0.5, 1.0)


class Watcher:
    """A thread that listens. It writes plain attributes, read by the engine thread without a lock.

    Attributes:
        reset_cause: why a new epoch is asked for; None when it is not. The reader sets it back to None.
        gone: why the daemon holds the session no more; empty while it does.
        reconnects: how often the stream was lost and opened again.
    """

    def __init__(self, rpc: Rpc) -> None:
        self.reset_cause: str | None = None
        self.gone = ""
        self.reconnects = 0
        self._rpc = rpc
        self._stopped = threading.Event()
        self._watch: Watch | None = None
        self._over = False
        self._on_over: Callable[[], None] | None = None
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="stagecache-watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def when_over(self, call: Callable[[], None]) -> None:
        """Have ``call`` called once the daemon has ended the session, or now: on the watch's thread, or on this one."""
        with self._lock:
            self._on_over = call
            over = self._over
        if over:
            call()

    def stop(self) -> None:
        """End the stream and the thread."""
        self._stopped.set()
        watch = self._watch
        if watch is not None:
            watch.cancel()
        self._thread.join(2.0)

    def _run(self) -> None:
        attempt = 0
        while not self._stopped.is_set():
            try:
                self._watch = self._rpc.watch()
                if self._stopped.is_set():  # stop() came before there was a stream to cancel.
                    self._watch.cancel()
                for event in self._watch:
                    attempt = 0
                    if event.kind == pb.WatchEvent.KIND_RESET:
                        self.reset_cause = event.cause or "asked for by an operator"
                    elif event.kind == pb.WatchEvent.KIND_FAILED:
                        logger.warning("stagecache: the daemon ended this session: %s", event.cause)
                        self._tell_over()
                    elif event.kind == pb.WatchEvent.KIND_SHUTDOWN:
                        logger.warning("stagecache: the daemon stops: %s", event.cause)
            except UnknownSessionError as error:
                self._give_up(error)
            except StageCacheError:
                pass
            if self._stopped.is_set() or self.gone:
                return
            pause = BACKOFF_S[min(attempt, len(BACKOFF_S) - 1)]
            self._stopped.wait(pause * random.uniform(0.5, 1.5))
            attempt += 1
            self._shake_hands_again()

    def _shake_hands_again(self) -> None:
        credentials = self._rpc.credentials
        try:
            handshake(credentials.socket, credentials.role, session_id=credentials.session_id, token=credentials.token)
            self.reconnects += 1
        except (UnknownSessionError, AbiMismatchError, TokenRefusedError) as error:
            self._give_up(error)
        except StageCacheError:
            pass

    def _give_up(self, error: StageCacheError) -> None:
        self.gone = str(error)
        self._tell_over()  # Before the log, whose lock an interrupt of another thread may have left taken.
        logger.warning("stagecache: prefix hits fail until this worker is attached anew: %s", error)

    def _tell_over(self) -> None:
        with self._lock:
            told, self._over = self._over, True
            call = self._on_over
        if call is not None and not told:
            call()
