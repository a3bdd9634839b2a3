"""The daemon is killed under load, again and again: a new one adopts the session, and nothing is wrong, lost or stuck.

The points are read from the consumer's source. Each is killed at five times at least, at its first to fourth visit of
a daemon's life, which for most falls into the backlog that the death before it left.
"""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from stagecache_wire.names import RunPaths
from stagecache_wire.shm import SHM_DIRECTORY
from tests.crash.points import NAMED, TORN
from tests.crash.run import Report, crash_run, kill_plan

BACK_WITHIN_S = 1.0

SOAK = pytest.mark.soak

pytestmark = [pytest.mark.crash, pytest.mark.timeout(1800)]


def left_in_shared_memory(folder: Path) -> list[str]:
    node = RunPaths.of(folder / "d.sock").node
    return [path.name for path in SHM_DIRECTORY.iterdir() if node in path.name]


def told(report: Report) -> str:
    return f"{report.deaths} deaths, {report.steps} steps, {report.rows} rows checked, {report.took_s:.1f} s"


@pytest.mark.parametrize("kills", [5, pytest.param(50, marks=SOAK)])
def test_every_point_between_two_shared_stores_is_survived(tmp_path: Path, kills: int) -> None:
    points = sorted(NAMED | TORN)
    report = crash_run(tmp_path, kill_plan(points, kills, seed=kills), seed=kills, deadline_s=30.0 * kills)
    assert not report.wrong, f"{told(report)}: {report.wrong}"
    assert {point: report.kills.get(point, 0) for point in points} == dict.fromkeys(points, kills)
    assert report.rows > 1000
    assert left_in_shared_memory(tmp_path) == []
    assert_service_is_back(report)


@pytest.mark.parametrize("kills", [100, pytest.param(1000, marks=SOAK)])
def test_deaths_at_random_moments_are_survived_by_two_workers(tmp_path: Path, kills: int) -> None:
    """Half of them counted from the daemon's start, so also in the middle of it; half from when it answers."""
    rng = Random(kills)
    plan = [{rng.choice(("after_s", "serving_s")): rng.uniform(0.0, 0.16)} for _ in range(kills)]
    plan[0] = {"after_s": 0.1}  # counted from when the workers are there
    report = crash_run(tmp_path, plan, seed=kills, workers=2, deadline_s=1.5 * kills, workload={"passing_keys": False})
    assert not report.wrong, f"{told(report)}: {report.wrong}"
    assert report.deaths >= kills
    assert report.rows > 1000
    assert left_in_shared_memory(tmp_path) == []
    assert_service_is_back(report)
    third = len(report.shm) // 3
    for used in zip(*report.shm, strict=True):  # files; bytes
        assert max(used[third:]) <= max(used[:third]), "/dev/shm use is flat: no key is opened or closed"


def assert_service_is_back(report: Report) -> None:
    """After each death, but for the time in which other processes had the CPU; after half of them without that too."""
    back, own = sorted(report.back_s), sorted(report.back_own_s)
    assert len(back) > report.deaths // 4, "daemons that are killed before they serve are not counted"
    print(f"{len(back)} times back: median {back[len(back) // 2]:.3f} s, last {back[-1]:.3f} s, own {own[-1]:.3f} s")
    assert own[-1] < BACK_WITHIN_S
    assert back[len(back) // 2] < BACK_WITHIN_S


def test_a_load_without_deaths_reaches_every_point(tmp_path: Path) -> None:
    """What the plan is made of is what the code does: no point is named that no load can reach."""
    report = crash_run(tmp_path, [], seed=13, steps_after=150)
    assert not report.wrong, report.wrong
    assert set(report.visits) == NAMED | TORN
    assert len(NAMED) >= 15
