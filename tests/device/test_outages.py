"""Rows from a device while the daemon is away: what has its sequence is published when it is back, and never lost."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("torch")

from stagecache import log as log_module
from stagecache.errors import SessionFailedError
from tests.daemon_process import DaemonProcess, poll_until
from tests.device.cache import DeviceCache
from tests.device.scenarios import device_of
from tests.model.steps import Rules
from tests.rules.builder import HIDDEN_SCHEMA, NUMBER_SCHEMA, Stage, kinds, refusal, spelled


@pytest.fixture
def stage(fresh_daemon: DaemonProcess) -> Iterator[Stage]:
    def make(rules: Rules) -> DeviceCache:
        settings = {"num_blocks": 64, "arena_bytes": 1 << 20, "daemon_grace_s": 0.2, "slab_bytes": 1 << 16}
        return DeviceCache(rules, str(fresh_daemon.socket), order="compute first", **settings)

    stage = Stage(make, schemas={"__hidden_states__": HIDDEN_SCHEMA, "k": NUMBER_SCHEMA})
    yield stage
    device_of(stage).close()


def test_what_was_on_its_way_when_the_daemon_was_killed_is_in_the_pool_of_the_next_one(
    stage: Stage, fresh_daemon: DaemonProcess
) -> None:
    """W1: the copies land, and their records are published, while no daemon is there."""
    cache = device_of(stage)
    stage.step("a:[0]@0+4", k=1)
    cache.streams.gate.clear()
    stage.saved("b:[1]@0+4", k=2).discard()
    fresh_daemon.kill()
    stage.saved("c:[2]@0+4", k=3).discard()
    cache.streams.gate.set()
    fresh_daemon.start()
    out = stage.step("d:[1,3]@4+1", "e:[2,4]@4+1", k=5)
    assert (out["d"], out.numbers("e")) == (f"{spelled('b', 0, 4)} d4", "3 3 3 3 5")


def test_a_full_log_holds_records_back_and_not_the_rows_of_their_steps(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sender waits for room; copies behind that record land meanwhile, and materialize gets them."""
    cache = device_of(stage)
    stage.step("a:[0]@0+4", k=1)
    log, append = cache.cache.session.log, cache.cache.session.log.append
    full = [True]

    def no_room(*arguments: Any, **more: Any) -> int:
        if full[0]:
            raise log_module.LogFullError("no room")
        return append(*arguments, **more)

    monkeypatch.setattr(log, "append", no_room)
    first, second = stage.saved("b:[1]@0+4", k=2), stage.saved("c:[2]@0+4", k=3)
    assert second.materialize()["c"] == spelled("c", 0, 4)
    assert first.materialize()["b"] == spelled("b", 0, 4)
    full[0] = False
    assert stage.step("d:[1,3]@4+1", k=4)["d"] == f"{spelled('b', 0, 4)} d4"


def test_steps_go_on_while_the_daemon_is_gone(stage: Stage, fresh_daemon: DaemonProcess) -> None:
    """Their rows are handed out, from memory of the worker's own; hits fail; afterwards a new epoch begins."""
    cache = device_of(stage)
    stage.step("a:[0]@0+4", k=1)
    fresh_daemon.kill()
    for number in range(8):
        out = stage.step(f"b{number}:[1]@0+4", k=number)
        assert (out[f"b{number}"], out.numbers(f"b{number}")) == (
            spelled(f"b{number}", 0, 4),
            " ".join([str(number)] * 4),
        )
    assert cache.cache.counters.local_steps > 0
    assert kinds(refusal(stage.saved("c:[0,2]@4+1", k=1).materialize)) == {"DaemonLostError"}
    fresh_daemon.start()
    poll_until(lambda: stage.begin() is not None and not cache.cache.session.away, "the daemon to be back")
    stage.step("d:[3]@0+4", k=7)
    assert stage.step("e:[3,4]@4+1", k=8).numbers("e") == "7 7 7 7 8"
    assert kinds(refusal(stage.saved("f:[0,5]@4+1", k=1).materialize)) == {"UnreadableHitError"}


def test_a_session_that_is_over_is_replaced_and_its_memory_unpinned(stage: Stage, fresh_daemon: DaemonProcess) -> None:
    """Copies that were on their way into the old pages land before these are unpinned."""
    cache = device_of(stage)
    stage.step("a:[0]@0+4", k=1)
    pinned = len(cache.streams.pinned)
    cache.streams.gate.clear()
    late = stage.saved("b:[1]@0+4", k=2)
    fresh_daemon.stop()
    fresh_daemon.start()
    old = cache.cache.session
    poll_until(lambda: stage.begin() is not None and cache.cache.session is not old, "another session")
    cache.streams.gate.set()
    assert late.materialize()["b"] == spelled("b", 0, 4)
    poll_until(lambda: len(cache.streams.pinned) == pinned, "the old pages to be unpinned")
    stage.step("c:[3]@0+4", k=7)
    assert stage.step("d:[3,4]@4+1", k=8).numbers("d") == "7 7 7 7 8"
    assert not cache.streams.wrong


def test_a_sender_that_stops_ends_the_session_and_not_the_rows(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """A defect of ours: hits fail with its text, steps go on with their own rows, nothing hangs."""
    cache = device_of(stage)
    stage.step("a:[0]@0+4", k=1)
    monkeypatch.setattr(cache.cache.session.log, "append", lambda *_, **__: 1 / 0)
    saved = stage.saved("b:[1]@0+4", k=2)
    assert saved.materialize()["b"] == spelled("b", 0, 4)
    poll_until(cache.cache.session.has_ended, "the session to end")
    assert isinstance(cache.cache.session.failure(), SessionFailedError)
    assert "ZeroDivisionError" in str(cache.cache.session.failure())
    assert stage.step("c:[2]@0+4", k=3)["c"] == spelled("c", 0, 4)
