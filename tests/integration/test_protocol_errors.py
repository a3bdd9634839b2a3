"""Bad input: each a typed error that says what to do, and nothing lost by it.

``Load`` runs random steps before and after; what it holds against its dict would show a row that went missing or came
from somewhere else. The bad steps are on blocks that the random ones leave alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from stagecache import errors
from stagecache.rpc import handshake
from stagecache_wire import layout
from stagecache_wire.geometry import KeySchema
from tests.crash.by_hand import begin, hidden_of, read, save
from tests.crash.load import Load
from tests.crash.workload import Part, Workload
from tests.daemon_process import DaemonProcess, poll_until

GOOD = [20, 21]
BAD = [22, 23]
"""Blocks beyond those of the random steps."""

STEPS_BETWEEN = 12


def load_of(daemon: DaemonProcess, seed: int, *, passing_keys: bool = True, **settings: Any) -> Load:
    """Without resets, which would take the rows of ``good`` too."""
    steps = Workload(seed, resets=0.0, passing_keys=passing_keys)
    return Load(daemon.socket, seed, workload=steps, extra_blocks=8, **settings)


@pytest.fixture
def load(daemon: DaemonProcess) -> Iterator[Load]:
    """A load with a request ``good`` whose 8 rows must stay readable whatever comes."""
    made = load_of(daemon, 41)
    yield made
    made.close()


@contextmanager
def nothing_lost(load: Load, *, lost_steps: int = 0) -> Iterator[None]:
    """Random steps and a request of its own before; the same, and a hit on that request's rows, after.

    lost_steps: saves that are refused inside, whose slots become UNKNOWN (W8).
    """
    for _ in range(STEPS_BETWEEN):
        load.run_step()
    step = save(load, [Part("good", GOOD, 0, 8)])
    rows = read(load, step, "good")
    yield
    load.workload.lost += lost_steps
    for _ in range(STEPS_BETWEEN):
        load.run_step()
    step = save(load, [Part("after", [*GOOD, 24], 8, 1, 8)], finished=("good",))
    assert read(load, step, "after") == [*rows, load.steps * 100.0]
    load.finish()


def assert_unknown(load: Load, blocks: list[int]) -> None:
    """A hit on these blocks is an error, never an older row."""
    step = save(load, [Part("probe", [*blocks, 25], 4 * len(blocks), 1, 4 * len(blocks))])
    with pytest.raises(errors.UnreadableHitError) as caught:
        read(load, step, "probe")
    assert caught.value.req_id == "probe"
    assert "reset" in str(caught.value)


def test_wrong_abi_is_refused_at_the_handshake(daemon: DaemonProcess, load: Load) -> None:
    with nothing_lost(load):
        with pytest.raises(errors.AbiMismatchError, match=str(layout.ABI + 1)) as caught:
            handshake(daemon.socket, "worker", abi=layout.ABI + 1)
        assert caught.value.reason == "ABI_MISMATCH"


def test_wrong_abi_is_refused_at_attach(daemon: DaemonProcess, load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    with nothing_lost(load):
        monkeypatch.setattr(layout, "ABI", layout.ABI + 1)
        with pytest.raises(errors.AbiMismatchError, match=r"release"):
            Load(daemon.socket, 1)
        monkeypatch.undo()
        Load(daemon.socket, 1).close()


def test_session_that_ended_is_unknown_and_a_new_one_works(daemon: DaemonProcess) -> None:
    load = load_of(daemon, 42)
    for _ in range(STEPS_BETWEEN):
        load.run_step()
    load.cache.session.rpc.detach(10.0)
    with pytest.raises(errors.UnknownSessionError) as caught:
        load.cache.session.open_key(KeySchema("late.to.the.party", "float32", (2,)))
    assert caught.value.reason == "UNKNOWN_SESSION"
    assert "ttach" in str(caught.value)
    step = save(load, [Part("own", [20], 0, 3)])
    assert read(load, step, "own") == [load.steps * 100.0 + row for row in range(3)], "a step without hits goes on"
    step = save(load, [Part("hit", [20, 21], 4, 1, 4)])
    with pytest.raises(errors.StageCacheError):
        read(load, step, "hit")
    load.close()
    again = load_of(daemon, 42)
    with nothing_lost(again):
        pass
    again.close()


def test_step_larger_than_the_page_is_refused_before_anything_is_copied(load: Load) -> None:
    """W6"""
    count = load.workload.capacity + 1
    blocks = [22, 23, 24, 25, 26, 27, 22]
    with nothing_lost(load, lost_steps=1):
        records = load.cache.session.log.head
        with pytest.raises(errors.StepTooLargeError, match=str(load.workload.capacity)):
            save(load, [Part("large", blocks, 0, count)])
        assert load.cache.session.log.head == records + 1, "one record, which says that the slots are lost"
        assert_unknown(load, BAD)


@pytest.mark.parametrize(
    "rows",
    [torch.zeros(3, 5), torch.zeros(3, 3, dtype=torch.float64), torch.zeros(3, 3, 1)],
    ids=lambda t: str(t.shape),
)
def test_wrong_width_or_dtype_is_refused_for_that_key_alone(load: Load, rows: torch.Tensor) -> None:
    """K3: hidden lands, the key's slots become UNKNOWN, the error names both shapes."""
    with nothing_lost(load):
        step = save(load, [Part("first", BAD, 0, 8)], outputs={"ctx": torch.zeros(8, 2, 2, dtype=torch.bfloat16)})
        load.cache.discard_step(step)
        step = save(load, [Part("bad", BAD, 0, 3)], finished=("first",), outputs={"ctx": rows})
        with pytest.raises(errors.SchemaMismatchError, match=r"bfloat16 rows of shape \(2, 2\)") as caught:
            read(load, step, "bad")
        assert str(tuple(rows.shape)) in str(caught.value)
        step = save(load, [Part("hit", [*BAD, 24], 8, 1, 8)], finished=("bad",))
        assert len(read(load, step, "hit")) == 9
        step = save(
            load, [Part("keyed", [*BAD, 25], 8, 1, 8)], outputs={"ctx": torch.ones(1, 2, 2, dtype=torch.bfloat16)}
        )
        with pytest.raises(errors.UnreadableHitError) as unreadable:
            read(load, step, "keyed")
        assert unreadable.value.key == "ctx"


@pytest.mark.parametrize(
    ("hit", "blocks"), [(8, []), (8, [22]), (6, [22, 23]), (4, [99])], ids=["none", "too few", "not aligned", "no such"]
)
def test_hit_without_blocks_is_refused(load: Load, hit: int, blocks: list[int]) -> None:
    """H3"""
    with nothing_lost(load):
        with pytest.raises(errors.HitNotCoveredError, match="hit"):
            begin(load, [Part("bad", blocks, hit, 1, hit)])
        begin(load, [], finished=("bad",))
        load.workload.lost += load.cache.counters.lost_steps - load.workload.lost  # a slot that it names, if any


def test_a_step_is_consumed_once(load: Load) -> None:
    """S1"""
    with nothing_lost(load):
        step = save(load, [Part("once", BAD, 0, 2)])
        read(load, step, "once")
        with pytest.raises(errors.StepConsumedError, match=f"step {step} "):
            load.cache.materialize(step, ["once"])
        with pytest.raises(errors.StepConsumedError):
            load.cache.discard_step(step)
        with pytest.raises(errors.StepConsumedError):
            load.cache.materialize(step + 1000, ["once"])


def test_a_request_outside_the_batch_is_refused_and_the_step_stays(load: Load) -> None:
    """S2"""
    with nothing_lost(load):
        step = save(load, [Part("inside", BAD, 0, 2)])
        with pytest.raises(errors.UnknownRequestError, match="outside"):
            load.cache.materialize(step, ["inside", "outside"])
        assert len(read(load, step, "inside")) == 2


def test_slots_that_do_not_cover_the_rows_are_refused(load: Load) -> None:
    """W6"""
    with nothing_lost(load, lost_steps=1):
        begin(load, [Part("short", BAD, 0, 4)])
        with pytest.raises(errors.SlotMismatchError, match=r"4 tokens.* 5"):
            load.cache.save_outputs(hidden_of(load, 5), {}, num_tokens_unpadded=5, num_tokens_padded=5)
        assert_unknown(load, [22])


def test_no_daemon_at_the_socket_says_so_and_what_to_start(tmp_path: Path) -> None:
    with pytest.raises(errors.DaemonUnavailableError, match=r"Start one with `stagecached --socket"):
        Load(tmp_path / "d.sock", 1)


def test_a_daemon_that_is_gone_costs_hits_but_no_step(fresh_daemon: DaemonProcess) -> None:
    """Steps without hits go on with their own rows; a hit is an error, never zeros; back again, a new epoch begins."""
    load = load_of(fresh_daemon, 43, passing_keys=False, daemon_grace_s=0.3)
    save_good = save(load, [Part("good", GOOD, 0, 8)])
    read(load, save_good, "good")
    load.cache.session.wait_consumed(load.cache.session.log.head, 10.0, "the log")
    fresh_daemon.kill()
    step = save(load, [Part("hit", [*GOOD, 24], 8, 1, 8)], finished=("good",))
    with pytest.raises(errors.DaemonLostError):
        read(load, step, "hit")
    for index in range(2 * load.depth):
        step = save(load, [Part(f"own{index}", [25], 0, 2)], finished=("hit",) if index == 0 else ())
        assert read(load, step, f"own{index}") == [load.steps * 100.0, load.steps * 100.0 + 1]
    fresh_daemon.start()
    epoch = load.cache.session.epoch
    poll_until(load.cache.session.returned, "the session to be adopted")
    load.workload.oracle.reset()
    step = save(load, [Part("new", GOOD, 0, 8)])
    read(load, step, "new")
    assert load.cache.session.epoch == epoch + 1
    assert_unknown(load, [25])
    step = save(load, [Part("again", [*GOOD, 24], 8, 1, 8)])
    assert len(read(load, step, "again")) == 9
    for _ in range(STEPS_BETWEEN):
        load.run_step()
    load.close()
