"""A worker is killed at any instruction: its memory is back, nothing of it is left, and nobody else notices."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.crash.killworker import PLACES
from tests.crash.load import Load
from tests.daemon_process import DaemonProcess, poll_until

KILLS_A_PLACE = 5
RANDOM_KILLS = 40
BACK_WITHIN_S = 1.0

pytestmark = [pytest.mark.crash, pytest.mark.timeout(240)]


class Workers:
    """The other end of ``tests.crash.killworker``."""

    def __init__(self, socket: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.crash.killworker", str(socket)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._answer()

    def start(self, item: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(item) + "\n")
        self.process.stdin.flush()

    def wait(self) -> dict[str, Any]:
        """What became of the worker that was started."""
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the process that starts workers has ended"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait(30)
        self.process.stdout.close()


@pytest.fixture
def workers(fresh_daemon: DaemonProcess) -> Iterator[Workers]:
    made = Workers(fresh_daemon.socket)
    yield made
    made.close()


@pytest.fixture
def bystander(fresh_daemon: DaemonProcess) -> Iterator[Load]:
    """A worker that lives through it all."""
    load = Load(fresh_daemon.socket, 99, workload=None)
    yield load
    load.finish()
    load.close()


def deaths(daemon: DaemonProcess, workers: Workers, bystander: Load, plan: list[dict[str, Any]]) -> list[float]:
    """Let a worker die for each item of the plan. Seconds from each death until nothing of it was left."""
    import time

    before = sorted(daemon.shm_files())
    took = []
    for item in plan:
        workers.start(item)
        for _ in range(3):
            bystander.run_step()
        answer = workers.wait()
        assert answer["code"] == -9, f"{item} ended with {answer['code']}, and did not die where it should"
        poll_until(
            lambda: [name for name in daemon.shm_files() if name not in before and not own(name, bystander)] == [],
            f"memory of the worker that died at {item}",
        )
        took.append(time.monotonic() - answer["died_at"])
    return took


def own(name: str, load: Load) -> bool:
    return load.cache.session.session_id in name


def test_a_worker_killed_at_any_place_leaves_nothing(
    fresh_daemon: DaemonProcess, workers: Workers, bystander: Load
) -> None:
    rng = Random(1)
    first_visits = ("handshake", "attach", "detach")
    plan = [
        {"place": place, "visit": 1 if any(word in place for word in first_visits) else rng.randint(1, 3), "seed": seed}
        for seed, place in enumerate(sorted(PLACES) * KILLS_A_PLACE)
    ]
    took = deaths(fresh_daemon, workers, bystander, plan)
    assert sorted(took)[len(took) * 9 // 10] < BACK_WITHIN_S


def test_a_worker_killed_at_random_moments_leaves_nothing(
    fresh_daemon: DaemonProcess, workers: Workers, bystander: Load
) -> None:
    rng = Random(2)
    plan = [{"after_s": rng.uniform(0.0, 0.25), "seed": seed} for seed in range(RANDOM_KILLS)]
    took = deaths(fresh_daemon, workers, bystander, plan)
    assert sorted(took)[len(took) * 9 // 10] < BACK_WITHIN_S


@pytest.mark.parametrize("first", ["daemon", "worker"])
def test_both_sides_killed_leave_nothing_after_the_next_start(
    fresh_daemon: DaemonProcess, workers: Workers, first: str
) -> None:
    """Segments and semaphores are gone once a daemon has started again."""
    for seed in range(3):
        workers.start({"place": "extent leased", "visit": 4, "seed": seed})
        if first == "daemon":
            poll_until(lambda: any(".staging" in name for name in fresh_daemon.shm_files()), "a worker that attached")
            fresh_daemon.kill()
            workers.process.stdin.flush()
        else:
            assert workers.wait()["code"] == -9
            fresh_daemon.kill()
        fresh_daemon.start()
