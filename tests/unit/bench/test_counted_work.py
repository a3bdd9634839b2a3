"""What a decode step costs, in counted work: what a change of the hot path adds shows here, on any machine."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from stagecache.bench.contenders import Ours
from stagecache.bench.counted import CountedStep, count_calls, count_step
from stagecache.bench.hits import Hits
from stagecache.bench.measure import run_block
from stagecache.bench.workloads import Decode
from tests.daemon_process import DaemonProcess

PYTHON_CALLS = 54
C_CALLS = 71
"""Upper bounds for a decode step with one key; to be lowered with every gain."""
PYTHON_CALLS_A_KEY = 8
C_CALLS_A_KEY = 22
PYTHON_CALLS_OF_A_HIT = 131
C_CALLS_OF_A_HIT = 145


@pytest.fixture(scope="module")
def counted(daemon: DaemonProcess) -> dict[tuple[int, int], CountedStep]:
    """Counts by (requests, extra keys)."""
    found = {}
    for requests, extra in ((8, 0), (32, 0), (256, 0), (32, 2)):
        workload = Decode(requests, 256, extra, 0.0, 6)
        lane = workload.lane()
        ours = Ours(lane.batch, daemon.socket, workload.shape, workload.geometry)
        try:
            run_block(ours, workload.prepare(lane), None)
            for _ in range(2):
                run_block(ours, workload.block(lane), None)
            found[requests, extra] = count_step(ours, workload.block(lane))
        finally:
            ours.close()
    return found


def names(step: CountedStep) -> str:
    return ", ".join(f"{name} {times}" for name, times in step.by_name.most_common())


def test_calls_of_a_step(counted: dict[tuple[int, int], CountedStep]) -> None:
    step = counted[32, 0]
    assert step.python_calls <= PYTHON_CALLS, names(step)
    assert step.c_calls <= C_CALLS, names(step)


def test_calls_of_a_hit(daemon: DaemonProcess) -> None:
    workload = Hits(64, 1, 256, 0.0)
    lane = workload.lane()
    ours = Ours(lane.batch, daemon.socket, workload.shape, workload.geometry)
    try:
        run_block(ours, workload.prepare(lane), None)
        for _ in range(3):
            run_block(ours, workload.block(lane), None)
        counts = [count_calls(ours, workload.block(lane)[0], forward=True) for _ in range(4)]
    finally:
        ours.close()
    python, native = min(counts, key=lambda count: count[0].total() + count[1].total())
    assert python.total() <= PYTHON_CALLS_OF_A_HIT, python.most_common()
    assert native.total() <= C_CALLS_OF_A_HIT, native.most_common()


def test_calls_of_a_further_key(counted: dict[tuple[int, int], CountedStep]) -> None:
    one, three = counted[32, 0], counted[32, 2]
    assert three.python_calls - one.python_calls <= 2 * PYTHON_CALLS_A_KEY, names(three)
    assert three.c_calls - one.c_calls <= 2 * C_CALLS_A_KEY, names(three)


def test_a_step_calls_nothing_for_each_request(counted: dict[tuple[int, int], CountedStep]) -> None:
    few, many = counted[8, 0], counted[256, 0]
    # A step in which some request begins a block looks that up, for all of them at once.
    assert abs(few.python_calls - many.python_calls) <= 4
    assert abs(few.c_calls - many.c_calls) <= 8


def test_each_row_is_copied_once_in_and_once_out(counted: dict[tuple[int, int], CountedStep]) -> None:
    for (requests, extra), step in counted.items():
        keys = 1 + extra
        assert step.copies == 2 * keys
        assert step.copied_bytes == 2 * requests * 2 * 256 * keys


def test_one_buffer_a_key_is_allocated(counted: dict[tuple[int, int], CountedStep]) -> None:
    assert counted[32, 0].buffers == 1
    assert counted[32, 2].buffers == 3


def test_outputs_hold_a_tensor_a_request_and_little_else(counted: dict[tuple[int, int], CountedStep]) -> None:
    few, many = counted[8, 0], counted[256, 0]
    assert (many.held_blocks - few.held_blocks) / (256 - 8) < 3
    assert few.held_blocks < 150
