"""The scheduler's side of the shim on vLLM's and vLLM-Omni's own schedulers, without an engine."""

from __future__ import annotations

import multiprocessing
import os
import pickle
from typing import Any

import pytest

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
pytest.importorskip("vllm", reason="needs the engine: make venv")

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import RequestStatus

from stagecache.shim.scheduler import install
from tests.unit.shim.scheduler_kit import (
    BLOCK,
    Load,
    SlotWorker,
    drive,
    make_model_config,
    make_request,
    make_scheduler,
)

pytestmark = pytest.mark.engine

PROMPT = list(range(10, 110))


@pytest.fixture(scope="module")
def model_config(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return make_model_config(tmp_path_factory.mktemp("model"))


def omni(name: str) -> Any:
    module = "omni_generation_scheduler" if name == "OmniGenerationScheduler" else "omni_ar_scheduler"
    return getattr(pytest.importorskip(f"vllm_omni.core.sched.{module}"), name)


def scheduler_named(name: str, model_config: Any, **settings: Any) -> Any:
    return make_scheduler(
        model_config,
        asynchronous="Async" in name,
        scheduler_class=omni(name) if name.startswith("Omni") else None,
        **settings,
    )


SCHEDULERS = ["Scheduler", "AsyncScheduler", "OmniARScheduler", "OmniARAsyncScheduler", "OmniGenerationScheduler"]


@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_step_carries_epoch_and_hashes(name: str, model_config: Any) -> None:
    """vLLM-Omni's schedulers build another output object than their parents."""
    scheduler = scheduler_named(name, model_config)
    shim = install(scheduler)
    request = make_request("a", PROMPT, 3)
    scheduler.add_request(request)
    output = scheduler.schedule()
    assert output.stagecache_epoch == 0
    assert output.stagecache_block_hashes == {"a": [bytes(block_hash) for block_hash in request.block_hashes]}
    assert len(request.block_hashes) == len(PROMPT) // BLOCK
    shim.request_reset("operator")
    later = scheduler.schedule()
    assert later.stagecache_epoch == 1


def receive(connection: Any) -> None:
    output = pickle.loads(connection.recv_bytes())  # noqa: S301 - as the engine sends it
    connection.send((output.stagecache_epoch, output.stagecache_block_hashes, output.total_num_scheduled_tokens))


@pytest.mark.parametrize("name", ["Scheduler", "OmniARScheduler"])
def test_they_reach_a_worker_in_another_process(name: str, model_config: Any) -> None:
    scheduler = scheduler_named(name, model_config)
    install(scheduler)
    scheduler.reset_prefix_cache()
    scheduler.add_request(make_request("a", PROMPT))
    output = scheduler.schedule()
    here, there = multiprocessing.Pipe()
    worker = multiprocessing.get_context("fork").Process(target=receive, args=(there,))
    worker.start()
    here.send_bytes(pickle.dumps(output, protocol=pickle.HIGHEST_PROTOCOL))
    assert here.poll(20)
    assert here.recv() == (1, output.stagecache_block_hashes, 100)
    worker.join()


def test_hashes_of_a_chunked_prefill_end_with_its_chunk(model_config: Any) -> None:
    scheduler = make_scheduler(model_config, budget=40)
    install(scheduler)
    request = make_request("a", PROMPT)
    scheduler.add_request(request)
    assert scheduler.schedule().stagecache_block_hashes == {"a": request.block_hashes[:2]}
    assert scheduler.schedule().stagecache_block_hashes == {}


def test_a_resumed_request_brings_its_hashes_again(model_config: Any) -> None:
    scheduler, worker = make_scheduler(model_config, num_blocks=11), SlotWorker()
    install(scheduler)
    for number in range(2):
        scheduler.add_request(make_request(f"r{number}", range(10 + 100 * number, 80 + 100 * number), 60))
    outputs = drive(scheduler, worker)
    resumed = [output for output in outputs if output.scheduled_cached_reqs.resumed_req_ids]
    assert resumed
    for output in resumed:
        for req_id in output.scheduled_cached_reqs.resumed_req_ids:
            index = output.scheduled_cached_reqs.req_ids.index(req_id)
            end = output.scheduled_cached_reqs.num_computed_tokens[index] + output.num_scheduled_tokens[req_id]
            assert len(output.stagecache_block_hashes[req_id]) == end // BLOCK


def test_after_a_reset_nothing_saved_before_is_hit(model_config: Any) -> None:
    """R5; as a control, without it the same prompt hits."""
    scheduler, worker = make_scheduler(model_config), SlotWorker()
    shim = install(scheduler)
    computed = []
    for req_id in ("first", "hits", "after the reset"):
        if req_id == "after the reset":
            shim.request_reset("operator")
        scheduler.add_request(make_request(req_id, PROMPT))
        computed.append(drive(scheduler, worker)[0].scheduled_new_reqs[0].num_computed_tokens)
    assert computed == [0, 96, 0]
    assert (worker.epoch, worker.bad) == (1, 0)


def test_a_reset_with_requests_running_changes_no_output(model_config: Any) -> None:
    """They are preempted and computed again, in the very step that carries the new epoch."""
    answers = []
    for reset_at in (None, 3):
        scheduler, worker = make_scheduler(model_config), SlotWorker()
        shim = install(scheduler)
        scheduler.add_request(make_request("a", PROMPT, 12))
        step = 0
        while scheduler.has_unfinished_requests():
            step += 1
            if step == reset_at:
                shim.request_reset("operator")
            output = scheduler.schedule()
            if step == reset_at:
                assert output.scheduled_cached_reqs.resumed_req_ids == {"a"}
                assert output.num_scheduled_tokens == {"a": 102}
            scheduler.update_from_output(output, worker.execute(output))
        answers.append(worker.tokens["a"])
    assert answers[0] == answers[1]
    assert len(answers[0]) == 112


def test_a_pause_lets_running_requests_end_before_the_reset(model_config: Any) -> None:
    scheduler, worker = make_scheduler(model_config), SlotWorker()
    shim = install(scheduler)
    scheduler.add_request(make_request("a", PROMPT, 5))
    output = scheduler.schedule()
    scheduler.update_from_output(output, worker.execute(output))
    scheduler.set_pause_state(PauseState.PAUSED_NEW)
    shim.request_reset("sleep")
    assert [o.stagecache_epoch for o in drive(scheduler, worker)] == [0] * 4
    scheduler.set_pause_state(PauseState.UNPAUSED)
    scheduler.add_request(make_request("b", PROMPT, 1))
    output = drive(scheduler, worker)[0]
    assert (output.stagecache_epoch, output.scheduled_new_reqs[0].num_computed_tokens) == (1, 0)


def test_blocks_that_are_held_do_not_keep_their_hashes(model_config: Any) -> None:
    """vLLM's own reset fails while a request that does not run holds blocks."""
    scheduler, worker = make_scheduler(model_config), SlotWorker()
    shim = install(scheduler)
    scheduler.add_request(make_request("a", PROMPT, 1))
    drive(scheduler, worker)
    scheduler.kv_cache_manager.block_pool.get_new_blocks(1)
    assert not scheduler.reset_prefix_cache()
    assert shim.epoch == 0
    shim.request_reset("operator")
    scheduler.add_request(make_request("b", PROMPT, 1))
    output = drive(scheduler, worker)[0]
    assert (output.stagecache_epoch, output.scheduled_new_reqs[0].num_computed_tokens) == (1, 0)
    scheduler.add_request(make_request("c", PROMPT, 1))
    assert drive(scheduler, worker)[0].scheduled_new_reqs[0].num_computed_tokens == 96
    assert worker.bad == 0


@pytest.mark.parametrize("asynchronous", [False, True])
def test_random_loads_with_resets_hit_only_what_the_epoch_computed(model_config: Any, asynchronous: bool) -> None:
    """R5, with eviction, preemption and steps in flight; the tokens are those of the same load without resets."""
    resets = hits = 0
    for seed in range(25):
        answers = []
        for with_resets in (False, True):
            scheduler = make_scheduler(model_config, num_blocks=18, budget=64, asynchronous=asynchronous)
            shim, worker = install(scheduler), SlotWorker()
            reset = (lambda shim=shim: shim.request_reset("test")) if with_resets else (lambda: None)
            Load(seed).run(scheduler, worker, depth=2 if asynchronous else 1, reset=reset)
            assert worker.bad == 0
            assert worker.epoch == shim.epoch
            resets, hits = resets + shim.epoch, hits + (worker.hits if with_resets else 0)
            answers.append(worker.tokens)
        assert answers[0].keys() == answers[1].keys()
        for req_id, tokens in answers[0].items():
            shared = min(len(tokens), len(answers[1][req_id]))  # a step in flight may have sampled one more
            assert abs(len(tokens) - len(answers[1][req_id])) <= asynchronous
            assert tokens[:shared] == answers[1][req_id][:shared]
    assert resets > 30
    assert hits > 150


def test_an_aborted_request_does_not_disturb_a_reset(model_config: Any) -> None:
    scheduler, worker = make_scheduler(model_config), SlotWorker()
    shim = install(scheduler)
    for req_id in ("a", "b"):
        scheduler.add_request(make_request(req_id, PROMPT, 5))
    output = scheduler.schedule()
    scheduler.update_from_output(output, worker.execute(output))
    scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    shim.request_reset("operator")
    drive(scheduler, worker)
    assert (worker.epoch, worker.bad, len(worker.tokens["b"])) == (1, 0, 105)


# ----------------------------------------------------------- policy priority


def small_case(model_config: Any, guard: bool) -> tuple[SlotWorker, int]:
    """14 blocks; a long prompt of priority 5, and one step later a short one of priority 0."""
    scheduler = make_scheduler(model_config, num_blocks=15, budget=64, threshold=48, policy="priority")
    shim, worker = install(scheduler, guard=guard), SlotWorker()
    scheduler.add_request(make_request("low", range(200), 4, priority=5))
    output = scheduler.schedule()
    scheduler.update_from_output(output, worker.execute(output))
    scheduler.add_request(make_request("high", range(500, 532), 4, priority=0))
    drive(scheduler, worker)
    return worker, shim.taken_back


def test_policy_priority_publishes_blocks_that_it_does_not_compute(model_config: Any) -> None:
    """The control: without the guard the preempted request hits blocks of its own that nobody computed."""
    worker, _ = small_case(model_config, guard=False)
    assert worker.bad > 0


def test_the_guard_takes_their_hashes_back(model_config: Any) -> None:
    """G3"""
    worker, taken_back = small_case(model_config, guard=True)
    assert worker.hits > 0
    assert worker.bad == 0
    assert taken_back > 0


def priority_loads(model_config: Any, loads: range, *, guard: bool) -> tuple[int, int]:
    """Hit blocks and bad ones over random loads, every second of them with steps in flight."""
    hits = bad = 0
    for seed in loads:
        asynchronous = bool(seed % 2)
        scheduler = make_scheduler(
            model_config,
            num_blocks=15 + seed % 5,
            budget=64,
            threshold=48,
            policy="priority",
            asynchronous=asynchronous,
        )
        install(scheduler, guard=guard)
        worker = SlotWorker()
        Load(seed).run(scheduler, worker, depth=2 if asynchronous else 1)
        hits, bad = hits + worker.hits, bad + worker.bad
    return hits, bad


def test_no_bad_hit_in_300_loads_with_the_guard_and_some_in_150_without(model_config: Any) -> None:
    """G3"""
    hits, bad = priority_loads(model_config, range(300), guard=True)
    _, unguarded = priority_loads(model_config, range(150), guard=False)
    print(f"{hits} hit blocks, {bad} bad; without the guard {unguarded}")
    assert hits > 3000
    assert bad == 0
    assert unguarded > 0
