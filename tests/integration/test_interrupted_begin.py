"""A step that is interrupted anywhere while its scheduler output is noted: what that says of requests is not lost.

The engine says once that a request has ended, was preempted or got a block. So the next step notes it, and nothing of
an ended request stays behind: neither its place in the table nor rows or blocks that wait for its end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from stagecache.cache import StageCache
from stagecache.policy import HIDDEN_KEY, ModelCachePolicy
from stagecache.sharing import Namespace
from stagecache.step import CachedRequests, NewRequest, SchedulerStep
from stagecache_wire.geometry import Geometry, KeySchema
from tests.daemon_process import DaemonProcess
from tests.interrupts import Interrupter

GEOMETRY = Geometry(16, 4, 64, arena_bytes=1 << 16)
KEYS = [KeySchema(HIDDEN_KEY, "float32", (2,)), KeySchema("late", "float32", (1,))]


class Worker:
    """A cache and the batch that it reads. A row tells its request and position."""

    block_size = 4

    def __init__(self, daemon: DaemonProcess) -> None:
        self.batch: list[tuple[str, int, list[int], int]] = []
        self.cache = StageCache.attach(
            socket=daemon.socket,
            model="m",
            stage="begins",
            geometry=GEOMETRY,
            view=self,
            policy=ModelCachePolicy(deferred_keys=frozenset({"late"})),
            keys=KEYS,
        )
        self.cache.join_namespace(Namespace("weights", "sha256_cbor", "seed", "float32"))

    def req_ids(self) -> list[str]:
        return [req_id for req_id, *_ in self.batch]

    def num_computed(self) -> np.ndarray[Any, Any]:
        return np.array([first for _, first, *_ in self.batch], np.int32)

    def block_table(self) -> np.ndarray[Any, Any]:
        table = np.zeros((len(self.batch), 16), np.int32)
        for row, (_, _, blocks, _) in enumerate(self.batch):
            table[row, : len(blocks)] = blocks
        return table

    def save(self, *batch: tuple[str, int, list[int], int]) -> dict[str, list[int]]:
        """Save and hand out the rows of the step that began: (request, first position, blocks, tokens) each. The
        positions that came, by request.
        """
        self.batch = list(batch)
        rows = torch.tensor(
            [[hash(req_id) % 97, at] for req_id, first, _, n in batch for at in range(first, first + n)],
            dtype=torch.float32,
        )
        count = len(rows)
        step = self.cache.save_outputs(rows, {"late": rows[:, 1:]}, num_tokens_unpadded=count, num_tokens_padded=count)
        outputs = self.cache.materialize(step, self.req_ids())
        assert outputs.hidden_states is not None
        for req_id, found in outputs.hidden_states.items():
            assert found[:, 0].eq(hash(req_id) % 97).all()
            assert torch.equal(outputs.mm_outputs["late"][req_id], found[:, 1:])
        return {req_id: found[:, 1].int().tolist() for req_id, found in outputs.hidden_states.items()}


def output(
    counts: dict[str, int],
    new: Sequence[NewRequest] = (),
    cached: Sequence[tuple[str, list[int], int]] = (),
    finished: Sequence[str] = (),
    preempted: Sequence[str] = (),
    resumed: Sequence[str] = (),
    **attributes: Any,
) -> Any:
    """cached: (request, new blocks, computed tokens) each."""
    going_on = CachedRequests(
        [req_id for req_id, *_ in cached],
        set(resumed),
        [(blocks,) for _, blocks, _ in cached],
        [computed for *_, computed in cached],
    )
    step = SchedulerStep(counts, list(new), going_on, set(finished), set(preempted))
    for name, value in attributes.items():
        setattr(step, name, value)
    return step


@pytest.fixture(scope="module")
def worker(daemon: DaemonProcess) -> Iterator[Worker]:
    made = Worker(daemon)
    yield made
    made.cache.close()


def run_round(worker: Worker, nth: int) -> Interrupter:
    """Five steps; the second is interrupted at its ``nth`` place, and what it would have computed is lost.

    Raises:
        AssertionError: a later step shows that something of it was not noted.
    """
    cache = worker.cache
    cache.new_step_starts(
        output(
            {"a": 8, "c": 4, "p": 4},
            [NewRequest("a", 0, ([0, 1],)), NewRequest("c", 0, ([2],)), NewRequest("p", 0, ([3],))],
            stagecache_published={"a": [(0, b"h" * 32)]},
        )
    )
    worker.save(("a", 0, [0, 1], 8), ("c", 0, [2], 4), ("p", 0, [3], 4))
    lost = output(
        {"c": 4, "n": 4},
        [NewRequest("n", 0, ([5],))],
        [("c", [6], 4)],
        finished=["a"],
        preempted=["p"],
        stagecache_settled={"c": [(2, b"c" * 32)]},
    )

    def begin() -> None:  # As the shims do.
        try:
            cache.new_step_starts(lost)
        except BaseException:
            cache.miss_step(lost)
            raise

    interrupter = Interrupter(nth, once=True)
    interrupter.run(begin)
    where = interrupter.where
    cache.new_step_starts(
        output({"a": 4, "c": 4, "n": 4}, [NewRequest("a", 0, ([9],))], [("c", [7], 8), ("n", [8], 4)])
    )
    came = worker.save(("a", 0, [9], 4), ("c", 8, [2, 6, 7], 4), ("n", 4, [5, 8], 4))
    assert came == {"a": [0, 1, 2, 3], "c": [8, 9, 10, 11], "n": [4, 5, 6, 7]}, where
    live = cache._requests.live
    assert {name: state.blocks for name, state in live.items() if name != "p"} == {
        "a": [9],
        "c": [2, 6, 7],
        "n": [5, 8],
    }, where
    assert all(state.whole for state in live.values()), where
    assert "a" not in cache._saver.sharing._held, where
    cache.new_step_starts(output({"p": 8}, [], [("p", [10, 11], 0)], finished=["a", "c", "n"], resumed=["p"]))
    assert worker.save(("p", 0, [10, 11], 8)) == {"p": [4, 5, 6, 7]}, where
    cache.new_step_starts(output({}, finished=["p"]))
    assert not live, where
    assert not cache._saver.deferred.open, where
    assert not cache._saver.deferred._write_n, where
    assert not cache._saver.sharing._held, where
    assert len(cache._requests.delivered) == 64, "rows of the table are reused"
    return interrupter


def interrupt_everywhere(worker: Worker) -> int:
    nth = 1
    while run_round(worker, nth).where:
        nth += 1
    return nth - 1


def test_whatever_interrupts_it_the_next_step_notes_what_the_output_said(worker: Worker) -> None:
    """R1, R2, R3: a request that ended is gone, and its id may come again with all of its rows."""
    assert interrupt_everywhere(worker) > 80, "the interrupt has many places to be"


def test_an_output_that_is_noted_nowhere_again_is_noticed(
    daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: that a new epoch begins is not enough."""
    monkeypatch.setattr(StageCache, "miss_step", lambda self, _: setattr(self._saver.epochs, "unlogged", True))
    worker = Worker(daemon)
    with pytest.raises(AssertionError, match=r"\.py:\d+ "):
        interrupt_everywhere(worker)
    worker.cache.close()


def test_a_scheduler_that_names_all_its_requests_ends_the_others(worker: Worker) -> None:
    """Its output that said so was lost on the way."""
    cache = worker.cache
    cache.new_step_starts(output({"x": 4, "y": 4}, [NewRequest("x", 0, ([0],)), NewRequest("y", 0, ([1],))]))
    worker.save(("x", 0, [0], 4), ("y", 0, [1], 4))
    cache.new_step_starts(output({"y": 4}, [], [("y", [2], 4)], stagecache_requests=["y", "waits"]))
    assert worker.save(("y", 4, [1, 2], 4)) == {"y": [4, 5, 6, 7]}
    assert list(cache._requests.live) == ["y"]
    assert "x" not in cache._saver.deferred.open
    cache.new_step_starts(output({}, finished=["y"]))


def test_a_lost_step_of_a_request_that_ran_before_begins_a_new_epoch(worker: Worker) -> None:
    """W8: nobody told which blocks it has, and one of them may hold an older tenant's rows."""
    cache = worker.cache
    cache.new_step_starts(output({"old": 4, "early": 4}, [NewRequest("old", 0, ([1],))], cached=[("early", [], 4)]))
    worker.save(("early", 4, [3, 4], 4), ("old", 0, [1], 4))
    cache.new_step_starts(output({"early": 4}, [], [("early", [1], 8)], finished=["old"]))  # never saved
    epoch = cache.session.epoch
    cache.new_step_starts(output({}, finished=["early"]))
    assert cache.session.epoch == epoch + 1
