"""H2, H7: what follows the rows of a hit is this step's rows of the request, and never more than they are."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from stagecache import Geometry, ModelCachePolicy, StageCache
from stagecache.errors import SlotMismatchError
from stagecache.outputs import StageCacheOutputs
from stagecache.step import NewRequest, SchedulerStep
from tests.daemon_process import DaemonProcess
from tests.rules.test_failed_writes import Batch

GEOMETRY = Geometry(num_blocks=16, block_size=4, staging_capacity_tokens=32)


class Stage:
    """A cache whose steps have rows of one number, and of a key that hits may have without rows of a step."""

    def __init__(self, daemon: DaemonProcess) -> None:
        self.view = Batch()
        self.cache = StageCache.attach(
            socket=daemon.socket,
            model="m",
            stage="tails",
            geometry=GEOMETRY,
            view=self.view,
            policy=ModelCachePolicy(span_keys=frozenset({"span"})),
        )

    def step(
        self,
        fill: float,
        *requests: tuple[str, int, list[int], int],
        span: bool = True,
        save: dict[str, int] | None = None,
    ) -> StageCacheOutputs:
        """requests: (id, hit, blocks, tokens). save: tokens of the scheduler output as the save finds it."""
        counts = {req_id: count for req_id, _, _, count in requests}
        output = SchedulerStep(counts, [NewRequest(req_id, hit, blocks) for req_id, hit, blocks, _ in requests])
        self.cache.new_step_starts(output)
        counts.update(save or {})
        self.view.rows = [(req_id, hit, blocks) for req_id, hit, blocks, _ in requests]
        n = sum(counts.values())
        rows = torch.full((n, 2), fill)
        step = self.cache.save_outputs(
            rows, {"span": rows.clone()} if span else {}, num_tokens_unpadded=n, num_tokens_padded=n
        )
        return self.cache.materialize(step, list(counts))


@pytest.fixture
def stage(daemon: DaemonProcess) -> Iterator[Stage]:
    made = Stage(daemon)
    made.step(1.0, ("a", 0, [0, 1], 8))
    yield made
    made.cache.close()


def test_a_span_without_rows_of_the_step_ends_where_the_hit_ends_also_where_some_request_came_back(
    stage: Stage,
) -> None:
    """H7, R3: behind it in the arena are rows of other requests."""
    for number in range(3):
        stage.step(666.0, (f"other{number}", 8, [0, 1, 2 + number], 4))
    stage.step(1.0, ("a", 8, [0, 1, 5], 4))
    merged = stage.step(2.0, ("b", 8, [0, 1, 6], 4), span=False)
    assert merged.mm_outputs is not None
    assert merged.mm_outputs["span"]["b"].tolist() == [[1.0, 1.0]] * 8


def test_a_step_that_grew_behind_its_begin_is_refused_and_no_other_row_changes(stage: Stage) -> None:
    """S3, W6: room for the rows of a hit's step is made when the step begins."""
    held = stage.step(3.0, ("b", 8, [0, 1, 2], 4), ("c", 8, [0, 1, 3, 11, 12], 12)).hidden_states
    assert held is not None
    before = {req_id: rows.tolist() for req_id, rows in held.items()}
    with pytest.raises(SlotMismatchError, match="12 rows in the step, 4 when it began"):
        stage.step(4.0, ("d", 8, [0, 1, 4, 5, 6], 4), ("e", 8, [0, 1, 7, 8, 9], 12), save={"d": 12, "e": 4})
    assert {req_id: rows.tolist() for req_id, rows in held.items()} == before
    merged = stage.step(5.0, ("f", 8, [0, 1, 10], 4)).hidden_states
    assert merged is not None
    assert merged["f"].tolist() == [[1.0, 1.0]] * 8 + [[5.0, 5.0]] * 4
