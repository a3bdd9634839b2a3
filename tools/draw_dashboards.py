"""Draws the dashboards without Grafana: each panel's expressions, asked of a live Prometheus, as one PNG a board.

    python tools/draw_dashboards.py --prometheus http://127.0.0.1:9090 --minutes 15 --out pictures

It reads deploy/grafana/*.json as Grafana does: panels at their places, units, legends, thresholds. A panel whose
expressions have no sample in the time asked for says so, and is listed at the end; ``--strict`` makes that status 1.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import textwrap
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BOARDS = Path(__file__).resolve().parents[1] / "deploy" / "grafana"
POINTS = 240
"""Samples of a line, as many as a panel of usual width shows."""
WIDTH = 24
"""Columns of a dashboard."""
ROW_INCHES = 0.34
INSTANT = ("table", "gauge")
"""Panels that show the present alone."""
_SUFFIXES = {"bytes": ("B", 1024.0), "Bps": ("B/s", 1024.0), "ops": ("/s", 1000.0)}
_PREFIXES = {1024.0: ("", "Ki", "Mi", "Gi", "Ti"), 1000.0: ("", "k", "M", "G", "T")}


@dataclass(frozen=True)
class Line:
    """One series of a panel: what the legend says, and (Unix time, value) in order; no NaN."""

    name: str
    samples: tuple[tuple[float, float], ...]

    def with_gaps(self, step_s: float) -> tuple[list[float], list[float]]:
        """Times and values, with a NaN where samples are missing: Grafana draws no line across these."""
        at: list[float] = []
        values: list[float] = []
        for moment, value in self.samples:
            if at and moment - at[-1] > 1.5 * step_s:
                at.append(at[-1] + step_s)
                values.append(math.nan)
            at.append(moment)
            values.append(value)
        return at, values

    @property
    def zero(self) -> bool:
        """Whether it was zero all the time."""
        return not any(value for _, value in self.samples)


@dataclass
class Panel:
    """A panel of a board as its JSON describes it, with what Prometheus answered."""

    title: str
    kind: str
    unit: str
    place: tuple[int, int, int, int]
    stacked: bool
    top: float | None
    steps: list[tuple[float | None, str]]
    targets: list[tuple[str, str]]
    step_s: float = 1.0
    lines: list[Line] = field(default_factory=list)
    empty_targets: list[str] = field(default_factory=list)


def panels_of(board: Any) -> Iterator[Panel]:
    """The panels of a board's JSON, rows (section heads) among them."""
    for made in board["panels"]:
        defaults = made.get("fieldConfig", {}).get("defaults", {})
        stacking = defaults.get("custom", {}).get("stacking", {})
        grid = made["gridPos"]
        yield Panel(
            title=made["title"],
            kind=made["type"],
            unit=defaults.get("unit", "none"),
            place=(grid["x"], grid["y"], grid["w"], grid["h"]),
            stacked=stacking.get("mode") == "normal",
            top=defaults.get("max"),
            steps=[(step["value"], step["color"]) for step in defaults.get("thresholds", {}).get("steps", ())],
            targets=[
                (target["expr"], "" if made["type"] == "table" else target["legendFormat"])
                for target in made.get("targets", ())
            ],
        )


def with_variables(expression: str, rate_interval_s: int) -> str:
    """The expression with the board's variables at All, and Grafana's rate interval as given."""
    expression = re.sub(r"\$(instance|stage|replica)\b", ".*", expression)
    return expression.replace("$__rate_interval", f"{rate_interval_s}s")


@dataclass(frozen=True)
class Prometheus:
    """A server, and the times to ask it for; start and end are Unix times, the rest seconds."""

    url: str
    start: float
    end: float
    step_s: float
    rate_interval_s: int

    def ask(self, expression: str, legend: str) -> list[Line]:
        """The series of an expression with their legends.

        Raises:
            OSError: no answer.
            ValueError: an expression that Prometheus does not take.
        """
        query = with_variables(expression, self.rate_interval_s)
        fields = {"query": query, "start": self.start, "end": self.end, "step": self.step_s}
        request = f"{self.url.rstrip('/')}/api/v1/query_range?{urllib.parse.urlencode(fields)}"
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                found = json.load(answer)["data"]["result"]
        except urllib.error.HTTPError as error:
            raise ValueError(f"{query}: {error.read().decode(errors='replace')}") from error
        lines = []
        for series in found:
            pairs = [(float(at), float(value)) for at, value in series["values"]]
            samples = tuple(pair for pair in pairs if math.isfinite(pair[1]))
            if samples:
                lines.append(Line(_legend(legend, series["metric"]), samples))
        return sorted(lines, key=lambda line: line.name)

    def fill(self, panel: Panel) -> Panel:
        """Ask for every target of the panel."""
        panel.step_s = self.step_s
        for expression, legend in panel.targets:
            lines = self.ask(expression, legend)
            if panel.kind in INSTANT:
                lines = [line for line in lines if line.samples[-1][0] > self.end - 2 * self.step_s]
            panel.lines += lines
            if not lines:
                panel.empty_targets.append(expression)
        return panel


def _legend(pattern: str, labels: dict[str, str]) -> str:
    if not pattern:
        shown = {name: value for name, value in labels.items() if name not in ("__name__", "job")}
        return labels.get("__name__", "") + " " + ", ".join(f"{name}={value}" for name, value in sorted(shown.items()))
    return re.sub(r"\{\{\s*(\w+)\s*\}\}", lambda found: labels.get(found[1], ""), pattern)


def in_unit(value: float, unit: str) -> str:
    """A value as Grafana would show it in this unit."""
    if unit == "percentunit":
        return f"{100 * value:.3g} %"
    if unit == "s":
        if value >= 120:
            return f"{value / 60:.3g} min" if value < 7200 else f"{value / 3600:.3g} h"
        for name, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
            if abs(value) >= scale:
                return f"{value / scale:.3g} {name}"
        return "0 s" if value == 0 else f"{value / 1e-9:.3g} ns"
    suffix, base = _SUFFIXES.get(unit, ("", 1000.0))
    power = 0
    while abs(value) >= base and power < 4:
        value, power = value / base, power + 1
    return f"{value:.3g} {_PREFIXES[base][power]}{suffix}".strip()


def draw(title: str, panels: Sequence[Panel], path: Path) -> None:
    """Draw a board into a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    rows = max(panel.place[1] + panel.place[3] for panel in panels) + 2
    figure = Figure(figsize=(WIDTH * 0.75, rows * ROW_INCHES), dpi=100, facecolor="#f4f5f5")
    figure.text(0.012, 1 - 0.9 / rows, title, fontsize=15, weight="bold", va="center")
    for panel in panels:
        x, y, w, h = panel.place
        y += 2
        if panel.kind == "row":
            figure.text(0.012, 1 - (y + 0.6) / rows, panel.title, fontsize=12, weight="bold", va="center")
            continue
        deep = 1.5 + 0.5 * math.ceil(len(panel.lines) / 3) if panel.kind == "timeseries" else 0.6
        left, wide = (x + 1.3) / WIDTH, (w - 1.6) / WIDTH
        axes = figure.add_axes((left, 1 - (y + h - deep) / rows, wide, (h - deep - 1.1) / rows))
        axes.set_title(panel.title, fontsize=9, weight="bold", loc="left")
        _draw_panel(axes, panel)
    figure.savefig(path)


def _draw_panel(axes: Axes, panel: Panel) -> None:
    if not panel.lines:
        axes.set_xticks([])
        axes.set_yticks([])
        axes.text(0.5, 0.5, "No data", ha="center", va="center", color="#999999", transform=axes.transAxes)
    elif panel.kind == "timeseries":
        _draw_lines(axes, panel)
    elif panel.kind == "table":
        axes.axis("off")
        cells = [f"{in_unit(line.samples[-1][1], panel.unit):>8}  {line.name}" for line in panel.lines]
        text = "\n".join(part for cell in cells for part in textwrap.wrap(cell, 9 * panel.place[2]))
        axes.text(0, 1, text, fontsize=7, va="top", family="monospace", transform=axes.transAxes)
    else:
        _draw_stat(axes, panel)


def _draw_lines(axes: Axes, panel: Panel) -> None:
    base: dict[float, float] = {}
    for line in panel.lines:
        at, value = line.with_gaps(panel.step_s)
        last = line.samples[-1][1]
        # Matplotlib leaves out labels that begin with an underscore, as __hidden_states__ does.
        label = f"\u200b{line.name}  {in_unit(last, panel.unit)}"
        if panel.stacked:
            low = [base.get(moment, 0.0) for moment in at]
            value = [below + own for below, own in zip(low, value, strict=True)]
            base |= dict(zip(at, value, strict=True))
            axes.fill_between(at, low, value, alpha=0.25)
        axes.plot(at, value, linewidth=1.1, label=label)
    axes.set_ylim(bottom=0, top=panel.top)
    ticks = axes.get_yticks()
    axes.set_yticks(ticks, [in_unit(float(tick), panel.unit) for tick in ticks], fontsize=7)
    axes.set_ylim(bottom=0, top=panel.top)
    moments = axes.get_xticks()[1:-1:2]
    axes.set_xticks(moments, [time.strftime("%H:%M:%S", time.localtime(moment)) for moment in moments], fontsize=7)
    axes.grid(color="#e0e0e0", linewidth=0.6)
    axes.legend(fontsize=6.5, ncols=3, loc="upper left", bbox_to_anchor=(-0.02, -0.13), frameon=False, handlelength=1.2)


def _draw_stat(axes: Axes, panel: Panel) -> None:
    line = panel.lines[0]
    value = line.samples[-1][1]
    colour = next(colour for least, colour in reversed(panel.steps) if least is None or value >= least)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.plot(*line.with_gaps(panel.step_s), color=colour, alpha=0.35)
    axes.set_ylim(bottom=0, top=panel.top)
    axes.text(
        0.5, 0.5, in_unit(value, panel.unit), fontsize=18, color=colour, ha="center", va="center",
        transform=axes.transAxes,
    )  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Draw; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("boards", nargs="*", type=Path, help="JSON files (default: all in deploy/grafana)")
    parser.add_argument("--prometheus", default="http://127.0.0.1:9090", metavar="URL")
    parser.add_argument("--minutes", type=float, default=15.0, help="how far back (default 15)")
    parser.add_argument("--scrape-interval", type=float, default=15.0, metavar="S", help="of Prometheus (default 15)")
    parser.add_argument("--out", type=Path, default=Path(), help="folder of the pictures (default: here)")
    parser.add_argument("--strict", action="store_true", help="status 1 where a panel has no data")
    chosen = parser.parse_args(argv)
    end = time.time()
    step = max(60 * chosen.minutes / POINTS, 1.0)
    # As Grafana has it: max($__interval + scrape interval, 4 * scrape interval).
    interval = math.ceil(max(step + chosen.scrape_interval, 4 * chosen.scrape_interval))
    server = Prometheus(chosen.prometheus, end - 60 * chosen.minutes, end, step, interval)
    chosen.out.mkdir(parents=True, exist_ok=True)
    empty = 0
    for path in chosen.boards or sorted(BOARDS.glob("*.json")):
        board = json.loads(path.read_text(encoding="utf-8"))
        try:
            panels = [server.fill(panel) for panel in panels_of(board)]
        except (OSError, ValueError) as error:
            print(f"{chosen.prometheus} does not answer: {error}", file=sys.stderr)
            return 2
        picture = chosen.out / f"{path.stem}.png"
        draw(board["title"], panels, picture)
        print(picture)
        for panel in panels:
            for expression in panel.empty_targets:
                empty += 1
                print(f"  no data: {panel.title}: {expression}")
    return 1 if empty and chosen.strict else 0


if __name__ == "__main__":
    sys.exit(main())
