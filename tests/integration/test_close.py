"""A closed cache and all that it mapped are gone with the last reference to it: no collector has to find them.

A worker that attaches and closes many times would otherwise keep arenas of 64 MiB until the next full collection.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from stagecache import errors
from stagecache.cache import StageCache
from stagecache.step import NewRequest, SchedulerStep
from stagecache_wire.geometry import KeySchema
from tests.crash.by_hand import begin, read, save
from tests.crash.load import Load
from tests.crash.workload import DEFERRED, KINDS, Part, Workload
from tests.daemon_process import DaemonProcess

SPARE = [20, 21, 22, 23]
"""Blocks that the random steps leave alone."""


@pytest.fixture(autouse=True, scope="module")
def no_collector() -> Iterator[None]:
    """Nothing but reference counts frees anything."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def mappings(name: str = "stagecache.") -> int:
    """How many segments this process has mapped."""
    return sum(name in line for line in Path("/proc/self/maps").read_text().splitlines())


def random_steps(load: Load) -> None:
    for _ in range(40):
        load.run_step()


def unreadable_hit(load: Load) -> None:
    step = save(load, [Part("bad", SPARE[:2], 4, 1, 4)])
    with pytest.raises(errors.UnreadableHitError):
        read(load, step, "bad")


def uncovered_hit(load: Load) -> None:
    with pytest.raises(errors.HitNotCoveredError):
        begin(load, [Part("bad", [], 8, 1, 8)])


def wrong_row(load: Load) -> None:
    step = save(load, [Part("bad", SPARE[:2], 0, 3)], outputs={"ctx": torch.zeros(3, 5)})
    with pytest.raises(errors.SchemaMismatchError):
        read(load, step, "bad")


def refused_key(load: Load) -> None:
    """The daemon will not open it: the error is kept and raised at each hit."""
    wide = torch.zeros(8, 1 << 20)
    step = save(load, [Part("wide", SPARE[:2], 0, 8)], outputs={"wide": wide})
    read(load, step, "wide")
    for index in range(3):
        blocks = [*SPARE[:2], SPARE[2]]
        step = save(load, [Part(f"hit{index}", blocks, 8, 1, 8)], outputs={"wide": wide[:1]}, finished=("wide",))
        with pytest.raises(errors.StageCacheError):
            read(load, step, f"hit{index}")


def open_deferred_rows(load: Load) -> None:
    """Rows that were never flushed."""
    (name,) = DEFERRED
    step = save(load, [Part("late", SPARE[:2], 0, 2)], outputs={name: torch.zeros(2, *KINDS[name].shape).long()})
    read(load, step, "late")


def unconsumed_steps(load: Load) -> None:
    save(load, [Part("open", SPARE[:2], 0, 2)])
    load.cache.new_step_starts(SchedulerStep({"r": 1}, [NewRequest("r", 0, ([SPARE[2]],))]))


def full_house(load: Load) -> None:
    """The error of a save that found no page."""
    for index in range(load.depth):
        save(load, [Part(f"p{index}", SPARE[:1], 0, 1)])
    with pytest.raises(errors.StagingTimeoutError):
        save(load, [Part("one too many", SPARE[:1], 0, 1)])


def traced(load: Load) -> None:
    from opentelemetry.sdk.trace import TracerProvider

    from stagecache import tracing

    tracing.instrument(load.cache, "m", TracerProvider().get_tracer("test"))
    random_steps(load)


LIVES: list[Callable[[Load], None]] = [
    lambda load: None,
    random_steps,
    unreadable_hit,
    uncovered_hit,
    wrong_row,
    refused_key,
    open_deferred_rows,
    unconsumed_steps,
    full_house,
    traced,
]


@pytest.mark.parametrize("life", LIVES, ids=lambda life: life.__name__.strip("<>"))
def test_a_closed_cache_is_gone_with_its_last_reference(daemon: DaemonProcess, life: Callable[[Load], None]) -> None:
    before = mappings()
    load = Load(
        daemon.socket, 3, workload=Workload(3, resets=0.0), extra_blocks=8, wait_s=0.2 if life is full_house else 20.0
    )
    assert mappings() > before
    life(load)
    load._held.clear()
    load._open.clear()
    load.cache.close()
    parts: dict[str, Any] = {
        "cache": load.cache,
        "session": load.cache.session,
        "control": load.cache.session.control,
        "log": load.cache.session.log,
        "saver": load.cache._saver,
        "deferred": load.cache._saver.deferred,
        "arena": load.cache._arena,
        "watcher": load.cache.session.watcher,
    }
    alive = {name: weakref.ref(part) for name, part in parts.items()}
    parts.clear()
    del load
    assert [name for name, reference in alive.items() if reference() is not None] == []
    assert mappings() == before


def test_a_cache_that_the_daemon_left_is_gone_too(fresh_daemon: DaemonProcess) -> None:
    """Errors of an outage are kept with the hits that met them."""
    before = mappings()
    load = Load(fresh_daemon.socket, 4, workload=Workload(4, resets=0.0), extra_blocks=8, daemon_grace_s=0.1)
    read(load, save(load, [Part("good", SPARE[:2], 0, 8)]), "good")
    fresh_daemon.kill()
    step = save(load, [Part("hit", SPARE[:3], 8, 1, 8)], finished=("good",))
    with pytest.raises(errors.DaemonLostError):
        read(load, step, "hit")
    for index in range(2 * load.depth):
        read(load, save(load, [Part(f"own{index}", SPARE[3:], 0, 2)]), f"own{index}")
    load.cache.close()
    reference = weakref.ref(load.cache)
    del load
    assert reference() is None
    assert mappings() == before
    fresh_daemon.start()


def test_rows_that_were_handed_out_keep_the_arena_and_nothing_else(daemon: DaemonProcess) -> None:
    """S3: they stay good after the close."""
    before = mappings()
    load = Load(daemon.socket, 5, workload=Workload(5, resets=0.0), extra_blocks=8)
    read(load, save(load, [Part("good", SPARE[:2], 0, 8)]), "good")
    first = load.steps * 100.0
    step = save(load, [Part("hit", SPARE[:3], 8, 1, 8)], finished=("good",))
    states = load.cache.materialize(step, ["hit"]).hidden_states
    assert states is not None
    rows = states.pop("hit")
    load.cache.close()
    reference = weakref.ref(load.cache)
    del load
    assert reference() is None
    assert mappings() == before + 1
    assert rows[:8, 0].tolist() == [first + index for index in range(8)]
    del rows
    assert mappings() == before


def test_a_hit_on_a_refused_key_costs_nothing_that_stays(daemon: DaemonProcess) -> None:
    """The kept error is raised as a new one each time: an object that is raised again and again grows its traceback."""
    load = Load(daemon.socket, 6, workload=Workload(6, resets=0.0), extra_blocks=8)
    refused_key(load)
    (error,) = load.cache._keys.refused.values()
    assert error.__traceback__ is None
    load.close()


def test_errors_come_again_with_all_they_said() -> None:
    first = errors.UnreadableHitError("no rows", req_id="r", key="k", slots=[1, 2], remedy="Reset.")
    second = first.again()
    assert second is not first
    assert type(second) is type(first)
    assert (str(second), vars(second)) == (str(first), vars(first))


def test_the_check_sees_a_cycle(daemon: DaemonProcess) -> None:
    """The control: one reference back, and the mapping stays."""
    before = mappings()
    cache: StageCache = Load(daemon.socket, 7).cache
    cache.session.log.cycle = cache  # type: ignore[attr-defined]
    cache.close()
    reference = weakref.ref(cache)
    del cache
    assert reference() is not None
    assert mappings() > before
    gc.collect()
    assert mappings() == before


def test_keys_that_are_opened_late_go_too(daemon: DaemonProcess) -> None:
    before = mappings()
    load = Load(daemon.socket, 8)
    load.cache.session.open_key(KeySchema("late.comer", "float32", (4,)))
    load.cache.close()
    del load
    assert mappings() == before
