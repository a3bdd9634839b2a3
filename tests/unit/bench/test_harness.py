"""The bench measures what it says: wrong rows end it, ratios are of medians, every target is a line."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from stagecache.bench.batch import Shape  # noqa: E402
from stagecache.bench.contenders import NONE, OURS, NoCache  # noqa: E402
from stagecache.bench.copies import COPY_KINDS, measure_copies  # noqa: E402
from stagecache.bench.figures import CaseFigures, ContenderFigures, Spread  # noqa: E402
from stagecache.bench.hits import Hits, SameStepHits  # noqa: E402
from stagecache.bench.measure import FORWARDS, BlockSample, StepSample, WrongRowsError, check, run_step  # noqa: E402
from stagecache.bench.run import WORKLOADS, BenchOptions, BenchResult, run_case, workloads  # noqa: E402
from stagecache.bench.targets import targets  # noqa: E402
from stagecache.bench.workloads import Decode, Deferred, Prefill, Workload  # noqa: E402
from stagecache.cli.bench import WORKLOADS as CLI_WORKLOADS  # noqa: E402
from tests.daemon_process import DaemonProcess  # noqa: E402

SMALL = [
    Decode(4, 64, 1, 0.0, 3),
    Prefill(256, 96, 64, 0),
    Deferred(3, 64, 4),
    Hits(64, 3, 64, 0.0),
    SameStepHits(64, 64, 0.0),
]


@pytest.mark.parametrize("workload", SMALL, ids=lambda workload: workload.name)
def test_each_workload_runs_and_its_rows_are_right(workload: Workload, daemon: DaemonProcess) -> None:
    case = run_case(workload, daemon.socket, daemon.pid, BenchOptions(rounds=2, peer=False))
    assert case.ours.total.median > 0
    assert (case.none is None) == workload.has_hits
    assert case.moved_bytes["engine"] + case.moved_bytes["daemon"] >= case.fewest_bytes
    assert case.as_dict()["contenders"][OURS]["daemon_cpu_us"] > 0


def test_a_wrong_row_is_noticed() -> None:
    workload = Decode(4, 64, 0, 0.0, 1)
    lane = workload.lane()
    contender = NoCache(lane.batch)
    (step,) = workload.prepare(lane)
    _, outputs, ids = run_step(contender, step)
    check(contender, step, outputs, ids)
    shifted = replace(step, expected=[*step.expected[1:], step.expected[0]])
    with pytest.raises(WrongRowsError, match="__hidden_states__ of request decode-0000"):
        check(contender, shifted, outputs, ids)


def test_rows_differ_from_step_to_step() -> None:
    first, second = Shape(64).rows(8, 0), Shape(64).rows(8, 1)
    assert not torch.equal(first.hidden.view(torch.int16), second.hidden.view(torch.int16))


def test_the_faster_mode_of_the_peer_counts() -> None:
    def figures(nanoseconds: int) -> ContenderFigures:
        step = StepSample(nanoseconds, 0, 0, 0)
        return ContenderFigures("step", [BlockSample([step, step], engine_cpu=nanoseconds)])

    by_name = {OURS: figures(1_000), "vllm-omni eager": figures(50_000), "vllm-omni async": figures(40_000)}
    case = CaseFigures("decode", {}, "", "step", 0, by_name)
    assert case.peer is not None
    assert case.peer[0] == "vllm-omni async"
    assert case.ratio == pytest.approx(40.0)
    assert NONE not in by_name


def test_spread() -> None:
    spread = Spread.of([float(value) * 1e3 for value in range(101)])
    assert (spread.p10, spread.median, spread.p90) == (10.0, 50.0, 90.0)


def test_a_run_without_figures_has_all_targets_unmeasured() -> None:
    lines = targets(BenchResult({}, {}))
    assert len(lines) > 10
    assert {line.verdict for line in lines} == {"not measured in this run"}
    assert all(line.command.startswith("stagecache bench") for line in lines)


def test_workloads_of_the_command_are_those_of_the_bench() -> None:
    assert CLI_WORKLOADS == WORKLOADS


@pytest.mark.parametrize("name", ["decode", "prefill", "hits", "same-step", "deferred", "blocks"])
def test_only_picks_a_workload(name: str) -> None:
    assert workloads(BenchOptions(only=[name]))


def test_a_forward_takes_its_time_asleep_or_at_work() -> None:
    spent = {}
    for name, made in FORWARDS.items():
        forward = made()
        begun, cpu = time.monotonic(), time.thread_time()
        forward(0.05)
        assert time.monotonic() - begun >= 0.05
        spent[name] = time.thread_time() - cpu
    assert spent["sleep"] < 0.001 < spent["work"]


def test_copies_are_compared_byte_by_byte() -> None:
    result = measure_copies(64, 256, scattered=True, repetitions=3)
    assert all(len(getattr(result, kind)) == 3 for kind in COPY_KINDS)
    assert result.share("scatter") > 0


def test_plots_show_every_workload_and_are_the_same_for_the_same_result(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from stagecache.bench.plots import write_plots

    def figures(nanoseconds: int) -> ContenderFigures:
        step = StepSample(nanoseconds, 0, 0, 0)
        return ContenderFigures("step", [BlockSample([step, step], engine_cpu=nanoseconds)])

    cases = [
        CaseFigures(
            workload,
            {"requests": requests},
            f"requests {requests}, forward ms 0",
            "step",
            0,
            {OURS: figures(100_000), "vllm-omni async": figures(900_000)},
            {"save: slots": 9.0, "daemon: busy": 4.0},
        )
        for workload in ("decode", "same-step hits")
        for requests in (32, 256)
    ]
    first, again = (write_plots(BenchResult({}, {}, cases), tmp_path / name) for name in ("a", "b"))
    assert [path.name for path in first] == ["decode.svg", "same-step-hits.svg", "parts.svg"]
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in again]
    text = first[0].read_text()
    assert "requests 256" in text
    assert "vllm-omni async" in text
    assert NONE not in text
