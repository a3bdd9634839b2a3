"""The shim on the real vLLM engine: full-prompt hidden states with prefix caching on, equal to those without it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from stagecache.local_daemon import LocalDaemon

from .conftest import Scenario

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(300)]

HITS = {
    "first": 0,
    "shares_prefix": 96,
    "same_again": 128,
    "twin_a": 0,
    "twin_b": 128,
    "chunked": 128,
    "exact_blocks": 96,
}


@pytest.fixture(scope="module")
def shared_daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalDaemon]:
    with LocalDaemon(tmp_path_factory.mktemp("d")) as running:
        yield running


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the in-process scenario leaves its prompts, and their rows without prefix caching."""
    return tmp_path_factory.mktemp("reference")


@pytest.fixture(scope="module")
def in_process(run_scenario: Scenario, shared_daemon: LocalDaemon, reference: Path) -> dict[str, Any]:
    return run_scenario("in_process", reference, STAGECACHE_SOCKET=str(shared_daemon.socket))


@pytest.mark.parametrize("name", HITS)
def test_rows_of_a_hit_are_the_bits_of_an_uncached_run(in_process: dict[str, Any], name: str) -> None:
    """H1, H2, H6: no hit, a shared prefix, the same prompt, a twin in the same step, a chunked prefill."""
    prompt = in_process["prompts"][name]
    assert prompt["hit"] == HITS[name]
    assert prompt["from_cache"] == HITS[name]
    assert prompt["equal"]


def test_a_chunked_prefill_took_more_than_one_step(in_process: dict[str, Any]) -> None:
    assert in_process["prompts"]["chunked"]["steps"] == 2
    assert in_process["prompts"]["chunked"]["shape"] == [450, 128]


def test_rows_that_decode_made_are_close(in_process: dict[str, Any]) -> None:
    prompt = in_process["prompts"]["after_decode"]
    assert prompt["hit"] == prompt["from_cache"] == 128
    assert prompt["close"]


def test_rows_shifted_by_one_would_be_noticed(in_process: dict[str, Any]) -> None:
    assert not any(prompt["shifted_close"] for prompt in in_process["prompts"].values())


def test_decode_steps_hand_out_one_row_each_at_its_position(in_process: dict[str, Any]) -> None:
    steps = in_process["decode_steps"]
    assert [step[:2] for step in steps] == [[1, 90 + number] for number in range(len(steps))]
    assert len(steps) == 44


def test_without_prefix_caching_the_hook_works_and_nothing_comes_from_a_cache(in_process: dict[str, Any]) -> None:
    """G1."""
    assert in_process["uncached_from_cache"] == 0


def test_preempted_requests_get_every_position_once(
    run_scenario: Scenario, shared_daemon: LocalDaemon, tmp_path: Path
) -> None:
    """R3, with few blocks and resumed requests that hit the cache again."""
    answer = run_scenario("preempted", tmp_path, STAGECACHE_SOCKET=str(shared_daemon.socket))
    assert answer["resumed_with_hits"] > 0
    assert answer["every_position_once"]
    assert all(prompt["close"] and not prompt["shifted_close"] for prompt in answer["prompts"].values())


def test_engine_in_its_own_processes_writes_the_same_rows(
    run_scenario: Scenario, shared_daemon: LocalDaemon, in_process: dict[str, Any], reference: Path, tmp_path: Path
) -> None:
    """The environment names the consumers in the worker: a safetensors sink and a function."""
    sink, steps = tmp_path / "rows", tmp_path / "steps.jsonl"
    answer = run_scenario(
        "spawned",
        tmp_path,
        STAGECACHE_SOCKET=str(shared_daemon.socket),
        STAGECACHE_SINK=f"safetensors:{sink}",
        STAGECACHE_ON_STEP="scenarios:note_step",
        SCENARIO_STEPS=str(steps),
        VLLM_ENABLE_V1_MULTIPROCESSING="1",
    )
    assert answer == {"hits": HITS, "patched_here": False}
    for name, hit in HITS.items():
        rows = load_file(sink / f"{name}.safetensors")["hidden_states"]
        expected = load_file(reference / f"{name}.safetensors")["hidden_states"]
        assert torch.equal(rows, expected), name
        assert not torch.equal(rows.roll(1, dims=0), expected), name
        with safe_open(sink / f"{name}.safetensors", "pt") as file:
            assert file.metadata()["rows_from_cache"] == str(hit)
    noted = [json.loads(line) for line in steps.read_text().splitlines()]
    assert sum(line["cached"] for line in noted) == sum(HITS.values())
    assert {line["pid"] for line in noted}.isdisjoint({os.getpid()})


def test_a_killed_daemon_costs_rows_of_hits_and_never_gives_wrong_ones(run_scenario: Scenario, tmp_path: Path) -> None:
    """Started again at once, rows are there as before; while it is gone, only rows of hits are missing."""
    answer = run_scenario("killed_daemon", tmp_path)
    prompts, errors = answer["prompts"], answer["errors"]
    assert set(answer["answered"]) == {3}
    assert all(prompt["equal"] and prompt["from_cache"] == prompt["hit"] for prompt in prompts.values())
    assert prompts["adopted"]["hit"] == 128
    assert prompts["miss"]["shape"] == [100, 128]
    assert errors.pop("hit") == "DaemonLostError"
    assert set(errors.values()) <= {"UnreadableHitError"}
    assert prompts[answer["last"]]["hit"] == 128


def test_without_a_daemon_the_engine_runs_and_only_rows_of_hits_are_missing_until_one_comes(
    run_scenario: Scenario, tmp_path: Path
) -> None:
    """The daemon that starts last is attached to by itself, and the engine forgets the hashes of the time before."""
    socket = tmp_path / "stagecached.sock"
    answer = run_scenario("without_daemon", tmp_path, STAGECACHE_SOCKET=str(socket), VLLM_LOGGING_LEVEL="WARNING")
    said = [line for line in answer["warnings"] if "lost its cached rows" not in line]
    assert len(said) == 1
    assert str(socket) in answer["warnings"][0]
    assert "No such file or directory" in answer["warnings"][0]
    assert answer["answered"] == [3, 3]
    assert answer["miss_rows"] == [100, 128]
    assert answer["hit_tokens"] == 128
    assert len(answer["errors"]) == 1
    assert answer["errors"][0].startswith("MissingRowsError: ")
    assert "positions 0 to 127" in answer["errors"][0]
    assert answer["raised"] == "SessionFailedError", "by then a daemon has come and gone"
    assert answer["late"].get("equal"), answer["late"]
    assert not answer["late"]["shifted_close"]
    assert set(answer["late"]["errors"]) <= {"MissingRowsError", "UnreadableHitError"}
    assert answer["late"]["from_cache"] == answer["late"]["hit"] == 128


def test_what_cannot_be_served_is_refused_at_start(run_scenario: Scenario, tmp_path: Path) -> None:
    """G3; STAGECACHE_REQUIRED; a consumer that cannot be set up."""
    said = run_scenario("refused", tmp_path, STAGECACHE_SOCKET=str(tmp_path / "nobody.sock"))
    expected = {
        "required": "DaemonUnavailableError: no stagecached at",
        "speculative": "speculative_config",
        "sink": "safetensors:DIR",
        "v2_runner": "VLLM_USE_V2_MODEL_RUNNER=0",
    }
    assert said.keys() == expected.keys()
    for name, text in expected.items():
        assert text in said[name]
    assert all(said[name].startswith("GateRefusal") for name in ("speculative", "v2_runner"))


def test_hidden_states_command_writes_the_same_rows(
    checkpoint: Path,
    engine_environment: dict[str, str],
    in_process: dict[str, Any],
    reference: Path,
    tmp_path: Path,
) -> None:
    """With a daemon of its own, token ids from a file, and one prompt that is too long for the model."""
    prompts = tmp_path / "prompts.jsonl"
    too_long = json.dumps({"id": "too_long", "tokens": [5] * 600})
    prompts.write_text((reference / "prompts.jsonl").read_text() + too_long + "\n")
    out = tmp_path / "rows"
    command = [sys.executable, "-m", "stagecache.cli", "hidden-states", "--block-size", "32", "--max-len", "512"]
    command += ["--dtype", "float32"]
    done = subprocess.run(
        [*command, "--model", str(checkpoint), "--prompts", str(prompts), "--out", str(out), "--max-seqs", "2"],
        env=engine_environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 1
    assert "too_long" in done.stderr
    assert "8 of 9 prompts written" in done.stdout
    for name in HITS:
        rows = load_file(out / f"{name}.safetensors")["hidden_states"]
        assert torch.equal(rows, load_file(reference / f"{name}.safetensors")["hidden_states"]), name
    assert not (out / "too_long.safetensors").exists()
