"""A daemon as an operator runs it: a process of its own, on a socket of its own, that can be killed and started again.

Nothing here waits a fixed time: every wait polls something true and has a deadline.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from stagecache.control import ping
from stagecache.errors import StageCacheError
from stagecache_wire.names import RunPaths
from stagecache_wire.shm import PREFIX, SHM_DIRECTORY

START_TIMEOUT_S = 20.0
STOP_TIMEOUT_S = 20.0
DAEMON = (sys.executable, "-m", "stagecached")

Result = TypeVar("Result")


def poll_until(look: Callable[[], Result], what: str, timeout_s: float = 10.0) -> Result:
    """The first true answer of ``look``; fails past the deadline, naming what was waited for."""
    deadline = time.monotonic() + timeout_s
    while not (answer := look()):
        assert time.monotonic() < deadline, f"{what}: not within {timeout_s} s"
        time.sleep(0.005)
    return answer


class DaemonProcess:
    """``python -m stagecached`` on ``folder/d.sock``.

    Attributes:
        start_s: seconds from the start of the process until it served, of the last start, without those in which it
            was ready to run and other processes had the CPU.
    """

    def __init__(
        self,
        folder: Path,
        *arguments: str,
        environment: Mapping[str, str] | None = None,
        program: Sequence[str] = DAEMON,
    ) -> None:
        self.socket = folder / "d.sock"
        self.log_file = folder / "daemon.log"
        self.arguments = arguments
        self.program = program
        self.environment = dict(environment or {})
        self.start_s = 0.0
        self._process: subprocess.Popen[bytes] | None = None
        self._node = ""

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def log(self) -> str:
        return self.log_file.read_text()

    @property
    def paths(self) -> RunPaths:
        return RunPaths.of(self.socket)

    def start(self) -> None:
        """Start it and wait until it says that it serves."""
        started = time.monotonic()
        with self.log_file.open("ab") as log:
            self._process = subprocess.Popen(
                [*self.program, "--socket", str(self.socket), *self.arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **self.environment},
            )
        poll_until(self._serves, "the daemon to serve", START_TIMEOUT_S)
        self.start_s = time.monotonic() - started - self._waited_for_cpu_s()
        self._node = self.paths.node

    def _waited_for_cpu_s(self) -> float:
        try:
            return int(Path(f"/proc/{self.pid}/schedstat").read_text().split()[1]) / 1e9
        except FileNotFoundError:
            return 0.0

    def _serves(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, f"the daemon ended with {self._process.returncode}:\n{self.log}"
        try:
            ping(self.socket, timeout_s=2.0)
        except StageCacheError:
            return False
        return True

    def kill(self) -> None:
        """SIGKILL; returns once it is gone."""
        self._end(signal.SIGKILL)

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Ask it to stop; its exit status."""
        return self._end(number)

    def ended(self) -> int:
        """The exit status of a daemon that ends by itself; waits for that."""
        assert self._process is not None
        status = self._process.wait(STOP_TIMEOUT_S)
        self._process = None
        return status

    def restart(self) -> None:
        """SIGKILL, and a new daemon on the same socket."""
        self.kill()
        self.start()

    def _end(self, number: signal.Signals) -> int:
        process, self._process = self._process, None
        if process is None:
            return 0
        if process.poll() is None:
            process.send_signal(number)
        try:
            return process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise AssertionError(f"the daemon did not stop within {STOP_TIMEOUT_S} s:\n{self.log}") from None

    def shm_files(self) -> list[str]:
        """Names of everything of this daemon in /dev/shm: segments, semaphores, locks."""
        mark = f"{PREFIX}.{self._node}."
        return sorted(path.name for path in SHM_DIRECTORY.iterdir() if mark in path.name)

    def close(self) -> None:
        """Stop it and see that nothing of it is left."""
        running = self._process is not None
        status = self.stop()
        if running:
            assert status == 0, f"the daemon ended with {status}:\n{self.log}"
            assert self.shm_files() == [], "a stopped daemon left files in /dev/shm"
            assert not self.socket.exists(), "a stopped daemon left its socket"
