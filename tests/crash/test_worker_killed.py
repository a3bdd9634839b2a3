"""A worker is killed at any instruction: its memory is back, nothing of it is left, and nobody else notices."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from stagecache.errors import UnreadableHitError
from stagecache.step import NewRequest, SchedulerStep
from tests.crash.killworker import PLACES
from tests.crash.load import Load
from tests.crash.workers import Workers
from tests.crash.workload import Part, Step
from tests.daemon_process import DaemonProcess, poll_until

KILLS_A_PLACE = 5
BACK_WITHIN_S = 1.0
"""From a death until its memory is back. By the clock held by nine of ten, since the machine that tests run on may be
busy with others; by all without the time in which the daemon waited for a CPU."""

ONCE = frozenset(
    place for place in PLACES if any(word in place for word in ("handshake", "attach", "open a key", "detach"))
)
"""Places that a worker comes to once."""

LOCK_OF_DAEMON = re.compile(r"stagecache\.[0-9a-f]{12}\.lock")

pytestmark = [pytest.mark.crash, pytest.mark.timeout(900)]


def ending(place: str) -> dict[str, int]:
    """A worker comes to some places only at its end."""
    return {"steps": 8} if "detach" in place else {}


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    made = Workers()
    yield made
    made.close()


@pytest.fixture
def bystander(fresh_daemon: DaemonProcess) -> Iterator[Load]:
    """A worker that lives through it all."""
    load = Load(fresh_daemon.socket, 99)
    yield load
    load.finish()
    load.close()


def waited_for_cpu_s(pid: int) -> float:
    """Seconds that the process' threads were ready to run and others had the CPU: of the one that waited longest."""
    waited = [0.0]
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            waited.append(int((task / "schedstat").read_text().split()[1]) / 1e9)
    return max(waited)


def deaths(daemon: DaemonProcess, workers: Workers, bystander: Load, plan: list[dict[str, Any]]) -> list[float]:
    """Let a worker die for each item of the plan. Seconds from each death until nothing of it was left, in order: no
    file, and nothing mapped by the daemon.

    Each takes less than ``BACK_WITHIN_S``, but for the time in which the daemon waited for a CPU.
    """
    took = []
    own = bystander.cache.session.session_id

    def left() -> list[str]:
        files = [name for name in daemon.shm_files() if own not in name and not LOCK_OF_DAEMON.fullmatch(name)]
        maps = Path(f"/proc/{daemon.pid}/maps").read_text().splitlines()
        return files + [line for line in maps if daemon.paths.node in line and own not in line]

    for item in plan:
        workers.start(daemon, **item)
        for _ in range(3):
            bystander.run_step()
        died_at = workers.wait()
        waited_s = waited_for_cpu_s(daemon.pid)
        poll_until(lambda: not left(), f"the memory of the worker that died at {item}")
        took.append(time.monotonic() - died_at)
        waited_s = waited_for_cpu_s(daemon.pid) - waited_s
        assert took[-1] - waited_s < BACK_WITHIN_S, f"{item}: {took[-1]:.2f} s, {waited_s:.2f} s of them without a CPU"
    took.sort()
    print(f"{len(took)} deaths: median {took[len(took) // 2]:.3f} s, last {took[-1]:.3f} s")
    return took


def test_a_worker_killed_at_any_place_leaves_nothing(
    fresh_daemon: DaemonProcess, workers: Workers, bystander: Load
) -> None:
    """Nothing within a second, half of it logged or all; and who steps beside it has every row exact."""
    rng = Random(1)
    plan = [
        {"place": place, "visit": 1 if place in ONCE else rng.randint(1, 3), "seed": seed, **ending(place)}
        for seed, place in enumerate(sorted(PLACES) * KILLS_A_PLACE)
    ]
    took = deaths(fresh_daemon, workers, bystander, plan)
    assert took[len(took) * 9 // 10] < BACK_WITHIN_S


@pytest.mark.parametrize("kills", [40, pytest.param(400, marks=pytest.mark.soak)])
def test_a_worker_killed_at_random_moments_leaves_nothing(
    fresh_daemon: DaemonProcess, workers: Workers, bystander: Load, kills: int
) -> None:
    rng = Random(kills)
    plan = [{"after_s": rng.uniform(0.0, 0.25), "seed": seed} for seed in range(kills)]
    took = deaths(fresh_daemon, workers, bystander, plan)
    assert took[len(took) * 9 // 10] < BACK_WITHIN_S


@pytest.mark.parametrize("order", ["daemon first", "worker first"])
def test_both_sides_killed_leave_nothing_after_the_next_start(
    fresh_daemon: DaemonProcess, workers: Workers, order: str
) -> None:
    """Segments and semaphores are gone once a daemon has started again."""
    for seed in range(3):
        worker = workers.start(fresh_daemon, seed=seed, tell=True)
        if order == "daemon first":
            fresh_daemon.kill()
        os.kill(worker, signal.SIGKILL)
        workers.wait()
        if order == "worker first":
            fresh_daemon.kill()
        fresh_daemon.start()
        assert [name for name in fresh_daemon.shm_files() if not LOCK_OF_DAEMON.fullmatch(name)] == []


def test_a_new_worker_reads_nothing_of_a_dead_one(fresh_daemon: DaemonProcess, workers: Workers) -> None:
    """Neither what the dead one saved nor what it had only staged: a hit on slots that nobody wrote is an error."""
    workers.start(fresh_daemon, seed=5, place="record in the ring, without its sequence", visit=40)
    workers.wait()
    load = Load(fresh_daemon.socket, 5)
    try:
        hit = SchedulerStep({"r": 1}, [NewRequest("r", 8, ([0, 1, 2],))])
        load.cache.new_step_starts(hit)
        load.view.show(Step(hit, [Part("r", [0, 1, 2], 8, 1, 8)]))
        step = load.cache.save_outputs(torch.zeros(1, 3), {}, num_tokens_unpadded=1, num_tokens_padded=1)
        with pytest.raises(UnreadableHitError):
            load.cache.materialize(step, ["r"])
    finally:
        load.close()
