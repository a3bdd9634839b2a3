"""Replicas of a vLLM-Omni stage whose KV comes through a connector: what one computed, the next is served (G2).

The real GPUARModelRunner under vLLM-Omni's own AR scheduler, KV through vLLM's ExampleConnector.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.config import KVTransferConfig

from stagecache.control import Observer
from stagecache.demo.checkpoint import ModelShape, write_checkpoint
from tests.daemon_process import poll_until
from tests.integration.helpers import own_daemon
from tests.omni.engines import BLOCK, environment, stage_engine, tokens

PROMPT, OTHER = tokens(1, 150), tokens(2, 150)
HIT = 4 * BLOCK
SCHEDULER = "vllm_omni.core.sched.omni_ar_scheduler.OmniARScheduler"

pytestmark = pytest.mark.timeout(300)


def settings(kv_folder: Path) -> dict[str, Any]:
    transfer = KVTransferConfig(
        kv_connector="ExampleConnector",
        kv_role="kv_both",
        kv_connector_extra_config={"shared_storage_path": str(kv_folder)},
    )
    return {
        "kv_transfer_config": transfer,
        "disable_hybrid_kv_cache_manager": True,
        "scheduler_cls": SCHEDULER,
    }


@pytest.mark.parametrize("stage", ["thinker", pytest.param("talker", marks=pytest.mark.soak)])
def test_rows_of_kv_from_elsewhere_are_those_that_another_replica_computed(tmp_path: Path, stage: str) -> None:
    """Bit for bit, hidden states and other keys, deferred ones too."""
    write_checkpoint(tmp_path / "model", ModelShape(hidden=128, vocab=1024, max_len=1024))
    (tmp_path / "kv").mkdir()
    with (
        own_daemon(tmp_path, "--shared-bytes", "16MiB") as daemon,
        Observer(daemon.socket) as observer,
        environment({"STAGECACHE_SHARED_BLOCKS": "1"}),
    ):

        def published() -> int:
            return sum(one.published for one in observer.stats().namespaces)

        with stage_engine(tmp_path / "model", stage, daemon.socket, **settings(tmp_path / "kv")) as engine:
            engine.run({"warm": OTHER})
            poll_until(lambda: observer.stats().namespaces, "the join")
            computed = engine.run({"first": PROMPT})
            assert engine.cached_tokens["first"] == 0
            engine.run({"next": tokens(3, 20)})  # With it the worker hears that the first has ended.
            poll_until(lambda: published() >= 4, "its blocks to be kept")
        with stage_engine(tmp_path / "model", stage, daemon.socket, **settings(tmp_path / "kv")) as engine:
            engine.run({"warm": tokens(4, 20)})
            poll_until(lambda: [one for one in observer.stats().sessions if one.namespace_id], "the join")
            served = engine.run({"first": PROMPT})
            assert engine.cached_tokens["first"] == HIT
            assert engine.manager.cache.counters.hit_rows == HIT
            mine = engine.run({"new": tokens(5, 150)})
            assert engine.cached_tokens["new"] == 0
        for key, want in computed["first"].items():
            assert torch.equal(served["first"][key], want), key
            assert not torch.equal(mine["new"][key], want), "the control: rows tell their prompt"
