"""The queue between the engine thread and the log, and the memory that its copies hold."""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("torch")

import numpy as np

from stagecache import sender as sender_module
from stagecache.errors import StageCacheError
from stagecache.log import LogFullError
from stagecache_wire.records import Kind, Record
from tests.daemon_process import poll_until
from tests.device.scenarios import device_of
from tests.model.steps import Refused
from tests.rules.builder import Stage, numbers, refusal

if TYPE_CHECKING:
    from tests.device.scenarios import Make


def test_a_record_is_published_in_the_context_that_gave_it(
    make_on: Callable[[str], Make], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that the daemon's spans belong to the trace of their step."""
    stage = make_on("lazy")()
    log = device_of(stage).cache.session.log
    append, step, seen = log.append, contextvars.ContextVar("step", default=0), []

    def noted(record: Record, *arguments: Any, **more: Any) -> int:
        seen.append((record.kind, step.get()))
        return append(record, *arguments, **more)

    monkeypatch.setattr(log, "append", noted)
    for number in (1, 2):
        step.set(number)
        stage.step(f"a{number}:[{number}]@0+4", k=number)
    poll_until(lambda: len(seen) == 2, "two records")
    assert seen == [(Kind.SAVE, 1), (Kind.SAVE, 2)]


def test_what_waits_for_the_sender_is_bounded(make_on: Callable[[str], Make], monkeypatch: pytest.MonkeyPatch) -> None:
    stage = make_on("lazy")()
    cache = device_of(stage)
    monkeypatch.setattr(sender_module, "MOST_WAITING", 3)
    monkeypatch.setattr(sender_module, "QUEUE_TIMEOUT_S", 0.05)
    cache.streams.gate.clear()
    stage.saved("a:[0]@0+4", k=1).discard()
    lost = Record(0, Kind.LOST, rows=1, unit_runs=True, runs=np.array([200], np.uint32))
    session = cache.cache.session
    for _ in range(2):
        session.append(Record(0, Kind.LOST, rows=1, unit_runs=True, runs=lost.runs))
    with pytest.raises(StageCacheError, match="the sender"):
        session.append(lost)
    cache.streams.gate.set()
    assert stage.step("b:[0,1]@4+1", k=2).numbers("b") == "1 1 1 1 2"


def test_a_record_larger_than_the_ring_is_refused_before_it_has_a_sequence(make_on: Callable[[str], Make]) -> None:
    stage = make_on("lazy")()
    session = device_of(stage).cache.session
    huge = Record(0, Kind.LOST, rows=1, runs=np.zeros((session.log.longest // 8 + 1, 2), np.uint32))
    with pytest.raises(LogFullError):
        session.append(huge)
    assert stage.step("a:[0]@0+4", k=1)["a"] == "a0 a1 a2 a3"


def test_memory_of_leftovers_comes_back_however_its_step_ends(make_on: Callable[[str], Make]) -> None:
    """Materialized, discarded before its copies landed, failed, refused behind its copies."""
    stage = make_on("lazy")({"slab_bytes": 1 << 16}, deferred=frozenset({"late"}))
    cache = device_of(stage)
    stage.step("a:[0]@0+4", late=1)
    cache.streams.gate.clear()
    stage.saved("b:[1]@0+4", late=2, ref=numbers([1, 2])).discard()
    cache.streams.gate.set()
    stage.begin("c:[2]@0+4")
    cache.streams.fail_calls = 1
    assert refusal(stage.save(late=3, ref=numbers([1, 2])).materialize)
    refusal(lambda: stage.begin("d:[3]@0+4"))
    cache.view.show(stage.begun)
    session = cache.cache.session
    append = session.append

    def refuse(*_: Any, **__: Any) -> int:
        session.append = append  # type: ignore[method-assign]
        raise Refused(["Interrupted"])

    session.append = refuse  # type: ignore[method-assign]
    assert refusal(lambda: stage.save(late=4, ref=numbers([1, 2])))
    stage.step("e:[4]@0+4")  # without any: takes back what was given back
    _is_empty(stage)


def test_memory_of_a_save_that_found_no_page_is_not_a_later_flushs(make_on: Callable[[str], Make]) -> None:
    """W2, W7"""
    settings = {"staging_claim_timeout_s": 0.05}
    stage = make_on("lazy")(settings, deferred=frozenset({"late"}), depth=1)
    kept = stage.saved("a:[0]@0+4", late=1)
    stage.begin("b:[1]@0+4")
    assert refusal(lambda: stage.save(late=2, ref=numbers([1, 2])))
    stage.begin(finished="a")
    kept.discard()
    assert stage.step("c:[0,2]@4+1", late=3).numbers("c", "late") == "1 1 1 1 3"
    stage.step("e:[4]@0+4")
    _is_empty(stage)


def _is_empty(stage: Stage) -> None:
    slab = device_of(stage).device.slab
    poll_until(lambda: slab.used_bytes - sum(extent.size for extent in slab._returned) == 0, "the slab to be empty")
