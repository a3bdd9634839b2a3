"""The daemon is killed while it does PUBLISH and FILL records: no filled row is wrong, lost or of an older tenant."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.crash.mutants import MUTANTS
from tests.crash.points import SHARING
from tests.crash.run import crash_run, kill_plan

pytestmark = [pytest.mark.crash, pytest.mark.timeout(1800)]

STORE = frozenset({"after_rows", "before_seal", "after_seal"})
"""Points of the namespace's store that a PUBLISH comes to."""


@pytest.mark.parametrize("kills", [2, pytest.param(40, marks=pytest.mark.soak)])
def test_a_death_at_any_point_of_a_publish_or_fill_is_survived(tmp_path: Path, kills: int) -> None:
    points = sorted(SHARING | STORE)
    plan = kill_plan(points, kills, seed=kills)
    report = crash_run(
        tmp_path, plan, seed=kills, deadline_s=60.0 * kills, workload={"sharing": True, "passing_keys": False}
    )
    assert not report.wrong, report.wrong
    assert {point: report.kills.get(point, 0) for point in points} == dict.fromkeys(points, kills)
    assert report.rows > 500
    assert len(SHARING) >= 7


@pytest.mark.soak
def test_a_daemon_that_says_consumed_before_a_fill_is_in_is_found(tmp_path: Path) -> None:
    """The control."""
    mutant = next(mutant for mutant in MUTANTS if mutant.name == "consumed before the effect")
    plan = kill_plan(["after_fill_claim", "after_fill_slot_words"], 6, seed=1, farthest=2)
    report = crash_run(tmp_path, plan, seed=1, mutant=mutant, workload={"sharing": True, "passing_keys": False})
    assert report.wrong
