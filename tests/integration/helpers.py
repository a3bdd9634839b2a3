"""What the control plane's tests share."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from stagecache import errors
from stagecache.control import connect_observer
from stagecache.rpc import Rpc, handshake
from stagecache_wire.locks import LifeLock
from tests.daemon_process import DaemonProcess

MIB = 1 << 20


@contextmanager
def worker(socket: Path) -> Iterator[Rpc]:
    """This process as a worker that holds its lock; detaches at the end."""
    credentials = handshake(socket, "worker")
    assert credentials.worker_lock is not None
    lock = LifeLock(credentials.worker_lock)
    with Rpc(credentials) as rpc:
        try:
            yield rpc
        finally:
            with suppress(errors.DaemonLostError):
                rpc.detach(10.0)
            lock.release()


@contextmanager
def own_daemon(folder: Path, *arguments: str) -> Iterator[DaemonProcess]:
    process = DaemonProcess(folder, *arguments)
    process.start()
    try:
        yield process
    finally:
        process.close()


def status_of(pid: int, name: str) -> int:
    """A field of /proc/PID/status in bytes."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(name)


def session_ids(socket: Path) -> list[str]:
    with connect_observer(socket) as observer:
        return [session.session_id for session in observer.stats().sessions]


def run_daemon(*arguments: str) -> subprocess.CompletedProcess[str]:
    """A daemon that is expected to end by itself."""
    return subprocess.run(
        [sys.executable, "-m", "stagecached", *arguments], capture_output=True, text=True, timeout=30, check=False
    )
