"""vLLM's real V1 scheduler, InputBatch and _update_states, over a StageCache with a real daemon.

Small caches, so that blocks are evicted and requests preempted and resumed; synchronous and asynchronous scheduling;
policies ``fcfs`` and, with the guard, ``priority``. Every row of every request is known and must come once.
"""

from __future__ import annotations

import random
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs the engine: make venv")

import torch
import vllm.v1.worker.gpu_model_runner as gpu_model_runner
from vllm.v1.request import RequestStatus

from stagecache.errors import StageCacheError
from tests.daemon_process import DaemonProcess
from tests.model.mini_runner import MiniRunner
from tests.unit.shim.scheduler_kit import make_model_config, make_request, make_scheduler

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

REQUESTS = 500
LOADS = 5
NUM_BLOCKS = 26
MAX_SEQS = 8
BUDGET = 128


@pytest.fixture(scope="module")
def model_config(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tmp_path_factory.mktemp("model")
    return make_model_config(folder)


@pytest.fixture(autouse=True)
def _last_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    group = SimpleNamespace(is_last_rank=True, world_size=1)
    monkeypatch.setattr(gpu_model_runner, "get_pp_group", lambda: group)


def run_load(scheduler: Any, runner: MiniRunner, seed: int, *, depth: int, reset: Any) -> None:
    """Prompts that share beginnings, some of them twice, arriving over time; a few are aborted."""
    rng = random.Random(seed)
    stems = [[rng.randrange(900) for _ in range(180)] for _ in range(4)]
    waiting = []
    for number in range(REQUESTS // LOADS):
        shared = rng.choice(stems)[: rng.randrange(0, 170)]
        tail = [rng.randrange(900) for _ in range(rng.randrange(1, 50))]
        waiting.append(make_request(f"q{seed}.{number}", shared + tail, rng.randrange(1, 40), rng.randrange(3)))
    in_flight: deque[Any] = deque()
    while waiting or scheduler.has_unfinished_requests() or in_flight:
        while waiting and (rng.random() < 0.3 or not scheduler.has_unfinished_requests()):
            scheduler.add_request(waiting.pop())
        if rng.random() < 0.01 and scheduler.running:
            scheduler.finish_requests(rng.choice(scheduler.running).request_id, RequestStatus.FINISHED_ABORTED)
        if reset is not None and rng.random() < 0.005:
            reset()
        if scheduler.has_unfinished_requests():
            output = scheduler.schedule()
            in_flight.append((output, runner.execute(output)))
        if in_flight and (len(in_flight) >= depth or not scheduler.has_unfinished_requests()):
            scheduler.update_from_output(*in_flight.popleft())
        assert runner.bad == []
        assert runner.steps < 20_000, "the load does not end"


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_every_row_of_real_schedules_is_exact(
    daemon: DaemonProcess, model_config: Any, policy: str, asynchronous: bool
) -> None:
    """H2, H6, H8, H9, R1 to R3: 500 requests."""
    shim = pytest.importorskip("stagecache.shim.scheduler", reason="policy priority needs the scheduler-side guard")
    hit_rows = resumed = empty = finished = 0
    for load in range(LOADS):
        scheduler = make_scheduler(
            model_config,
            num_blocks=NUM_BLOCKS,
            budget=BUDGET,
            max_seqs=MAX_SEQS,
            threshold=48,
            policy=policy,
            asynchronous=asynchronous,
        )
        side = shim.install(scheduler, stage=f"mini{load}")
        runner = attached(scheduler, daemon, load)
        reset = (lambda side=side: side.request_reset("test")) if load % 2 else None
        run_load(scheduler, runner, load, depth=2 if asynchronous else 1, reset=reset)
        runner.finish()
        assert runner.bad == []
        hit_rows += runner.hit_rows
        resumed += runner.resumed
        empty += runner.empty_steps
        finished += len(runner.delivered)
    assert finished == REQUESTS
    assert hit_rows > 5_000
    assert resumed > 20
    assert empty > 0 or not asynchronous


def attached(scheduler: Any, daemon: DaemonProcess, seed: int, num_blocks: int = NUM_BLOCKS) -> MiniRunner:
    return MiniRunner(scheduler, str(daemon.socket), seed, num_blocks=num_blocks, max_seqs=MAX_SEQS, budget=BUDGET)


@pytest.mark.parametrize("guard", [True, False])
def test_without_the_guard_priority_hits_rows_that_nobody_computed(
    daemon: DaemonProcess, model_config: Any, guard: bool
) -> None:
    """G3, and the control of the test above: 14 usable blocks; the request preempted in the schedule() call that
    scheduled it hits its own blocks afterwards."""
    shim = pytest.importorskip("stagecache.shim.scheduler")
    scheduler = make_scheduler(model_config, num_blocks=15, budget=64, threshold=48, policy="priority")
    shim.install(scheduler, guard=guard)
    runner = attached(scheduler, daemon, 100, num_blocks=15)
    scheduler.add_request(make_request("low", range(200), 4, priority=5))
    refused = None
    for step in range(40):
        if step == 1:
            scheduler.add_request(make_request("high", range(500, 532), 4, priority=0))
        if not scheduler.has_unfinished_requests():
            break
        output = scheduler.schedule()
        try:
            scheduler.update_from_output(output, runner.execute(output))
        except StageCacheError as error:
            refused = error
            break
    else:
        pytest.fail("the load does not end")
    if guard:
        runner.finish()
        assert (refused, runner.bad) == (None, [])
        assert runner.delivered == {"low": 203, "high": 35}
    else:
        assert refused or runner.bad


def test_rows_of_another_position_are_noticed(daemon: DaemonProcess, model_config: Any) -> None:
    """The control: hits whose rows are shifted by one."""
    scheduler = make_scheduler(model_config, num_blocks=NUM_BLOCKS, budget=BUDGET, max_seqs=MAX_SEQS)
    runner = attached(scheduler, daemon, 101)
    materialize = runner.cache.materialize

    def shifted(step_id: int, req_ids: list[str]) -> Any:
        out = materialize(step_id, req_ids)
        for req_id, rows in out.hidden_states.items():
            if len(rows) > 40:
                out.hidden_states[req_id] = torch.cat([rows[1:17], rows[:1], rows[17:]])
        return out

    runner.cache.materialize = shifted  # type: ignore[method-assign]
    for name in ("first", "second"):
        scheduler.add_request(make_request(name, range(60), 2))
        while scheduler.has_unfinished_requests():
            output = scheduler.schedule()
            scheduler.update_from_output(output, runner.execute(output))
    runner.finish()
    assert [text.split()[2] for text in runner.bad] == ["first:", "second:"]
