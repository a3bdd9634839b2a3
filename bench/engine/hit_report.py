"""The tables of the runs at several hit rates, for a terminal and as Markdown, and the plot."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.engine.hit_findings import (
    BARE,
    BARE_AGAIN,
    BARES,
    OFF_BARE,
    OFF_SHIM,
    SHIM,
    SHIM_AGAIN,
    SHIMS,
    Findings,
    milliseconds,
    percent,
)
from bench.engine.hits import hit_tokens
from bench.engine.intervals import Interval

MARKS = ("<!-- bench-hitrate: begin -->", "<!-- bench-hitrate: end -->")
"""In a Markdown file, what stands between these lines is replaced."""
_PIPE_WIDTH = 160


@dataclass(frozen=True)
class Grid:
    """A table before it has a form."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def rich(self) -> Table:
        table = Table(title=self.title, title_justify="left", show_lines=False)
        for at, column in enumerate(self.columns):
            table.add_column(column, justify="left" if at == 0 else "right", overflow="fold")
        for row in self.rows:
            table.add_row(*(cell.replace(" (", "\n(") for cell in row))  # The interval below its median.
        return table

    def markdown(self) -> str:
        lines = [f"**{self.title}**", "", _line(self.columns), "|---" * len(self.columns) + "|"]
        return "\n".join([*lines, *map(_line, self.rows)])


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def grids(found: Findings) -> list[Grid]:
    """All tables: batches, single requests, the shim's own CPU, what must hold."""
    return [_throughput(found), _latency(found), _own(found), _held(found)]


def _throughput(found: Findings) -> Grid:
    rows = []
    lines: list[tuple[str, int, tuple[str, ...], tuple[str, ...]]] = [
        ("off", 0, (OFF_BARE,), (OFF_SHIM,)),
        ("on, 0 % hits", 0, BARES, SHIMS),
        ("on, 50 % hits", 50, BARES, SHIMS),
    ]
    for name, rate, bares, shims in lines:
        again = ["", ""]
        if len(bares) > 1:
            again = [percent(found.batch_difference(k[1:], k[:1], rate, "wall_s")) for k in (bares, shims)]
        rows.append(
            [
                name,
                _number(found.throughput(bares, rate)),
                _number(found.throughput(shims, rate)),
                percent(found.batch_difference(shims, bares, rate, "wall_s")),
                *again,
                percent(found.batch_difference(shims, bares, rate, "cpu_s")),
            ]
        )
    title = (
        f"Batches of {found.requests} requests, {found.prompt} prompt and {found.batch_output} output tokens each: "
        "tokens a second"
    )
    more = "time, shim over without"
    return Grid(
        title,
        ["prefix caching", "without", "with the shim", more, "A/A without", "A/A with", "CPU, shim over without"],
        rows,
    )


def _latency(found: Findings) -> Grid:
    rows = [
        [
            f"{rate} %",
            f"{found.prompt - hit_tokens(found.prompt, rate, found.block_size)}",
            milliseconds(found.of_kind(BARES, rate, "ttft_s")),
            milliseconds(found.of_kind(SHIMS, rate, "ttft_s")),
            percent(found.later(rate, "ttft_s")),
            percent(found.again((BARE, BARE_AGAIN), rate, "ttft_s")),
            percent(found.again((SHIM, SHIM_AGAIN), rate, "ttft_s")),
            percent(found.later(rate, "first_cpu_s")),
            milliseconds(found.of_kind(BARES, rate, "tpot_s")),
            milliseconds(found.of_kind(SHIMS, rate, "tpot_s")),
            percent(found.later(rate, "tpot_s")),
        ]
        for rate in found.rates
    ]
    return Grid(
        f"One request after another, {found.prompt} prompt and {found.output} output tokens: ms",
        [
            "hits",
            "tokens computed",
            "TTFT without",
            "TTFT with the shim",
            "more",
            "A/A without",
            "A/A with",
            "CPU to the first token, more",
            "TPOT without",
            "TPOT with the shim",
            "more",
        ],
        rows,
    )


def _own(found: Findings) -> Grid:
    rows = []
    for rate in found.rates:
        first, decode = found.shim_step_ms(rate)
        rows.append([f"{rate} %", *(f"{x.middle:.2f} ({x.low:.2f} to {x.high:.2f})" for x in (first, decode))])
    return Grid(
        "The shim's own CPU on the engine's thread: ms",
        ["hits", "step of a prompt", "decode step of one request"],
        rows,
    )


def _held(found: Findings) -> Grid:
    lines = [[check.what, check.wanted, check.found, check.verdict] for check in found.checks()]
    return Grid("What must hold", ["what", "wanted", "found", ""], lines)


def _number(value: Interval) -> str:
    return f"{value.middle:.0f}" + (f" ({value.low:.0f} to {value.high:.0f})" if value.enough else "")


def show(found: Findings, machine: dict[str, Any], out: Console) -> None:
    """Print the tables; into a file or a pipe in a width that keeps them readable."""
    if not out.is_terminal:
        out = Console(highlight=False, file=out.file, width=_PIPE_WIDTH)
    out.print(f"\n{describe(machine)}")
    for grid in grids(found):
        out.print(grid.rich())


def describe(machine: dict[str, Any]) -> str:
    """One sentence for the machine and the method."""
    count = machine["threads"]
    threads = {0: "computing threads as it chooses", 1: "one computing thread"}.get(count, f"{count} computing threads")
    return (
        f"{machine['processor']}, {machine['cpus']} CPUs, load {machine['load_at_start']:.1f} to "
        f"{machine['load_at_end']:.1f}, {machine['minutes']:.1f} minutes; vLLM {machine['vllm']}, {threads}; model of "
        f"{machine['layers']} layers, hidden {machine['hidden']}, bf16; rounds: {machine['rounds']}, each of "
        f"{machine['turns']} turns of single requests and {machine['batch_turns']} of batches. Medians with 95 % "
        "intervals."
    )


_BETWEEN_MARKS = re.compile(re.escape(MARKS[0]) + ".*?" + re.escape(MARKS[1]), re.DOTALL)


def check_markdown(path: Path) -> None:
    """
    Raises:
        ValueError: the file holds something, and no marks that say where the tables go: writing would lose it.
    """
    old = path.read_text(encoding="utf-8") if path.exists() else ""
    if old.strip() and not _BETWEEN_MARKS.search(old):
        raise ValueError(
            f"{path} is not empty and has no lines {MARKS[0]} and {MARKS[1]}: add them, or name a new file"
        )


def write_markdown(found: Findings, machine: dict[str, Any], path: Path) -> None:
    """Put the tables between the marks of ``path``; a new or empty file gets the marks too.

    Raises:
        ValueError: as ``check_markdown``.
    """
    check_markdown(path)
    text = "\n\n".join([f"`{machine['command']}`. {describe(machine)}", *(grid.markdown() for grid in grids(found))])
    framed = f"{MARKS[0]}\n{text}\n{MARKS[1]}"
    old = path.read_text(encoding="utf-8") if path.exists() else ""
    new = _BETWEEN_MARKS.sub(lambda _: framed, old) if old.strip() else framed + "\n"
    path.write_text(new, encoding="utf-8")


def write_plot(found: Findings, folder: Path) -> Path:
    """``hit-rates.svg``: time to the first token and between tokens by hit rate, medians with their intervals.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "hit-rates.svg"
    with mpl.rc_context({"svg.hashsalt": "stagecache", "svg.fonttype": "none", "font.size": 9}):
        figure = Figure(figsize=(7.6, 3.2), layout="constrained")
        panels = figure.subplots(1, 2)
        for axes, what, label in zip(
            panels, ("ttft_s", "tpot_s"), ("time to the first token, ms", "time between tokens, ms"), strict=True
        ):
            for kind, colour, name, aside in (
                (BARES, "#a3a3a3", "without", -0.6),
                (SHIMS, "#0f766e", "with the shim", 0.6),
            ):
                points = [found.of_kind(kind, rate, what) for rate in found.rates]
                around = [
                    [1e3 * (each.middle - each.low) for each in points],
                    [1e3 * (each.high - each.middle) for each in points],
                ]
                at = [rate + aside for rate in found.rates]
                middles = [1e3 * each.middle for each in points]
                axes.errorbar(at, middles, yerr=around, color=colour, label=name, fmt="o-", markersize=4, capsize=3)
            axes.set_ylim(bottom=0)
            axes.set_xticks(found.rates)
            axes.set_xlabel("prompt tokens that hit, %")
            axes.set_ylabel(label)
            axes.grid(axis="y", color="#e4e4e7", linewidth=0.6)
        handles, names = panels[0].get_legend_handles_labels()
        figure.legend(handles, names, loc="outside upper center", ncols=2, frameon=False)
        figure.savefig(path, metadata={"Date": None})
    return path
