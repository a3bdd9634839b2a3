"""What a bench found, as pictures: each workload's time on the engine thread, and where ours goes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stagecache.bench.attribution import WHOLE_STEP
from stagecache.bench.contenders import NONE, OURS, peer_names
from stagecache.bench.figures import CaseFigures
from stagecache.bench.run import BenchResult

_COLORS = {OURS: "#0f766e", NONE: "#a3a3a3", peer_names()[0]: "#f59e0b", peer_names()[1]: "#b45309"}
_PARTS = ("#0f766e", "#14b8a6", "#5eead4", "#f59e0b", "#fcd34d", "#7c3aed", "#c4b5fd", "#64748b", "#cbd5e1", "#e11d48")


def write_plots(result: BenchResult, folder: Path) -> list[Path]:
    """One SVG a workload, ``NAME.svg``, and ``parts.svg``: the same bytes for the same result. Returns the files.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    with mpl.rc_context({"svg.hashsalt": "stagecache", "svg.fonttype": "none", "font.size": 9}):
        for workload in dict.fromkeys(case.workload for case in result.cases):
            cases = [case for case in result.cases if case.workload == workload]
            written.append(_save(_times(workload, cases), folder / f"{workload.replace(' ', '-')}.svg"))
        # Parts of a hit lie one in another, so only those of other steps can stand one behind the other.
        in_parts = [case for case in result.cases if case.attribution and not case.workload.endswith("hits")]
        if in_parts:
            written.append(_save(_parts(in_parts), folder / "parts.svg"))
    return written


def _times(workload: str, cases: list[CaseFigures]) -> Any:
    """A group of lines a case, one a contender: from p10 to p90 with the median marked, on a logarithmic axis."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.6, 0.9 + 0.62 * len(cases)), layout="constrained")
    axes = figure.subplots()
    names = [name for name in _COLORS if any(name in case.by_name for case in cases)]
    thick = 0.8 / len(names)
    for order, name in enumerate(names):
        for row, case in enumerate(cases):
            if name not in case.by_name:
                continue
            spread = case.by_name[name].total
            at = row + (order - (len(names) - 1) / 2) * thick
            around = [[spread.median - spread.p10], [spread.p90 - spread.median]]
            label = None if any(name in earlier.by_name for earlier in cases[:row]) else name
            axes.errorbar(
                spread.median, at, xerr=around, color=_COLORS[name], label=label, fmt="o", markersize=5, linewidth=2
            )
    axes.set_yticks(range(len(cases)), [case.label.replace(", ", "\n", 1) for case in cases], fontsize=7)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.grid(axis="x", color="#e4e4e7", linewidth=0.6)
    axes.set_xlabel(f"{workload}: engine thread, µs a {'step' if cases[0].per != 'block' else 'prompt'}")
    figure.legend(loc="outside upper center", ncols=len(names), frameon=False)
    return figure


def _parts(cases: list[CaseFigures]) -> Any:
    """A bar a case, of our engine thread's parts one behind the other."""
    from matplotlib.figure import Figure

    names = list(
        dict.fromkeys(
            name for case in cases for name in case.attribution if name != WHOLE_STEP and not name.startswith("daemon")
        )
    )
    figure = Figure(figsize=(7.6, 1.6 + 0.34 * len(cases)), layout="constrained")
    axes = figure.subplots()
    left = [0.0] * len(cases)
    for order, name in enumerate(names):
        widths = [case.attribution.get(name, 0.0) for case in cases]
        axes.barh(range(len(cases)), widths, 0.7, left=left, color=_PARTS[order % len(_PARTS)], label=name)
        left = [at + width for at, width in zip(left, widths, strict=True)]
    axes.set_yticks(range(len(cases)), [f"{case.workload}: {case.label}" for case in cases], fontsize=6)
    axes.invert_yaxis()
    axes.set_xlabel("stagecache, µs a step by part, clocks included")
    figure.legend(loc="outside upper center", ncols=3, frameon=False, fontsize=7)
    return figure


def _save(figure: Any, path: Path) -> Path:
    figure.savefig(path, metadata={"Date": None})
    return path
