"""Shared blocks on vLLM's real scheduler, with KV that comes from elsewhere: at once, in the background, or not at all.

A worker that remembers what each slot holds checks that no hit meets other rows than its tokens', and that nothing is
published under a hash but the rows that it stands for.
"""

from __future__ import annotations

import os
import random
from typing import Any

import pytest

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
pytest.importorskip("vllm", reason="needs the engine: make venv")

from vllm.config import KVTransferConfig
from vllm.v1.request import RequestStatus

from stagecache.shim.scheduler import install
from stagecache.shim.shared_blocks import SharedBlocks
from tests.unit.shim.kv_elsewhere import Elsewhere, ElsewhereConnector, Node, SharingWorker
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


class Engine:
    """A scheduler with its connector, and a worker."""

    def __init__(self, model_config: Any, node: Node, elsewhere: Elsewhere, *, share: bool = True, **settings: Any):
        ElsewhereConnector.elsewhere = elsewhere
        transfer = KVTransferConfig(
            kv_connector="ElsewhereConnector", kv_role="kv_both", kv_connector_module_path=ElsewhereConnector.__module__
        )
        self.scheduler = make_scheduler(model_config, kv_transfer_config=transfer, **settings)
        self.shared = SharedBlocks(node, BLOCK)  # type: ignore[arg-type]
        self.shim = install(self.scheduler, shared=self.shared if share else None)
        self.worker = SharingWorker(node, elsewhere, self.scheduler.requests)

    def run(self, *names: str, prompt: list[int] = PROMPT, **more: Any) -> list[Any]:
        for name in names:
            self.scheduler.add_request(make_request(name, prompt, **more))
        return drive(self.scheduler, self.worker)


def computed(outputs: list[Any], name: str) -> int:
    return sum(output.num_scheduled_tokens.get(name, 0) for output in outputs)


def test_kv_from_elsewhere_is_used_as_far_as_the_node_has_its_rows(model_config: Any) -> None:
    """G2: tokens whose rows nobody keeps are computed like any others."""
    node, elsewhere = Node(), Elsewhere()
    first = Engine(model_config, node, elsewhere)
    outputs = first.run("a", max_tokens=3)
    assert computed(outputs, "a") == 102
    assert first.worker.published == 6
    for kept, hit in ((6, 96), (4, 64), (0, 0)):
        for block_hash in list(node.rows)[kept:]:
            del node.rows[block_hash]
        engine = Engine(model_config, node, elsewhere)
        outputs = engine.run("b", max_tokens=3)
        assert outputs[0].scheduled_new_reqs[0].num_computed_tokens == hit
        assert [len(output.stagecache_fill) for output in outputs] == [kept, *(0 for _ in outputs[1:])]
        assert computed(outputs, "b") == 102 - hit
        assert (engine.worker.bad, engine.worker.wrong, engine.worker.unfilled) == (0, 0, 0)
        assert (engine.worker.hits, engine.shared.used) == (kept, hit)


def test_a_prompt_that_is_whole_elsewhere_computes_its_last_block(model_config: Any) -> None:
    """H3: a hit ends with a block, and the last token is computed."""
    node, elsewhere = Node(), Elsewhere()
    Engine(model_config, node, elsewhere).run("a", prompt=PROMPT[:96], max_tokens=3)
    engine = Engine(model_config, node, elsewhere)
    outputs = engine.run("b", prompt=PROMPT[:96], max_tokens=3)
    assert outputs[0].scheduled_new_reqs[0].num_computed_tokens == 80
    assert engine.worker.bad == 0


def test_a_lease_ends_where_the_output_that_says_so_is_lost(model_config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupt behind the scheduler's own part: it names the ended request never again."""
    node, elsewhere = Node(), Elsewhere()
    Engine(model_config, node, elsewhere).run("a", max_tokens=3)
    engine = Engine(model_config, node, elsewhere)
    scheduler = engine.scheduler
    scheduler.add_request(make_request("b", PROMPT, 30))
    engine.worker.execute(scheduler.schedule())
    assert list(node.held) == ["b"]
    scheduler.finish_requests(["b"], RequestStatus.FINISHED_ABORTED)

    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(engine.shared, "put_on", interrupted)
        with pytest.raises(KeyboardInterrupt):
            scheduler.schedule()
    assert list(node.held) == ["b"]
    output = scheduler.schedule()
    assert not node.held
    assert (output.stagecache_requests, output.stagecache_epoch, node.model_changes) == ([], 1, 0)


def test_a_lease_lasts_as_long_as_its_request(model_config: Any) -> None:
    """Not longer where it finishes, is aborted or preempted."""
    node, elsewhere = Node(), Elsewhere()
    Engine(model_config, node, elsewhere).run("a", max_tokens=3)
    engine = Engine(model_config, node, elsewhere)
    scheduler = engine.scheduler
    for name in ("b", "c"):
        scheduler.add_request(make_request(name, PROMPT, 30))
    engine.worker.execute(scheduler.schedule())
    assert list(node.held) == ["b"], "the second one hits what the first one was filled with"
    engine.shim.request_reset("a test")
    engine.worker.execute(scheduler.schedule())
    assert node.model_changes == 1
    scheduler.finish_requests(["b", "c"], RequestStatus.FINISHED_ABORTED)
    scheduler.schedule()
    assert not node.held


def test_a_request_of_the_same_step_hits_what_another_one_is_filled_with(model_config: Any) -> None:
    """H6"""
    node, elsewhere = Node(), Elsewhere()
    Engine(model_config, node, elsewhere).run("a", max_tokens=3)
    engine = Engine(model_config, node, elsewhere)
    outputs = engine.run("b", "c", max_tokens=3)
    assert [new.num_computed_tokens for new in outputs[0].scheduled_new_reqs] == [96, 96]
    assert (engine.worker.hits, engine.worker.bad, engine.worker.filled) == (12, 0, 6)


def test_what_is_loaded_in_the_background_is_filled_when_its_hashes_are_published(model_config: Any) -> None:
    node, elsewhere = Node(), Elsewhere(later=1.0)
    Engine(model_config, node, Elsewhere()).run("a", max_tokens=3)
    elsewhere.hashes = {*node.rows}
    engine = Engine(model_config, node, elsewhere)
    engine.run("b", "c", max_tokens=3)
    assert elsewhere.loads >= 1
    assert engine.worker.filled >= 6
    assert (engine.worker.bad, engine.worker.unfilled) == (0, 0)


LOADS = {
    "at once": {"later": 0.0},
    "in the background": {"later": 0.7},
    "failing": {"later": 0.3, "failing": 0.3},
}


@pytest.mark.parametrize("kind", LOADS)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_no_load_meets_other_rows_than_its_tokens(model_config: Any, kind: str, asynchronous: bool) -> None:
    """Few blocks, so that requests are preempted; a node that evicts what nobody holds; two steps in flight."""
    used = failures = 0
    for seed in range(12):
        node, elsewhere = Node(seed, evicting=0.02), Elsewhere(seed, **LOADS[kind])
        for _ in range(2):
            engine = Engine(model_config, node, elsewhere, num_blocks=22, budget=96, asynchronous=asynchronous)
            Load(seed).run(engine.scheduler, engine.worker, depth=2 if asynchronous else 1)
            worker = engine.worker
            assert (worker.bad, worker.wrong, worker.unfilled) == (0, 0, 0), (seed, worker)
            used += engine.shared.used
        failures += elsewhere.failures
    assert used > 500
    assert (failures > 0) == (kind == "failing")


def test_without_the_cut_hits_meet_rows_that_nobody_computed(model_config: Any) -> None:
    """The control."""
    node, elsewhere = Node(), Elsewhere()
    Engine(model_config, node, elsewhere).run("a", max_tokens=3)
    engine = Engine(model_config, node, elsewhere, share=False)
    engine.run("b", max_tokens=3)
    assert engine.worker.bad == 6


def test_a_stage_without_a_connector_publishes_what_each_step_makes_full(model_config: Any) -> None:
    node = Node()
    scheduler = make_scheduler(model_config)
    install(scheduler, shared=SharedBlocks(node, BLOCK))  # type: ignore[arg-type]
    worker = SharingWorker(node, Elsewhere(), scheduler.requests)
    scheduler.add_request(make_request("a", PROMPT, 30))
    outputs = drive(scheduler, worker)
    assert [len(output.stagecache_published.get("a", ())) for output in outputs if output.stagecache_published] == [
        6, 1, 1,
    ]  # fmt: skip
    assert (worker.published, worker.wrong) == (8, 0)
    assert len(node.rows) == 8


def test_a_stage_that_shares_nothing_has_nothing_on_its_outputs(model_config: Any) -> None:
    scheduler = make_scheduler(model_config)
    install(scheduler)
    scheduler.add_request(make_request("a", PROMPT, 2))
    output = drive(scheduler, SlotWorker())[0]
    assert not hasattr(output, "stagecache_published")
    assert not hasattr(output, "stagecache_fill")


def test_only_a_reset_for_lost_rows_leaves_the_model_as_it_is(model_config: Any) -> None:
    """R5"""
    from stagecache.reset_causes import ROWS_LOST

    node = Node()
    scheduler = make_scheduler(model_config)
    shim = install(scheduler, shared=SharedBlocks(node, BLOCK))  # type: ignore[arg-type]
    for cause, model in ((ROWS_LOST, 0), ("sleep", 1), ("", 2)):
        if cause:
            shim.request_reset(cause)
        else:
            scheduler.reset_prefix_cache()
        scheduler.add_request(make_request(f"r{model}", random.Random(model).sample(range(900), 40), 2))
        outputs = drive(scheduler, SlotWorker())
        assert {output.stagecache_model for output in outputs} == {model}
        assert node.model_changes == model
