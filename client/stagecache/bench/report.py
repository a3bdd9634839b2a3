"""What a bench prints and writes."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from stagecache.bench.attribution import WHOLE_STEP
from stagecache.bench.contenders import NONE, OURS
from stagecache.bench.copies import COPY_KINDS
from stagecache.bench.figures import CaseFigures, Spread
from stagecache.bench.lookups import HASHES
from stagecache.bench.run import BenchResult
from stagecache.bench.targets import targets

_PIPE_WIDTH = 168
_UNITS = {"step": "a step", "block": "a prompt", "mean": "a step, flushes included"}


def show(result: BenchResult, out: Console) -> None:
    """Print all tables; into a file or a pipe in a width that keeps them readable."""
    if not out.is_terminal:
        out = Console(highlight=False, file=out.file, width=_PIPE_WIDTH)
    machine = result.machine
    out.print(
        f"\n{machine['processor']}, {machine['cpus']} CPUs, load {machine['load_at_start']:.1f} to "
        f"{machine['load_at_end']:.1f}; Python {machine['python']}, torch {machine['torch']} with "
        f"{machine['torch_threads']} threads. Times in µs: median (p10 to p90)."
    )
    for workload in dict.fromkeys(case.workload for case in result.cases):
        cases = [case for case in result.cases if case.workload == workload]
        out.print(_time_table(workload, cases))
        out.print(_cost_table(workload, cases))
    if result.cases:
        out.print(_attribution_table(result.cases))
    if result.copies:
        out.print(_copies_table(result))
    if result.sessions:
        out.print(_sessions_table(result))
    if result.lookups:
        out.print(_lookups_table(result))
    out.print(_targets_table(result))


def write_json(result: BenchResult, path: Path) -> None:
    """Write everything, samples of sessions and copies as spreads."""
    path.write_text(json.dumps(as_dict(result), indent=1) + "\n")


def as_dict(result: BenchResult) -> dict[str, Any]:
    """The result as plain values."""
    return {
        "machine": result.machine,
        "daemon": result.daemon,
        "cases": [case.as_dict() for case in result.cases],
        "copies": [
            {
                "rows": copy.rows,
                "row_bytes": copy.row_bytes,
                "layout": copy.layout,
                **{kind: Spread.of(getattr(copy, kind)).as_dict() for kind in COPY_KINDS},
            }
            for copy in result.copies
        ],
        "sessions": [
            {
                "sessions": run.sessions,
                "step": asdict(Spread.of(run.totals)),
                "p99_us": _p99(run.totals),
                "daemon_cpu_us_a_step": run.daemon_cpu / len(run.totals) / 1e3,
            }
            for run in result.sessions
        ],
        "lookups": [asdict(run) for run in result.lookups],
        "targets": [target.as_dict() for target in targets(result)],
    }


def _time_table(workload: str, cases: list[CaseFigures]) -> Table:
    table = Table(title=f"{workload}: engine thread, µs {_UNITS[cases[0].per]}", title_justify="left")
    table.add_column("case")
    for name in (OURS, "begin / save / materialize", "first", "peer", "its mode", "ratio", NONE):
        table.add_column(name, justify="right")
    for case in cases:
        ours, peer, none = case.ours, case.peer, case.none
        table.add_row(
            case.label,
            _spread(ours.total),
            " / ".join(f"{value:.0f}" for value in ours.phases.values()),
            f"{ours.first.total / 1e3:.0f}" if ours.first is not None else "",
            _spread(peer[1].total) if peer else "",
            peer[0].rpartition(" ")[2] if peer else "",
            f"{case.ratio:.1f}x" if case.ratio is not None else "",
            _spread(none.total) if none else "",
        )
    return table


def _cost_table(workload: str, cases: list[CaseFigures]) -> Table:
    table = Table(
        title=f"{workload}: CPU in µs, faults, context switches, {_UNITS[cases[0].per]}", title_justify="left"
    )
    table.add_column("case")
    table.add_column("contender")
    for name in ("engine thread", "engine process", "daemon", "faults", "switches"):
        table.add_column(name, justify="right")
    for case in cases:
        for name, figures in case.by_name.items():
            table.add_row(
                case.label if name == OURS else "",
                name,
                f"{figures.thread_cpu.median:.0f}",
                f"{figures.per_unit(lambda block: block.engine_cpu) / 1e3:.0f}",
                f"{figures.per_unit(lambda block: block.daemon_cpu) / 1e3:.0f}" if name == OURS else "",
                f"{figures.per_unit(lambda block: block.faults):.1f}",
                f"{figures.per_unit(lambda block: block.switches):.1f}",
            )
    return table


def _part(what: str, microseconds: float, case: CaseFigures) -> str:
    whole = case.attribution.get(WHOLE_STEP, 0.0)
    if not whole or what == WHOLE_STEP or what.startswith("daemon"):
        return f"{what} {microseconds:.1f}"
    return f"{what} {microseconds:.1f} = {microseconds / whole:.0%}"


def _attribution_table(cases: list[CaseFigures]) -> Table:
    table = Table(title="Where our time goes, µs a step (clocks included), and bytes moved", title_justify="left")
    table.add_column("case")
    table.add_column("parts")
    table.add_column("KiB moved: engine + daemon", justify="right")
    table.add_column("fewest", justify="right")
    for case in cases:
        parts = ", ".join(_part(what, value, case) for what, value in case.attribution.items() if value >= 0.05)
        moved = case.moved_bytes
        table.add_row(
            f"{case.workload}: {case.label}",
            parts,
            f"{moved.get('engine', 0) >> 10:,} + {moved.get('daemon', 0) >> 10:,}",
            f"{case.fewest_bytes >> 10:,}",
        )
    return table


def _copies_table(result: BenchResult) -> Table:
    table = Table(title="The copy itself, in process: µs, and share of memmove's speed", title_justify="left")
    for name in ("rows", "slots", "memmove in", "scatter", "", "memmove out", "gather", ""):
        table.add_column(name, justify="left" if name == "slots" else "right")
    for copy in result.copies:
        table.add_row(
            f"{copy.rows} of {copy.row_bytes} B",
            copy.layout,
            _spread(Spread.of(copy.memmove_in)),
            _spread(Spread.of(copy.scatter)),
            f"{copy.share('scatter'):.0%}",
            _spread(Spread.of(copy.memmove_out)),
            _spread(Spread.of(copy.gather)),
            f"{copy.share('gather'):.0%}",
        )
    return table


def _sessions_table(result: BenchResult) -> Table:
    table = Table(
        title="Sessions at once: 32 requests, hidden 2048, a 10 ms forward; µs on the engine thread a step",
        title_justify="left",
    )
    for name in ("sessions", "step", "p99", "daemon's CPU a step"):
        table.add_column(name, justify="right")
    for run in result.sessions:
        table.add_row(
            str(run.sessions),
            _spread(Spread.of(run.totals)),
            f"{_p99(run.totals):.0f}",
            f"{run.daemon_cpu / len(run.totals) / 1e3:.0f}",
        )
    return table


def _lookups_table(result: BenchResult) -> Table:
    table = Table(title=f"Lookups of {HASHES} hashes over gRPC from one client, half stored", title_justify="left")
    for name in ("way", "lookups a second, by round", "µs a call", "daemon's CPU, µs a lookup"):
        table.add_column(name, justify="left" if name == "way" else "right")
    for run in result.lookups:
        table.add_row(
            run.way,
            ", ".join(f"{value:,.0f}" for value in run.per_second),
            f"{median(run.latency_us):.0f}" if run.latency_us else "",
            f"{median(run.daemon_cpu_us):.0f}",
        )
    return table


def _targets_table(result: BenchResult) -> Table:
    lines = targets(result)
    left = sum(target.reached is None for target in lines)
    caption = f"{left} further targets were not measured in this run." if left else None
    table = Table(title="Figures to hold", title_justify="left", caption=caption, caption_justify="left")
    for name in ("what", "wanted", "found", "", "command"):
        table.add_column(name, overflow="fold")
    for target in lines:
        if target.found is not None:
            colour = "green" if target.reached else "red"
            table.add_row(target.what, target.wanted, target.found, f"[{colour}]{target.verdict}[/]", target.command)
    return table


def _spread(spread: Spread) -> str:
    return f"{spread.median:.0f} ({spread.p10:.0f} to {spread.p90:.0f})"


def _p99(totals: list[int]) -> float:
    ordered = sorted(totals)
    return ordered[min(len(ordered) - 1, round(0.99 * len(ordered)))] / 1e3
