"""Resets of the real engine reach its scheduler, its prefix cache and the daemon (R5)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from stagecache.local_daemon import LocalDaemon

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

SCENARIOS = Path(__file__).with_name("scheduler_scenarios.py")
HIT = 128

Answers = dict[str, dict[str, Any]]


def run(names: str, folder: Path, checkpoint: Path, environment: dict[str, str]) -> Answers:
    """The answers of scenarios that run in one process with a daemon; its whole output where it fails."""
    with LocalDaemon(folder) as daemon:
        done = subprocess.run(
            [sys.executable, str(SCENARIOS), names, str(checkpoint), str(folder)],
            env=environment | {"PYTHONPATH": str(SCENARIOS.parent), "STAGECACHE_SOCKET": str(daemon.socket)},
            capture_output=True,
            text=True,
            timeout=540,
            check=False,
        )
    assert done.returncode == 0, f"{names} ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
    answers: Answers = json.loads(done.stdout.splitlines()[-1])
    return answers


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path, engine_environment: dict[str, str]) -> Answers:
    return run("resets,running,outage,priority", tmp_path_factory.mktemp("s"), checkpoint, engine_environment)


def test_whatever_makes_kv_stale_makes_the_engine_forget_it(answers: Answers) -> None:
    """R5, and the control: weights reloaded behind the shim's back are hit by the next prompt."""
    seen, new_weights = answers["resets"]["seen"], answers["resets"]["new_weights"]
    assert seen["start"]["hit"] == 0
    assert seen["reload_unnoticed"]["hit"] == HIT
    assert "reload_unnoticed" not in new_weights
    epoch = worker_epoch = 0
    for name in ("reload", "pause", "sleep", "reset_prefix_cache", "operator"):
        assert seen[name]["hit"] == seen[name]["from_cache"] == 0, name
        assert seen[name]["epoch"] > epoch, name
        assert seen[name]["worker_epoch"] > worker_epoch, name
        assert seen[f"{name}_again"]["hit"] == seen[f"{name}_again"]["from_cache"] == HIT, name
        assert {name, f"{name}_again"} <= set(new_weights), name
        epoch, worker_epoch = seen[name]["epoch"], seen[name]["worker_epoch"]


def test_an_operator_resets_a_stage_by_command(answers: Answers) -> None:
    assert "1 scheduler" in answers["resets"]["said"][0]


def test_a_reset_in_the_middle_of_requests_changes_no_answer(answers: Answers) -> None:
    answer = answers["running"]
    assert answer["epoch"] >= 5
    assert answer["same_answers"]
    assert answer["close_rows"] == [True] * 4


def test_rows_lost_in_an_outage_make_the_engine_forget_their_blocks(answers: Answers) -> None:
    """W8: so that later hits on them do not fail until they are evicted."""
    seen = answers["outage"]
    assert seen["before_again"]["hit"] == HIT
    assert seen["after"]["hit"] == 0
    assert seen["after"]["epoch"] >= 1
    assert seen["after_again"]["hit"] == seen["after_again"]["from_cache"] == HIT


def test_with_the_guard_policy_priority_gives_the_right_tokens_and_rows(answers: Answers) -> None:
    """G3, and the control: without it the preempted request hits KV that nobody computed, and answers wrong."""
    guarded, unguarded = answers["priority"]["guarded"], answers["priority"]["unguarded"]
    assert guarded["taken_back"] > 0
    assert guarded["right_answers"]
    assert guarded["right_rows"] == {"low": True, "high": True}
    assert guarded["errors"] == {}
    assert not unguarded["right_answers"]
    assert "low" not in unguarded["right_rows"]


def test_the_epoch_reaches_a_worker_in_a_process_of_its_own(
    tmp_path_factory: pytest.TempPathFactory, checkpoint: Path, engine_environment: dict[str, str]
) -> None:
    answer = run("apart", tmp_path_factory.mktemp("s"), checkpoint, engine_environment)["apart"]
    assert answer == {"hits": [0, HIT, 0], "epoch": 1, "worker_epochs": [1], "other_process": [True]}
