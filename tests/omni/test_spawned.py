"""The engine in its own processes: it attaches, a killed worker gives its memory back, and its successor attaches."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stagecache.control import Observer
from stagecache.demo.checkpoint import ModelShape, write_checkpoint
from stagecache.local_engine import quiet_engine_environment
from tests.daemon_process import DaemonProcess, poll_until

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


class SpawnedEngine:
    """``tests.omni.spawned`` in a process of its own."""

    def __init__(self, folder: Path, socket: Path) -> None:
        write_checkpoint(folder / "checkpoint", ModelShape(hidden=128, vocab=1024, max_len=1024))
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("VLLM_", "STAGECACHE_"))},
            **quiet_engine_environment(),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
            "VLLM_PLUGINS": "stagecache,vllm_omni_register_models",
            "VLLM_CACHE_ROOT": str(folder / "vllm"),
            "STAGECACHE_SOCKET": str(socket),
            "STAGECACHE_REQUIRED": "1",
            "PYTHONPATH": str(ROOT),
        }
        self.log = folder / "engine.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.omni.spawned", str(folder / "checkpoint")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
                text=True,
                start_new_session=True,
            )

    def tell(self, command: str) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith(">"):
                answer: dict[str, Any] = json.loads(line[1:])
                return answer
        raise AssertionError(f"{command}: the engine ended\n{self.log.read_text()[-3000:]}")

    def close(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()


@pytest.fixture
def engine(tmp_path: Path, fresh_daemon: DaemonProcess) -> Iterator[SpawnedEngine]:
    made = SpawnedEngine(tmp_path, fresh_daemon.socket)
    yield made
    made.close()


def test_a_killed_worker_gives_its_memory_back_and_its_successor_attaches(
    engine: SpawnedEngine, fresh_daemon: DaemonProcess
) -> None:
    """A worker killed at any instruction: its memory is back within a second."""
    started = engine.tell("start")
    assert started["session"] is not None
    assert started["pid"] != engine.process.pid
    assert engine.tell("run") == {"hit": 128}
    with Observer(fresh_daemon.socket) as observer:
        assert [session.session_id for session in observer.stats().sessions] == [started["session"]]
        os.kill(started["pid"], signal.SIGKILL)
        killed = time.monotonic()
        poll_until(lambda: not observer.stats().sessions, "the session to end", 5.0)
        poll_until(lambda: not of_session(fresh_daemon, started["session"]), "its files to go", 5.0)
        assert time.monotonic() - killed < 1.0
    again = engine.tell("start")
    assert again["session"] not in (None, started["session"])
    assert engine.tell("run") == {"hit": 128}
    engine.close()
    poll_until(lambda: not of_session(fresh_daemon, again["session"]), "its files to go", 5.0)


def of_session(daemon: DaemonProcess, session: str) -> list[str]:
    return [name for name in daemon.shm_files() if session in name]
