"""The variants of the protocol that look fine: the crash run finds each of them, so it would find others.

A mutant's deaths come where its variant is weak; the same run on the real protocol, with deaths at every point, is in
test_daemon_killed.py, and here once more with the mutants' own settings.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.crash.mutant_consumers import CONSUMERS
from tests.crash.mutants import MUTANTS, Mutant
from tests.crash.points import NAMED
from tests.crash.run import crash_run, kill_plan

DEATHS = 160
TRIES = 3
SETTINGS: dict[str, Any] = {
    "hold_s": 0.05,
    "eager": 0.15,
    "staging_depth": 6,
    "wait_s": 4.0,
    "workload": {"churn": 0.5, "passing_keys": False},
}
"""Long pauses, late reads and short requests: much is in flight at a death, and blocks change hands at once."""

pytestmark = [pytest.mark.crash, pytest.mark.timeout(240)]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name.replace(" ", "-"))
def test_the_crash_run_finds_the_mutant(mutant: Mutant, tmp_path: Path) -> None:
    for seed in range(TRIES):
        folder = tmp_path / str(seed)
        folder.mkdir()
        plan = kill_plan(mutant.points, DEATHS // len(mutant.points), seed, farthest=mutant.farthest)
        if crash_run(folder, plan, seed=seed, mutant=mutant, deadline_s=60.0, **SETTINGS).wrong:
            return
    pytest.fail(f"{TRIES} runs of {DEATHS} deaths each found nothing wrong with: {mutant.name}")


def test_the_real_protocol_passes_under_the_same_settings(tmp_path: Path) -> None:
    points = sorted({point for mutant in MUTANTS for point in mutant.points if point in NAMED})
    settings = {**SETTINGS, "wait_s": 20.0}
    report = crash_run(tmp_path, kill_plan(points, 60 // len(points), 0), seed=0, deadline_s=120.0, **settings)
    assert not report.wrong, report.wrong


def test_every_mutant_has_a_consumer_and_a_run() -> None:
    assert {mutant.name for mutant in MUTANTS} == set(CONSUMERS)
