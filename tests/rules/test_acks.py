"""R3 with explicit acks: what was handed out and not acked comes again when the request comes back."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from stagecache import Geometry, StageCache
from stagecache.step import CachedRequests, NewRequest, SchedulerStep
from tests.rules.test_failed_writes import Batch

GEOMETRY = Geometry(num_blocks=16, block_size=4, staging_capacity_tokens=32)


class Rig:
    """One request, ``a``; its hidden row at each position is the position."""

    def __init__(self, socket: Any, *, explicit_acks: bool) -> None:
        self.view = Batch()
        self.cache = StageCache.attach(
            socket=socket,
            model="m",
            stage="acks",
            geometry=GEOMETRY,
            view=self.view,
            explicit_acks=explicit_acks,
        )

    def save(self, first: int, count: int, blocks: list[int]) -> int:
        self.view.rows = [("a", first, blocks)]
        rows = torch.arange(first, first + count, dtype=torch.float32)[:, None]
        return self.cache.save_outputs(rows, {}, num_tokens_unpadded=count, num_tokens_padded=count)

    def start(self, count: int) -> int:
        self.cache.new_step_starts(SchedulerStep({"a": count}, [NewRequest("a", 0, [0, 1])]))
        return self.save(0, count, [0, 1])

    def resume(self, first: int, count: int) -> int:
        self.cache.new_step_starts(SchedulerStep(preempted_req_ids={"a"}))
        self.cache.new_step_starts(
            SchedulerStep({"a": count}, scheduled_cached_reqs=CachedRequests(["a"], {"a"}, [[0, 1, 2]], [first]))
        )
        return self.save(first, count, [0, 1, 2])

    def got(self, step_id: int) -> list[int]:
        hidden = self.cache.materialize(step_id, ["a"]).hidden_states
        assert hidden is not None
        return [int(value) for value in hidden["a"][:, 0].tolist()]


@pytest.mark.parametrize(
    ("acks", "acked", "expected"),
    [
        (True, None, list(range(10))),
        (True, 5, list(range(5, 10))),
        (True, 8, [8, 9]),
        (True, 99, [8, 9]),
        (False, None, [8, 9]),
    ],
)
def test_only_acked_rows_count_as_delivered(daemon: Any, acks: bool, acked: int | None, expected: list[int]) -> None:
    """R3: an ack beyond what was handed out counts as far as that."""
    rig = Rig(daemon.socket, explicit_acks=acks)
    try:
        assert rig.got(rig.start(8)) == list(range(8))
        if acked is not None:
            rig.cache.ack("a", acked)
        assert rig.got(rig.resume(8, 2)) == expected
        rig.cache.ack("nobody", 3)
    finally:
        rig.cache.close()


def test_an_ack_that_comes_late_still_clips_the_comeback(daemon: Any) -> None:
    """R3: the plan covers the widest range, clipping happens at materialize."""
    rig = Rig(daemon.socket, explicit_acks=True)
    try:
        assert rig.got(rig.start(8)) == list(range(8))
        step = rig.resume(8, 2)
        rig.cache.ack("a", 6)
        assert rig.got(step) == [6, 7, 8, 9]
    finally:
        rig.cache.close()
