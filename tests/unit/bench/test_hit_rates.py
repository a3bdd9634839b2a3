"""Hit rates on the real engine: the arithmetic, with values for which each verdict must turn."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.engine.hit_findings import CACHING, ENGINES, SHIM, SHIMS, Findings
from bench.engine.hit_rates import _measuring, main, parse, steps
from bench.engine.hit_report import MARKS, grids, write_markdown, write_plot
from bench.engine.hits import check_exact, hit_tokens
from bench.engine.intervals import FEWEST, differences, interval, judge
from bench.engine.processes import child_environment, in_turn
from bench.engine.rows_seen import RowsSeen, Seen, complete, equal_prefix
from bench.engine.shim_cpu import OwnCpu

torch = pytest.importorskip("torch")

# ------------------------------------------------------------------- tokens


@pytest.mark.parametrize(
    ("rate", "hit"),
    [(0, 0), (20, 128), (50, 320), (80, 512), (100, 608)],  # A prompt cached as a whole computes its last block again.
)
def test_only_full_blocks_hit_and_the_last_token_is_computed(rate: int, hit: int) -> None:
    assert hit_tokens(640, rate, 32) == hit


def test_rates_that_no_request_can_have_are_refused() -> None:
    check_exact(640, (0, 20, 40, 50, 60, 80), 32)
    with pytest.raises(ValueError, match="40 % of 600 tokens in blocks of 32"):
        check_exact(600, (0, 40), 32)
    with pytest.raises(ValueError, match="0 to 100"):
        hit_tokens(640, 101, 32)


# ---------------------------------------------------------------- intervals


def test_an_interval_holds_its_median_and_is_the_same_every_time() -> None:
    rounds = [[1.0, 1.1, 0.9], [1.2, 1.0, 1.05]]
    found = interval(rounds)
    assert found == interval(rounds)
    assert found.middle == pytest.approx(1.025)
    assert 0.9 <= found.low < found.middle < found.high <= 1.2
    assert found.count == 6
    with pytest.raises(ValueError, match="one or more rounds"):
        interval([])


def test_rounds_that_differ_widen_an_interval_as_turns_alone_would_not() -> None:
    """Six turns in three rounds, equal within each, against the same values in one round of many turns."""
    apart = interval([[1.0] * 20, [2.0] * 20, [3.0] * 20])
    mixed = interval([[1.0, 2.0, 3.0] * 20])
    assert apart.high - apart.low > 2 * (mixed.high - mixed.low)


def test_intervals_that_touch_are_not_apart_and_few_values_say_nothing() -> None:
    fast, slow = interval([[1.0, 1.1, 1.2, 1.0]]), interval([[2.0, 2.1, 2.2, 2.0]])
    near = interval([[1.15, 1.2, 1.3, 1.2]])
    assert fast.below(slow) is True
    assert slow.below(fast) is False
    assert fast.below(near) is False
    assert interval([[1.0] * (FEWEST - 1)]).below(slow) is None


def test_differences_are_taken_turn_by_turn() -> None:
    """A machine that is twice as slow in the second turn changes nothing."""
    ours, again, base = [[1.1, 2.2]], [[1.3, 2.6]], [[1.0, 2.0]]
    assert differences([ours], [base]) == [pytest.approx([0.1, 0.1])]
    assert differences([ours, again], [base]) == [pytest.approx([0.2, 0.2])]


@pytest.mark.parametrize(
    ("difference", "again", "verdict"),
    [
        ([0.02, 0.03, 0.01, 0.02], [0.01, -0.01, 0.0, 0.02], True),
        ([0.2, 0.25, 0.22, 0.2], [0.01, -0.01, 0.0, 0.02], False),
        ([0.02, 0.03, 0.01, 0.02], [0.2, -0.15, 0.0, 0.1], None),  # Equal engines differ by more than the bound.
        ([0.02, 0.18, 0.01, 0.15], [0.01, -0.01, 0.0, 0.02], None),  # The bound lies inside.
        ([0.02, 0.03, 0.01], [0.01, -0.01, 0.0, 0.02], None),
        ([0.02, 0.03, 0.01, 0.02], [0.01, -0.01, 0.0], None),
    ],
)
def test_a_verdict_needs_equal_engines_within_the_bound(
    difference: list[float], again: list[float], verdict: bool | None
) -> None:
    assert judge(interval([difference]), [interval([again])], 0.1) is verdict


# --------------------------------------------------------------- what holds


def served(rate: int, **changed: Any) -> dict[str, Any]:
    hit = hit_tokens(640, rate, 32)
    first = 0.05 + 0.0005 * (640 - hit)
    sample = {
        "rate": rate,
        "hit": hit,
        "cached": hit,
        "ttft_s": first,
        "tpot_s": 0.01,
        "first_cpu_s": first,
        "cpu_s": first + 0.15,
        "shim_first_cpu_s": 0.0006,
        "shim_cpu_s": 0.004,
        "shim_threads_s": 0.001,
        "equal": True,
        "complete": True,
    }
    return sample | changed


def batch(rate: int, **changed: Any) -> dict[str, Any]:
    hit = hit_tokens(640, rate, 32)
    found = {
        "wall_s": 3.0,
        "cpu_s": 3.0,
        "shim_cpu_s": 0.01,
        "shim_threads_s": 0.002,
        "hit": hit,
        "cached": [hit] * 2,
        "complete": [True] * 2,
    }
    return found | changed


def findings(serve: Any = served, batches: Any = batch) -> Findings:
    """Two rounds of three turns. serve, batches: samples by engine, rate and turn, where they take more than a rate."""
    found = Findings((0, 20, 40, 60, 80), 640, 16, 32, 2, 32)
    for _ in range(2):
        found.begin_round()
        for turn in range(3):
            noise = 1 + 0.001 * turn
            for engine in CACHING:
                for rate in found.rates:
                    sample = serve(rate) if serve is served else serve(engine, rate)
                    found.serve[engine][rate][-1].append(sample | {"ttft_s": noise * sample["ttft_s"]})
            for engine in ENGINES:
                for rate in found.batch[engine]:
                    sample = batches(rate) if batches is batch else batches(engine, rate)
                    found.batch[engine][rate][-1].append(sample | {"cpu_s": noise * sample["cpu_s"]})
    return found


def verdicts(found: Findings) -> dict[str, bool | None]:
    return {check.what: check.held for check in found.checks()}


def failed(found: Findings) -> list[str]:
    return [what for what, held in verdicts(found).items() if held is False]


def test_equal_engines_with_exact_hits_hold_everything() -> None:
    assert set(verdicts(findings()).values()) == {True}


@pytest.mark.parametrize(
    ("serve", "batches", "what"),
    [
        # One block less than the rate says, in one engine.
        (
            lambda e, r: served(r, cached=max(0, hit_tokens(640, r, 32) - 32 * (e == SHIM and r == 40))),
            batch,
            "hit rate 40 %",
        ),
        (served, lambda e, r: batch(r, cached=[0, 0]), "batches: prompt tokens"),
        (lambda e, r: served(r, complete=r != 60), batch, "rows of every step"),
        (lambda e, r: served(r, complete=None), batch, "rows of every step"),
        (lambda e, r: served(r, equal=r != 20), batch, "rows of every step"),
        (served, lambda e, r: batch(r, complete=[True, False]), "rows of every step"),
        (lambda e, r: served(r, ttft_s=0.3), batch, "time to the first token, shim on"),
        (served, lambda e, r: batch(r, shim_cpu_s=0.04), "no hits: the shim's own CPU"),
        (served, lambda e, r: batch(r, shim_cpu_s=0.01, shim_threads_s=0.03), "no hits: the shim's own CPU"),
        (served, lambda e, r: batch(r, cpu_s=3.1 if e in SHIMS else 3.0), "no hits: batches with the shim"),
        (
            lambda e, r: served(r, ttft_s=served(r)["ttft_s"] * (1.15 if e in SHIMS else 1)),
            batch,
            "80 % hits: time",
        ),
        (
            lambda e, r: served(r, first_cpu_s=served(r)["ttft_s"] * (1.15 if e in SHIMS else 1)),
            batch,
            "80 % hits: engine process' CPU",
        ),
    ],
)
def test_each_of_them_can_fail(serve: Any, batches: Any, what: str) -> None:
    found = failed(findings(serve, batches))
    assert len(found) == 1
    assert found[0].startswith(what)


def test_engines_of_a_kind_that_differ_allow_no_verdict_on_a_difference() -> None:
    found = findings(
        lambda e, r: served(r, ttft_s=served(r)["ttft_s"] * (1.2 if e.endswith("again") else 1)),
        lambda e, r: batch(r, cpu_s=3.05 if e.endswith("again") else 3.0),
    )
    undecided = [what for what, held in verdicts(found).items() if held is None]
    assert [what.partition(":")[0] for what in undecided] == ["no hits", "80 % hits"]
    assert failed(found) == []


# --------------------------------------------------------------------- rows


def step(*, first: int, rows: Any, computed: int) -> Any:
    count = int(rows.shape[0])
    return SimpleNamespace(
        req_ids=("request-1-0123abcd",),
        hidden={"request-1-0123abcd": rows},
        num_scheduled={"request-1-0123abcd": computed},
        first_position=lambda req_id: first,
        end_position=lambda req_id: first + count,
        rows_from_cache=lambda req_id: count - computed,
    )


def test_a_request_is_complete_only_with_each_position_once() -> None:
    rows = torch.arange(24.0).reshape(12, 2)
    taken = RowsSeen(keep=True)
    taken(step(first=0, rows=rows[:8], computed=4))
    taken(step(first=8, rows=rows[8:9], computed=1))
    seen = taken.forget("request-1")
    assert complete(seen, prompt=8, output=2, hit=4)
    assert not complete(seen, prompt=8, output=3, hit=4)  # One step is missing.
    assert not complete(seen, prompt=8, output=2, hit=0)  # The rows came from elsewhere.
    assert seen.first is not None
    assert torch.equal(seen.first, rows[:8])
    assert taken.forget("request-1") == Seen()
    taken(step(first=4, rows=rows[4:8], computed=4))  # The prefix is missing, or the step comes twice.
    assert taken.forget("request-1").gaps == 1


def test_rows_of_another_position_are_not_equal_and_rows_that_are_all_alike_say_nothing() -> None:
    wanted = torch.arange(24.0).reshape(12, 2)
    assert equal_prefix(wanted.clone(), wanted, 8)
    assert not equal_prefix(wanted[1:], wanted, 8)
    with pytest.raises(ValueError, match="do not depend on the position"):
        equal_prefix(torch.ones(12, 2), torch.ones(12, 2), 8)


# ------------------------------------------------------------- measured CPU


def test_the_engines_own_part_is_not_the_shims(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(100))
    monkeypatch.setattr("bench.engine.shim_cpu.time", SimpleNamespace(process_time=lambda: float(next(clock))))
    own = OwnCpu()
    forward = own.inner(lambda: next(clock))
    assert own.outer(lambda: (next(clock), forward()))()  # Ticks: begin 0, own 1, forward 2 to 4, end 5.
    assert own.cpu_s == 5 - 2
    forward()  # Outside of the shim nothing counts.
    assert own.cpu_s == 3


# ------------------------------------------------------------------ the rest


def test_engines_take_turns_so_that_none_is_always_first() -> None:
    orders = [in_turn("abcd", turn) for turn in range(8)]
    assert orders[0] == list("abcd")
    assert orders[1] == list("dcba")
    assert sorted(order[0] for order in orders) == sorted("abcd" * 2)
    assert sum(order.index("a") < order.index("b") for order in orders) == 4


def test_an_engine_without_the_shim_inherits_none_of_it() -> None:
    base = {"STAGECACHE_SOCKET": "/old", "VLLM_USE_V2_MODEL_RUNNER": "1", "HOME": "/h"}
    bare = child_environment(base, 1, None, stage="no shim")
    assert not any(name.startswith("STAGECACHE_") for name in bare)
    assert (bare["HOME"], bare["OMP_NUM_THREADS"], bare["VLLM_USE_V2_MODEL_RUNNER"]) == ("/h", "1", "0")
    shim = child_environment(base, 0, Path("/new"), stage="shim, again")
    assert (shim["STAGECACHE_SOCKET"], shim["STAGECACHE_STAGE"]) == ("/new", "shim-again")
    assert "OMP_NUM_THREADS" not in shim


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--prompt", "600"], "choose another length"),
        (["--rates", "80", "0"], "must rise"),
        (["--rounds", "0"], "1 or more"),
        (["--output", "1"], "2 or more"),
        (["--hidden", "100"], "multiple of 64"),
    ],
)
def test_wrong_options_say_what_to_change(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert text in capsys.readouterr().err


def test_the_command_in_a_page_does_not_name_files_of_this_machine() -> None:
    given = ["--rounds", "5", "--json", "/tmp/x.json", "--markdown=page.md", "--quick"]
    assert _measuring(given) == ["--rounds", "5", "--quick"]


def test_quick_is_short_and_yields_to_what_is_asked_for() -> None:
    quick, some = parse(["--quick"]), parse(["--quick", "--turns", "6"])
    assert (quick.rounds, quick.turns, some.rounds, some.turns) == (1, 4, 1, 6)
    assert steps(quick) * 3 < steps(parse([]))


MACHINE = {
    "processor": "a processor",
    "cpus": 2,
    "vllm": "0.30.0",
    "load_at_start": 0.5,
    "load_at_end": 0.7,
    "minutes": 8.0,
    "command": "the command",
} | dict.fromkeys(("threads", "layers", "hidden", "rounds", "turns", "batch_turns"), 1)


def test_tables_replace_what_stands_between_the_marks(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n\n{MARKS[0]}\nearlier figures\n{MARKS[1]}\n\nafter\n")
    found = findings()
    write_markdown(found, MACHINE, page)
    once = page.read_text()
    write_markdown(found, MACHINE, page)
    assert page.read_text() == once
    assert "earlier figures" not in once
    assert once.startswith("before\n")
    assert once.endswith("\n\nafter\n")
    assert "| 80 % | 128 |" in once
    assert all(len(row) == len(grid.columns) for grid in grids(found) for row in grid.rows)
    new = tmp_path / "new.md"
    write_markdown(found, MACHINE, new)
    assert new.read_text().startswith(MARKS[0])


def test_the_plot_is_the_same_for_the_same_figures(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    first, second = write_plot(findings(), tmp_path / "1"), write_plot(findings(), tmp_path / "2")
    assert first.read_bytes() == second.read_bytes()
    assert b"time to the first token" in first.read_bytes()


def test_a_file_that_holds_something_else_is_refused_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Something else\n")
    with pytest.raises(SystemExit):
        parse(["--markdown", str(page)])
    assert "add them, or name a new file" in capsys.readouterr().err
    with pytest.raises(ValueError, match="not empty"):
        write_markdown(findings(), MACHINE, page)
    assert page.read_text() == "# Something else\n"
    with pytest.raises(SystemExit):
        parse(["--json", str(tmp_path / "none" / "file")])
    assert "cannot be written" in capsys.readouterr().err
    assert parse(["--markdown", str(tmp_path / "new.md")]).markdown is not None
