"""A daemon of one's own: started as a child on a private socket, gone when its owner is.

with LocalDaemon(directory) as daemon:
    os.environ["STAGECACHE_SOCKET"] = str(daemon.socket)
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from stagecache.control import ping
from stagecache.errors import DaemonUnavailableError, StageCacheError
from stagecache.local_engine import file_tail

#: Has the kernel send SIGTERM to the child when its parent ends (PR_SET_PDEATHSIG is 1), then runs the daemon.
_START = (
    "import ctypes, runpy, signal; ctypes.CDLL(None).prctl(1, signal.SIGTERM, 0, 0, 0); "
    "runpy.run_module('stagecached', run_name='__main__', alter_sys=True)"
)
#: Bytes of a Unix socket's path, less what the daemon's peer socket (SOCKET.d/peer.sock) has more.
_SOCKET_PATH_LIMIT = 107 - len(".d/peer.sock")
_SHORT_DIRECTORY = "/tmp"


class LocalDaemon:
    """Starts ``stagecached`` and stops it by its own process id.

    The child is in a session of its own, so Ctrl-C on a terminal reaches only its owner, which then stops it; should
    the owner be killed, the kernel terminates the child.

    Args:
        directory: existing directory for the socket and the log (``stagecached.log``). Where its path is too long for
            a Unix socket, the socket gets a directory of its own below /tmp.
        arguments: further arguments of stagecached.
        start_timeout_s: how long it may take until it serves.
        stop_timeout_s: how long it may take to stop before it is killed.
    """

    def __init__(
        self,
        directory: Path,
        *,
        arguments: Sequence[str] = (),
        start_timeout_s: float = 20.0,
        stop_timeout_s: float = 10.0,
    ) -> None:
        self.socket = directory / "stagecached.sock"
        self.log = directory / "stagecached.log"
        self.start_s = 0.0
        self._arguments = tuple(arguments)
        self._start_timeout_s = start_timeout_s
        self._stop_timeout_s = stop_timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._socket_directory: Path | None = None

    @property
    def pid(self) -> int | None:
        """Process id while it runs."""
        process = self._process
        return process.pid if process is not None and process.poll() is None else None

    def __enter__(self) -> LocalDaemon:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Start it and wait until it serves.

        Raises:
            DaemonUnavailableError: it ended, or does not serve in time; the text has the end of its log.
        """
        if len(os.fsencode(self.socket)) > _SOCKET_PATH_LIMIT:
            self._socket_directory = Path(tempfile.mkdtemp(prefix="stagecache-", dir=_SHORT_DIRECTORY))
            self.socket = self._socket_directory / self.socket.name
        started = time.monotonic()
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _START, "--socket", str(self.socket), *self._arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            self._wait_ready(self._process, started + self._start_timeout_s)
        except BaseException:
            self.stop()
            raise
        self.start_s = time.monotonic() - started

    def _wait_ready(self, process: subprocess.Popen[bytes], deadline: float) -> None:
        while True:
            if process.poll() is not None:
                text = f"stagecached ended with status {process.returncode}:\n{file_tail(self.log, 15)}"
                raise DaemonUnavailableError(text)
            try:
                ping(self.socket, timeout_s=1.0)
                return
            except StageCacheError as error:
                if time.monotonic() > deadline:
                    raise DaemonUnavailableError(
                        f"stagecached does not serve after {self._start_timeout_s:.0f} s:\n{file_tail(self.log, 15)}"
                    ) from error
            time.sleep(0.02)

    def stop(self) -> None:
        """Stop it gracefully, and kill it when it does not stop in time; does nothing when it does not run."""
        process, self._process = self._process, None
        if process is not None and process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(self._stop_timeout_s)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self._socket_directory is not None:
            shutil.rmtree(self._socket_directory, ignore_errors=True)
