"""W8: after rows were lost the engine's scheduler is asked to forget its hashes, through the daemon."""

from __future__ import annotations

import queue
import threading
from typing import Any

import torch

from stagecache import StageCache
from stagecache.rpc import Rpc, handshake
from stagecache.step import NewRequest, SchedulerStep
from stagecache_wire.v1 import stagecache_pb2 as pb
from tests.integration.test_worked_example import GEOMETRY, OneRequest


class EpochStep(SchedulerStep):
    """A scheduler output as the scheduler-side shim leaves it."""

    stagecache_epoch = 0


def lose_one(cache: StageCache, view: OneRequest, step: type[SchedulerStep]) -> None:
    """A step that is never saved, then one that is."""
    cache.new_step_starts(step({"a": 4}, [NewRequest("a", 0, [0])]))
    cache.new_step_starts(step({"b": 4}, [NewRequest("b", 0, [1])], finished_req_ids={"a"}))
    view.set("b", 0, [1])
    cache.discard_step(cache.save_outputs(torch.zeros(4, 2), {}, num_tokens_unpadded=4, num_tokens_padded=4))


def test_a_worker_that_lost_rows_asks_the_scheduler_of_its_stage_alone(daemon: Any) -> None:
    heard: queue.Queue[tuple[str, str]] = queue.Queue()
    schedulers = []
    for stage in ("losing", "other"):
        rpc = Rpc(handshake(daemon.socket, "scheduler"))
        watch = rpc.watch(stage)
        events = iter(watch)
        assert next(events).kind == pb.WatchEvent.KIND_HELLO

        def listen(events: Any = events, stage: str = stage) -> None:
            for event in events:
                if event.kind == pb.WatchEvent.KIND_RESET:
                    heard.put((stage, event.cause))

        thread = threading.Thread(target=listen, daemon=True)
        thread.start()
        schedulers.append((rpc, watch, thread))
    view = OneRequest()
    cache = StageCache.attach(socket=daemon.socket, model="m", stage="losing", geometry=GEOMETRY, view=view)
    try:
        lose_one(cache, view, EpochStep)
        assert heard.get(timeout=10) == ("losing", "rows of a step were lost")
        # What the scheduler then does: its next output carries a higher epoch, and the worker begins one too.
        before = cache.session.epoch
        later = EpochStep({"b": 0}, [])
        later.stagecache_epoch = 1
        cache.new_step_starts(later)
        assert cache.session.epoch == before + 1
        cache.new_step_starts(later)
        assert cache.session.epoch == before + 1, "the same epoch is begun once"
        assert heard.empty()
    finally:
        cache.close()
        for rpc, watch, thread in schedulers:
            watch.cancel()
            thread.join(5)
            rpc.close()


def test_without_a_scheduler_side_shim_nobody_is_asked(daemon: Any) -> None:
    view = OneRequest()
    cache = StageCache.attach(socket=daemon.socket, model="m", stage="alone", geometry=GEOMETRY, view=view)
    try:
        calls = cache.session.rpc.calls
        lose_one(cache, view, SchedulerStep)
        assert cache.counters.lost_steps == 1
        assert cache.session.rpc.calls - calls == 1, "the one call opens the hidden key"
    finally:
        cache.close()
