"""How a session ends for its worker: a forked child has none, and a daemon that lost it says so."""

from __future__ import annotations

import gc
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from stagecache import KeySchema, StageCache
from stagecache.errors import BudgetError, GeometryError, SessionFailedError
from stagecache.step import NewRequest, SchedulerStep
from stagecache_wire import layout
from stagecache_wire.geometry import Geometry
from tests.daemon_process import poll_until
from tests.integration.test_worked_example import GEOMETRY, OneRequest


def prefill(cache: StageCache, view: OneRequest, req_id: str, first: int, blocks: list[int], **outputs: Any) -> int:
    """One saved step of four tokens."""
    cache.new_step_starts(SchedulerStep({req_id: 4}, [NewRequest(req_id, first, blocks)]))
    view.set(req_id, first, blocks)
    rows = torch.arange(first, first + 4, dtype=torch.float32)[:, None].expand(4, 2)
    return cache.save_outputs(rows, outputs, num_tokens_unpadded=4, num_tokens_padded=4)


def attach(daemon: Any, stage: str, view: OneRequest) -> StageCache:
    return StageCache.attach(socket=daemon.socket, model="m", stage=stage, geometry=GEOMETRY, view=view)


def in_child(action: Any) -> int:
    """Run ``action`` in a forked child; its exit status, 0 when it returned, 1 when it raised."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            signal.alarm(20)
            action()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_forked_child_can_neither_end_nor_write_its_parents_session(daemon: Any) -> None:
    view = OneRequest()
    cache = attach(daemon, "fork", view)
    try:
        cache.discard_step(prefill(cache, view, "a", 0, [0]))
        head = cache.session.log.head

        def write() -> None:
            with pytest.raises(SessionFailedError, match="Attach in the child"):
                cache.session.check()
            cache.discard_step(prefill(cache, view, "x", 0, [1]))
            with pytest.raises(SessionFailedError):
                cache.materialize(prefill(cache, view, "y", 4, [0, 1]), ["y"])

        assert in_child(write) == 0
        assert in_child(cache.close) == 0
        assert cache.session.log.head == head
        assert cache.session.control.words[layout.W_HEAD] == head, "the log is as it was"
        merged = cache.materialize(prefill(cache, view, "b", 4, [0, 1]), ["b"]).hidden_states
        assert merged is not None
        assert merged["b"][:, 0].tolist() == list(range(8))
    finally:
        cache.close()


@pytest.mark.parametrize(
    "name", [7, ("a", "b"), "\ud800", "k" * 600, ""], ids=["int", "tuple", "surrogate", "long", "empty"]
)
def test_an_output_whose_name_no_key_can_have_costs_itself_alone(daemon: Any, name: Any) -> None:
    """The rows are handed out, hidden is kept, no step is lost."""
    view = OneRequest()
    cache = attach(daemon, "names", view)
    try:
        step = prefill(cache, view, "a", 0, [0], fine=torch.arange(4))
        cache.discard_step(step)
        cache.new_step_starts(SchedulerStep({"b": 4}, [NewRequest("b", 0, [1])]))
        view.set("b", 0, [1])
        rows = torch.zeros(4, 2)
        step = cache.save_outputs(rows, {name: torch.arange(4)}, num_tokens_unpadded=4, num_tokens_padded=4)
        assert cache.materialize(step, ["b", "b"]).mm_outputs[name]["b"].tolist() == [0, 1, 2, 3]
        merged = cache.materialize(prefill(cache, view, "c", 4, [1, 2]), ["c", "c"]).hidden_states
        assert merged is not None
        assert merged["c"].shape == (8, 2)
        assert cache.counters.lost_steps == 0
    finally:
        cache.close()


@pytest.mark.parametrize(
    "change",
    [
        {"geometry": Geometry(1 << 40, 4, 32)},
        {"geometry": Geometry(8, 0, 32)},
        {"geometry": Geometry(8, 4, -1)},
        {"keys": [KeySchema("k", "float12", ())]},
        {"keys": [KeySchema("k", "float32", (0,))]},
        {"stage": "\ud800"},
    ],
    ids=["blocks", "block-size", "capacity", "dtype", "row", "stage"],
)
def test_sizes_and_names_that_cannot_be_are_refused_before_anything_is_taken(
    daemon: Any, change: dict[str, Any]
) -> None:
    settings = {"model": "m", "stage": "sizes", "geometry": GEOMETRY, **change}
    with pytest.raises(GeometryError):
        StageCache.attach(socket=daemon.socket, view=OneRequest(), **settings)


def test_a_refused_attach_leaves_nothing_behind(daemon: Any) -> None:
    """No lock file, and no descriptor at the daemon, while this process lives on."""
    files, descriptors = daemon.shm_files(), len(os.listdir(f"/proc/{daemon.pid}/fd"))
    for _ in range(20):
        with pytest.raises(BudgetError):
            StageCache.attach(
                socket=daemon.socket,
                model="m",
                stage="refused",
                geometry=Geometry(1 << 22, 16, 32),
                view=OneRequest(),
                keys=[KeySchema("k", "float32", (1 << 16,))],
            )
    assert daemon.shm_files() == files
    poll_until(lambda: len(os.listdir(f"/proc/{daemon.pid}/fd")) <= descriptors + 4, "the daemon to let go")


def test_a_row_that_no_hit_could_bring_is_refused_when_its_key_is_opened(daemon: Any) -> None:
    """Its rows are handed out; hidden and the steps are kept."""
    view = OneRequest()
    small = Geometry(8, 4, 32, arena_bytes=1 << 16)
    with StageCache.attach(socket=daemon.socket, model="m", stage="wide", geometry=small, view=view) as cache:
        wide = torch.arange(4 * 4096, dtype=torch.float32).view(4, 4096)
        merged = cache.materialize(prefill(cache, view, "a", 0, [0], wide=wide), ["a"])
        assert torch.equal(merged.mm_outputs["wide"]["a"], wide)
        assert cache.counters.lost_steps == 0
        with pytest.raises(GeometryError, match="raise arena_bytes"):
            cache.materialize(prefill(cache, view, "b", 4, [0, 1], wide=wide), ["b"])


def test_a_key_opened_in_inference_mode_may_be_written_outside_of_it(daemon: Any) -> None:
    view = OneRequest()
    with StageCache.attach(socket=daemon.socket, model="m", stage="modes", geometry=GEOMETRY, view=view) as cache:
        rows = torch.arange(16, dtype=torch.float32).view(4, 4).t()
        with torch.inference_mode():
            cache.discard_step(prefill(cache, view, "a", 0, [0], turned=rows))
        merged = cache.materialize(prefill(cache, view, "b", 0, [1], turned=rows), ["b"])
        assert torch.equal(merged.mm_outputs["turned"]["b"], rows)


def test_a_worker_that_attaches_again_and_again_maps_no_more_than_at_first(daemon: Any) -> None:
    """Segments and semaphores of a closed session go with its objects."""

    def mapped() -> int:
        gc.collect()
        return sum("stagecache" in line for line in Path("/proc/self/maps").read_text().splitlines())

    before = mapped()
    for _ in range(5):
        view = OneRequest()
        with attach(daemon, "again", view) as cache:
            cache.discard_step(prefill(cache, view, "a", 0, [0]))
        del cache
    assert mapped() == before
