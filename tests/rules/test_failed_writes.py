"""W4, W5, W7: a copy that fails. Against the real client and daemon; the device is the client's own seam."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from stagecache import Geometry, ModelCachePolicy, StageCache
from stagecache.device import CpuDevice
from stagecache.errors import StageCacheError, StagingTimeoutError, UnreadableHitError
from stagecache.step import CachedRequests, NewRequest, SchedulerStep

GEOMETRY = Geometry(num_blocks=16, block_size=4, staging_capacity_tokens=32)


class CopyBroke(RuntimeError):
    """What a device says when a copy fails."""


class FailingDevice(CpuDevice):
    """Fails the n-th copy into a staging page from when ``fail_at`` is set, and no other."""

    fail_at = 0

    def stage(self, page: torch.Tensor, rows: torch.Tensor) -> None:
        self.fail_at -= 1
        if self.fail_at == 0:
            page.fill_(77)
            raise CopyBroke("the copy broke half-way")
        super().stage(page, rows)


class Batch:
    """A live batch of any requests: (id, first position, blocks)."""

    rows: Sequence[tuple[str, int, list[int]]] = ()

    def req_ids(self) -> list[str]:
        return [req_id for req_id, _, _ in self.rows]

    def num_computed(self) -> Any:
        return np.array([first for _, first, _ in self.rows])

    def block_table(self) -> Any:
        table = np.zeros((len(self.rows), 8), np.int64)
        for index, (_, _, blocks) in enumerate(self.rows):
            table[index, : len(blocks)] = blocks
        return table


@pytest.fixture
def rig(daemon: Any) -> Any:
    device, view = FailingDevice(), Batch()
    cache = StageCache.attach(
        socket=daemon.socket,
        model="m",
        stage="failing",
        geometry=GEOMETRY,
        view=view,
        policy=ModelCachePolicy(deferred_keys=frozenset({"late"})),
        device=device,
    )
    yield cache, device, view
    cache.close()


def begin(cache: StageCache, view: Batch, req_id: str, first: int, blocks: list[int], **more: Any) -> None:
    cache.new_step_starts(SchedulerStep({req_id: 4}, [NewRequest(req_id, first, blocks)], **more))
    view.rows = [(req_id, first, blocks)]


def save(cache: StageCache, start: float) -> int:
    rows = torch.arange(8, dtype=torch.float32).view(4, 2) + start
    return cache.save_outputs(rows, {"k": rows[:, 0], "late": rows[:, 1]}, num_tokens_unpadded=4, num_tokens_padded=4)


def test_a_failed_copy_leaves_no_page_and_no_readable_slot(rig: Any) -> None:
    """W7, W8: also the rows of keys that were copied before it."""
    cache, device, view = rig
    for attempt in range(3 * GEOMETRY.staging_depth):
        begin(cache, view, f"a{attempt}", 0, [0], finished_req_ids={f"a{attempt - 1}"})
        device.fail_at = 1 + attempt % 2
        with pytest.raises(CopyBroke):
            save(cache, 100)
    begin(cache, view, "b", 4, [0, 1])
    step = save(cache, 200)
    with pytest.raises(UnreadableHitError):
        cache.materialize(step, ["b"])
    begin(cache, view, "c", 0, [2])
    assert cache.materialize(save(cache, 300), ["c"]).hidden_states["c"][0, 0] == 300


def test_a_failed_deferred_write_is_reported_once_and_costs_exactly_its_rows(rig: Any) -> None:
    """W5: hidden and k of the same slots stay good; the cache goes on."""
    cache, device, view = rig
    begin(cache, view, "a", 0, [0])
    cache.discard_step(save(cache, 100))
    device.fail_at = 1
    with pytest.raises(StageCacheError, match=r"request a, key late, write 1.*the copy broke"):
        cache.new_step_starts(SchedulerStep(finished_req_ids={"a"}))

    begin(cache, view, "b", 4, [0, 1])
    rows = torch.arange(8, dtype=torch.float32).view(4, 2)
    step = cache.save_outputs(rows, {"k": rows[:, 0]}, num_tokens_unpadded=4, num_tokens_padded=4)
    merged = cache.materialize(step, ["b"])
    assert merged.hidden_states["b"][:4].tolist() == (rows + 100).tolist()
    assert merged.mm_outputs["k"]["b"][:4].tolist() == [100, 102, 104, 106]

    begin(cache, view, "c", 4, [0, 2], finished_req_ids={"b"})
    with pytest.raises(UnreadableHitError, match="key late"):
        cache.materialize(save(cache, 400), ["c"])

    begin(cache, view, "d", 0, [3], finished_req_ids={"c"})
    cache.discard_step(save(cache, 500))
    begin(cache, view, "e", 4, [3, 4], finished_req_ids={"d"})
    assert cache.materialize(save(cache, 600), ["e"]).mm_outputs["late"]["e"][:4].tolist() == [501, 503, 505, 507]


def test_a_failed_flush_says_nothing_of_a_slot_that_has_a_new_tenant(rig: Any) -> None:
    """W5, W9: the new tenant wrote ``late`` itself; the older claim that fails afterwards does not touch it."""
    cache, device, view = rig
    begin(cache, view, "a", 0, [0])
    cache.discard_step(save(cache, 100))
    begin(cache, view, "b", 0, [0])
    cache.discard_step(save(cache, 200))
    device.fail_at = 1
    with pytest.raises(StageCacheError, match="request a"):
        cache.new_step_starts(SchedulerStep(finished_req_ids={"a"}))
    begin(cache, view, "c", 4, [0, 1], finished_req_ids={"b"})
    assert cache.materialize(save(cache, 300), ["c"]).mm_outputs["late"]["c"][:4].tolist() == [201, 203, 205, 207]


def test_a_preempted_request_keeps_what_it_had_open(rig: Any) -> None:
    """R1, W3: preemption flushes, and the rows are hit when it resumes."""
    cache, _, view = rig
    begin(cache, view, "a", 0, [0])
    cache.discard_step(save(cache, 100))
    cache.new_step_starts(SchedulerStep(preempted_req_ids={"a"}))
    cache.new_step_starts(SchedulerStep({"a": 4}, scheduled_cached_reqs=CachedRequests(["a"], {"a"}, [[0, 1]], [4])))
    view.rows = [("a", 4, [0, 1])]
    assert cache.materialize(save(cache, 200), ["a"]).mm_outputs["late"]["a"].tolist() == [
        101, 103, 105, 107, 201, 203, 205, 207,
    ]  # fmt: skip


def test_a_full_house_names_the_writes_that_are_stuck_and_their_state(daemon: Any) -> None:
    """W2, W4: with the daemon stopped, pages wait for its consumption; the wait is bounded."""
    view = Batch()
    cache = StageCache.attach(
        socket=daemon.socket, model="m", stage="stuck", geometry=GEOMETRY, view=view, staging_claim_timeout_s=0.3
    )
    try:
        begin(cache, view, "a", 0, [0])
        cache.discard_step(save(cache, 0))
        cache.session.wait_consumed(cache.session.log.head, 10.0, "the first step")
        os.kill(daemon.pid, signal.SIGSTOP)
        tasks = list(Path(f"/proc/{daemon.pid}/task").glob("*/status"))
        while any("T (stopped)" not in task.read_text() for task in tasks):
            os.sched_yield()
        try:
            for number in range(GEOMETRY.staging_depth):
                begin(cache, view, f"b{number}", 0, [1])
                cache.discard_step(save(cache, 100))
            begin(cache, view, "late", 0, [1])
            with pytest.raises(StagingTimeoutError, match=r"step \d+ HOST_READY") as caught:
                save(cache, 100)
        finally:
            os.kill(daemon.pid, signal.SIGCONT)
        assert len(caught.value.outstanding) == GEOMETRY.staging_depth
        assert caught.value.unconsumed == ()
        begin(cache, view, "c", 0, [2])
        assert cache.materialize(save(cache, 200), ["c"]).hidden_states["c"][0, 0] == 200
    finally:
        cache.close()
