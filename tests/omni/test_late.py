"""When a stage leaves the in-process cache for a daemon that came late, and what its requests get then (R3, R5)."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm_omni.core.prefix_cache import OmniPrefixCacheManager, runner_mixin

from stagecache.shim.omni import SidecarPrefixCacheManager, attach, patch
from stagecache.shim.omni.late import LateManager
from tests.daemon_process import DaemonProcess, poll_until
from tests.model.steps import Scheduled, Step
from tests.omni.batch import SchedulerOutputs
from tests.omni.managers import ADAPTER_API
from tests.omni.test_attach import HIDDEN, Runner, one_rank

__all__ = ["one_rank"]

pytestmark = pytest.mark.skipif(ADAPTER_API, reason="only with the release whose manager takes scheduler outputs")


class Late:
    """A runner that found no daemon, and one that has come since. A row tells its position."""

    def __init__(self, daemon: DaemonProcess) -> None:
        self.runner = Runner("late")
        self.runner.lay_out()
        attach.prepare(self.runner)
        self.outputs = SchedulerOutputs()
        self.step(Scheduled("a", (0,), 0, 3, "new"), epoch=0)
        self.manager: LateManager = self.runner.omni_prefix_cache  # type: ignore[assignment]
        daemon.start()
        poll_until(self.manager._waiting.session, "a session in the background")

    def begin(self, *batch: Scheduled, epoch: int | None, **more: Any) -> None:
        step = Step(batch, **more)
        output = self.outputs.of(step)
        if epoch is not None:
            output.stagecache_epoch = epoch
        self.runner._prefix_cache_step_begin(output)
        self.runner.input_batch.show(step)

    def save(self, *batch: Scheduled) -> Any:
        rows = torch.tensor([[at] * HIDDEN for one in batch for at in range(one.first, one.first + one.count)])
        return self.runner._prefix_cache_save_step(
            rows.float(), {}, num_tokens_unpadded=len(rows), num_tokens_padded=len(rows)
        )

    def rows(self, step_id: Any, req_id: str) -> list[float]:
        hidden, _ = self.runner._prefix_cache_materialize(step_id, [req_id])
        assert hidden is not None
        found: list[float] = hidden[req_id][:, 0].tolist()
        return found

    def step(self, *batch: Scheduled, epoch: int | None, **more: Any) -> dict[str, list[float]]:
        self.begin(*batch, epoch=epoch, **more)
        step_id = self.save(*batch)
        return {one.req_id: self.rows(step_id, one.req_id) for one in batch}


@pytest.fixture
def late(one_rank: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Late]:
    daemon = DaemonProcess(tmp_path)
    monkeypatch.setenv("STAGECACHE_SOCKET", str(daemon.socket))
    monkeypatch.delenv("STAGECACHE_REQUIRED", raising=False)
    made = Late(daemon)
    yield made
    used = made.runner.omni_prefix_cache
    assert used is not None
    used.shutdown()
    daemon.close()


def test_it_changes_behind_a_reset_when_no_request_goes_on_and_hands_each_position_on_once(late: Late) -> None:
    manager = late.manager
    a = Scheduled("a", (0, 1), 3, 2, "cached")
    assert late.step(a, epoch=0) == {"a": [3, 4]}
    assert manager.changed is None, "the engine was asked, and has not reset yet"
    assert late.step(Scheduled("a", (0, 1), 5, 1, "cached"), epoch=1) == {"a": [5]}
    assert manager.changed is None, "its prefix of before may be hit when its blocks are full"
    late.begin(Scheduled("a", (0, 1), 6, 1, "cached"), epoch=1)
    before = late.save(Scheduled("a", (0, 1), 6, 1, "cached"))
    late.step(Scheduled("c", (5,), 0, 2, "new"), epoch=1)
    late.step(Scheduled("a", (0, 1), 7, 1, "cached"), epoch=1, preempted=("c",))  # It waits, without blocks.
    again = Scheduled("a", (2, 3, 4), 0, 9, "resumed")
    late.begin(again, epoch=2, preempted=("a",))
    assert manager.changed is not None
    assert type(manager.inner) is OmniPrefixCacheManager, "a step of before is not consumed"
    after = late.save(again)
    assert late.rows(before, "a") == [6]
    assert late.rows(after, "a") == [8], "0 to 7 were handed on before"
    late.begin(epoch=2, finished=("a", "c"))
    assert late.runner.omni_prefix_cache is manager.changed
    assert type(late.runner.omni_prefix_cache) is SidecarPrefixCacheManager
    assert manager.inner is None
    hit = Scheduled("b", (2, 3, 6), 8, 1, "new")
    assert late.step(hit, epoch=2) == {"b": list(range(9))}, "what it saved since is there"


def test_without_a_scheduler_that_resets_it_stays_and_says_so_once(late: Late, shim_log: list[str]) -> None:
    for first in (3, 4):
        assert late.step(Scheduled("a", (0, 1), first, 1, "cached"), epoch=None) == {"a": [first]}
    assert late.manager.changed is None
    assert [line for line in shim_log if "stays on vLLM-Omni's in-process cache" in line] == shim_log[-1:]


def test_a_stage_that_cannot_change_asks_no_daemon(
    one_rank: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its session would hold memory of the node that nobody uses."""
    monkeypatch.setenv("STAGECACHE_SOCKET", str(tmp_path / "d.sock"))
    monkeypatch.delenv("STAGECACHE_REQUIRED", raising=False)
    others = asking()
    runner = Runner("stays")
    runner.lay_out()
    attach.prepare(runner)
    mine = asking() - others
    assert mine
    original = runner_mixin.PrefixCacheRunnerMixin._ensure_omni_prefix_cache.__wrapped__
    patch._ensure(runner_mixin, original, adapter_api=True)(runner)
    assert type(runner.omni_prefix_cache) is OmniPrefixCacheManager
    poll_until(lambda: not mine & asking(), "it to ask no more")


def asking() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "stagecache-attach"}
