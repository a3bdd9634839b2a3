"""Mixed load with faults, for long: every row exact, nothing left, and memory, descriptors and /dev/shm flat.

The long form runs for STAGECACHE_SOAK_S seconds (1800). Its figures are printed, and go to STAGECACHE_SOAK_REPORT if
that names a file.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.daemon_process import DAEMON, DaemonProcess
from tests.soak.crew import Crew
from tests.soak.run import CHURN, DEATHS, FAULTS, STEADY, Outcome, Soak
from tests.soak.samples import told

SECONDS = float(os.environ.get("STAGECACHE_SOAK_S", "1800"))
LEAKY = (sys.executable, "-m", "tests.soak.leaky")
SHORT_S = 2.0
SHORT_SLACK = 6.0
"""After seconds a warm-up is not over; the controls leak more than this in as short a time."""

pytestmark = [pytest.mark.crash]


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    with Crew() as made:
        yield made


def soaked(daemon: DaemonProcess, crew: Crew, seconds: float, *, seed: int = 1, leak: bool = False) -> Outcome:
    """A soak of so many seconds; the daemon is left running."""
    daemon.start()
    short = seconds < 60
    return Soak(
        daemon,
        crew,
        seed=seed,
        seconds=seconds,
        fault_every_s=0.15 if short else 1.0,
        sample_every_s=0.04 if short else 0.5,
    ).run(leak=leak)


def report(outcome: Outcome, seconds: float) -> str:
    faults = json.dumps(dict(sorted(outcome.faults.items())))
    lines = [
        f"{seconds:.0f} s, {outcome.steps} steps, {outcome.rows} rows exact, {outcome.rounds} attaches of one process",
        f"{sum(outcome.faults.values())} faults: {faults}",
    ]
    if outcome.back_s:
        back = sorted(outcome.back_s)
        lines.append(
            f"a new daemon served {back[len(back) // 2]:.2f} s after a SIGKILL (median, start of the interpreter "
            f"included), {back[-1]:.2f} s at most"
        )
    for who in ("daemon", "starts", "node", *STEADY, CHURN):
        try:
            trends = outcome.samples.trends(who)
        except ValueError:
            continue
        lines.append(f"{who}: " + "; ".join(told(name, found) for name, found in sorted(trends.items())))
    return "\n".join(lines)


def test_a_short_soak_is_exact_and_leaves_nothing(tmp_path: Path, crew: Crew) -> None:
    daemon = DaemonProcess(tmp_path)
    outcome = soaked(daemon, crew, SHORT_S)
    assert outcome.wrong == []
    assert outcome.left == []
    assert outcome.growing(SHORT_SLACK, starts=False) == {}, report(outcome, SHORT_S)
    assert outcome.faults["daemon killed"] >= 1
    assert outcome.rounds > 3
    daemon.close()


def test_the_soak_sees_a_daemon_and_a_worker_that_leak(tmp_path: Path, crew: Crew) -> None:
    """The control: each session that ends leaves memory, descriptors and a file; each closed cache its mapping."""
    daemon = DaemonProcess(tmp_path, program=LEAKY)
    outcome = soaked(daemon, crew, SHORT_S, leak=True)
    assert outcome.wrong == []
    growing = outcome.growing(SHORT_SLACK, starts=False)
    assert {"anonymous", "resident", "descriptors"} <= set(growing["daemon"]), report(outcome, SHORT_S)
    assert {"shm bytes", "shm files"} <= set(growing["node"]), report(outcome, SHORT_S)
    assert {"mappings", "descriptors"} <= set(growing[CHURN]), report(outcome, SHORT_S)
    assert not set(growing) & set(STEADY), "who does not leak is not blamed"
    assert outcome.left != []
    daemon.kill()
    daemon.program = DAEMON
    daemon.start()
    daemon.close()


@pytest.mark.soak
@pytest.mark.timeout(int(SECONDS) + 600)
def test_a_long_soak_is_exact_and_flat(tmp_path: Path, crew: Crew) -> None:
    daemon = DaemonProcess(tmp_path)
    outcome = soaked(daemon, crew, SECONDS, seed=2)
    text = report(outcome, SECONDS)
    print(text)
    if path := os.environ.get("STAGECACHE_SOAK_REPORT"):
        Path(path).write_text(text + "\n")
    assert outcome.wrong == [], text
    assert outcome.left == [], text
    assert outcome.growing() == {}, text
    assert set(outcome.faults) == {*FAULTS, *DEATHS}, "every fault came"
    daemon.close()
