"""The protocol between real processes: a daemon, and workers whose every row is held against a plain dict."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from stagecache.counters import Counters
from stagecache.errors import UnreadableHitError
from stagecache.rpc import Rpc
from stagecache_wire import layout
from tests.crash.by_hand import save
from tests.crash.load import Load
from tests.crash.workers import Workers
from tests.crash.workload import Part, Workload
from tests.daemon_process import DaemonProcess

DECODES = 50
REQUESTS = 8


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    made = Workers()
    yield made
    made.close()


@pytest.fixture
def load(daemon: DaemonProcess) -> Iterator[Load]:
    made = Load(daemon.socket, 31)
    yield made
    made.close()


def test_a_thousand_random_steps_are_exact(daemon: DaemonProcess, workers: Workers) -> None:
    """Decode, prefill, hits of every kind, finishes, preemptions, lost steps and resets; float32, bfloat16, bool and a
    deferred int64 key, and keys that are found and given up on the way."""
    workers.start(daemon, seed=21, steps=1000, tell=True)
    done = workers.result()
    assert done["rows"] > 20_000
    assert done["hit_rows"] > 2_000


def test_two_sessions_at_once_do_not_see_each_other(daemon: DaemonProcess, workers: Workers) -> None:
    """Both take the same steps on the same slots with other rows, one here and one in its own process."""
    workers.start(daemon, seed=22, salt=1, steps=300, tell=True)
    mine = Load(daemon.socket, 22, workload=Workload(22, salt=2))
    try:
        for _ in range(300):
            mine.run_step()
        mine.finish()
    finally:
        mine.close()
    assert workers.result()["rows"] == mine.checked_rows


def test_slots_that_another_session_wrote_are_unreadable(daemon: DaemonProcess, load: Load) -> None:
    other = Load(daemon.socket, 32)
    try:
        save(load, [Part("a", [0, 1], 0, 8)])
        found = save(load, [Part("b", [0, 1], 8, 0, 8), Part("c", [2], 0, 1)])
        assert len(load.cache.materialize(found, ["b"]).hidden_states["b"]) == 8
        missed = save(other, [Part("b", [0, 1, 2], 8, 1, 8)])
        with pytest.raises(UnreadableHitError):
            other.cache.materialize(missed, ["b"])
    finally:
        other.close()


class CountedBell:
    """A doorbell that counts how often it was rung."""

    def __init__(self, bell: Any) -> None:
        self._bell = bell
        self.rings = 0

    def release(self) -> None:
        self.rings += 1
        self._bell.release()


def test_a_decode_step_without_hits_is_one_record_at_most_one_post_and_no_call(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = [Part(f"r{index}", [index], 0, 1) for index in range(REQUESTS)]
    first = save(load, parts)
    load.cache.materialize(first, [part.req_id for part in parts])
    session = load.cache.session
    bell = session.log._daemon_doorbell = CountedBell(session.log._daemon_doorbell)
    calls: list[str] = []
    monkeypatch.setattr(Rpc, "_call", lambda self, name, *rest: calls.append(name))
    before = (session.rpc.calls, session.control.words[layout.W_HEAD])
    for step in range(DECODES):
        for part in parts:
            part.first = (part.first + 1) % load.workload.block_size
        step_id = save(load, parts, new=False)
        out = load.cache.materialize(step_id, [part.req_id for part in parts])
        assert [out.hidden_states[part.req_id][0, 0].item() for part in parts] == [
            float(load.steps * 100 + row) for row in range(REQUESTS)
        ], f"step {step}"
    assert bell.rings < DECODES, "a daemon that looks by itself is not rung for"
    assert session.control.words[layout.W_HEAD] - before[1] == DECODES
    assert (session.rpc.calls, calls) == (before[0], [])
    monkeypatch.undo()


def test_a_hit_costs_no_call_either(load: Load) -> None:
    save(load, [Part("a", [0, 1], 0, 8)])
    calls = load.cache.session.rpc.calls
    step_id = save(load, [Part("b", [0, 1, 2], 8, 2, 8)])
    assert len(load.cache.materialize(step_id, ["b"]).hidden_states["b"]) == 10
    assert load.cache.session.rpc.calls == calls


def test_counters_say_what_was_done(load: Load) -> None:
    save(load, [Part("a", [0, 1], 0, 8)])
    step_id = save(load, [Part("b", [0, 1, 2], 8, 2, 8)])
    load.cache.materialize(step_id, ["b"])
    counters: Counters = load.cache.counters
    assert (counters.steps, counters.computed_rows, counters.hits, counters.hit_rows) == (2, 10, 1, 8)
    assert (counters.materialized, counters.lost_steps, counters.refused_saves) == (1, 0, 0)
