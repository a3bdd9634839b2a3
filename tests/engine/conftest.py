"""A checkpoint, a daemon and a way to run a scenario with the real engine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs the engine: make venv")

from stagecache.demo.checkpoint import ModelShape, write_checkpoint
from stagecache.local_daemon import LocalDaemon
from stagecache.local_engine import quiet_engine_environment

SCENARIOS = Path(__file__).with_name("scenarios.py")

SHAPE = ModelShape(hidden=128, vocab=1024, max_len=1024)

Scenario = Callable[..., dict[str, Any]]


def clean_environment() -> dict[str, str]:
    """This process' environment without our variables and without those of coverage or another engine."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("STAGECACHE_", "VLLM_"))}


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model") / "checkpoint"
    write_checkpoint(directory, SHAPE)
    return directory


@pytest.fixture(scope="session")
def engine_environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Of every engine process of the tests.

    They share one cache of what vLLM found out about the model. One thread is enough for it, and two would spin at
    each other on a machine with two cores.
    """
    tests = {
        "VLLM_CACHE_ROOT": str(tmp_path_factory.mktemp("vllm")),
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    return clean_environment() | quiet_engine_environment() | tests


@pytest.fixture
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalDaemon]:
    with LocalDaemon(tmp_path_factory.mktemp("d")) as running:
        yield running


@pytest.fixture(scope="session")
def run_scenario(checkpoint: Path, engine_environment: dict[str, str]) -> Scenario:
    """``run_scenario(name, out, VARIABLE=value, ...)``: the scenario's answer; its whole output where it fails."""

    def run(name: str, out: Path, **environ: str) -> dict[str, Any]:
        done = subprocess.run(
            [sys.executable, str(SCENARIOS), name, str(checkpoint), str(out)],
            env=engine_environment | {"PYTHONPATH": str(SCENARIOS.parent)} | environ,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.returncode == 0, f"{name} ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
        answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return answer

    return run
