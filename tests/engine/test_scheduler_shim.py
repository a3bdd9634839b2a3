"""Resets of the real engine reach its scheduler, its prefix cache and the daemon (R5)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from stagecache.local_daemon import LocalDaemon

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

SCENARIOS = Path(__file__).with_name("scheduler_scenarios.py")
HIT = 128


@pytest.fixture
def run(checkpoint: Path, engine_environment: dict[str, str], daemon: LocalDaemon, tmp_path: Path) -> Any:
    """``run(name)``: the scenario's answer; its whole output where it fails."""

    def run_scenario(name: str) -> dict[str, Any]:
        done = subprocess.run(
            [sys.executable, str(SCENARIOS), name, str(checkpoint), str(tmp_path)],
            env=engine_environment | {"PYTHONPATH": str(SCENARIOS.parent), "STAGECACHE_SOCKET": str(daemon.socket)},
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.returncode == 0, f"{name} ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
        answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return answer

    return run_scenario


def test_whatever_makes_kv_stale_makes_the_engine_forget_it(run: Any) -> None:
    """R5, and the control: weights reloaded behind the shim's back are hit by the next prompt."""
    answer = run("resets")
    seen = answer["seen"]
    assert seen["start"]["hit"] == 0
    assert seen["reload_unnoticed"]["hit"] == HIT
    assert "reload_unnoticed" not in answer["new_weights"]
    epoch = 0
    for name in ("reload", "pause", "sleep", "reset_prefix_cache", "operator"):
        assert seen[name]["hit"] == seen[name]["from_cache"] == 0, name
        assert seen[name]["epoch"] > epoch, name
        assert seen[name]["worker_epoch"] >= seen[name]["epoch"], name
        assert seen[f"{name}_again"]["hit"] == seen[f"{name}_again"]["from_cache"] == HIT, name
        assert {name, f"{name}_again"} <= set(answer["new_weights"]), name
        epoch = seen[name]["epoch"]
    assert "1 schedulers were told" in answer["said"][0]


def test_a_reset_in_the_middle_of_requests_changes_no_answer(run: Any) -> None:
    answer = run("running")
    assert answer["epoch"] >= 5
    assert answer["same_answers"]
    assert answer["close_rows"] == [True] * 4


def test_the_epoch_reaches_a_worker_in_a_process_of_its_own(run: Any) -> None:
    assert run("apart") == {
        "hits": [0, HIT, 0],
        "epoch": 1,
        "worker_epochs": [1],
        "other_process": [True],
    }


def test_rows_lost_in_an_outage_make_the_engine_forget_their_blocks(run: Any) -> None:
    """W8: so that later hits on them do not fail until they are evicted."""
    seen = run("outage")
    assert seen["before_again"]["hit"] == HIT
    assert seen["after"]["hit"] == 0
    assert seen["after"]["epoch"] >= 1
    assert seen["after_again"]["hit"] == seen["after_again"]["from_cache"] == HIT
