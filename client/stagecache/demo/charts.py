"""Charts of the demo's report as inline SVG. Colours are CSS variables of the page, so they follow its theme."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 560, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 16, 18, 44


@dataclass(frozen=True)
class Series:
    """Points of one colour.

    Attributes:
        name: for the legend.
        color: a CSS colour, e.g. ``var(--pool)``.
        points: (x, y, tooltip).
    """

    name: str
    color: str
    points: Sequence[tuple[float, float, str]]


@dataclass(frozen=True)
class Bar:
    """One column, its parts from the bottom up as (value, colour, tooltip), and the text above it."""

    label: str
    parts: Sequence[tuple[float, str, str]]
    text: str


def columns(bars: Sequence[Bar], *, top: float, unit: str, label: str, x_label: str) -> str:
    """A column chart; ``top`` is the least upper end of the value axis, ``unit`` follows its numbers."""
    top = max([top, *(sum(value for value, _, _ in bar.parts) for bar in bars)])
    ticks = _linear_ticks(top)
    top = max(top, ticks[-1])

    def y(value: float) -> float:
        return HEIGHT - _BOTTOM - value / top * (HEIGHT - _TOP - _BOTTOM)

    out = [_grid([(y(tick), f"{tick:,.0f}{unit}") for tick in ticks])]
    slot = (WIDTH - _LEFT - _RIGHT) / max(1, len(bars))
    wide = min(76.0, slot * 0.62)
    for number, bar in enumerate(bars):
        x = _LEFT + slot * (number + 0.5)
        base = 0.0
        for value, color, tip in bar.parts:
            if value > 0:
                low, high = y(base), y(base + value)
                out.append(
                    f'<rect x="{x - wide / 2:.1f}" y="{high:.1f}" width="{wide:.1f}" '
                    f'height="{max(0.5, low - high):.1f}" rx="3" style="fill:{color}">'
                    f"<title>{escape(tip)}</title></rect>"
                )
            base += value
        out.append(_text(x, y(base) - 6, bar.text, "value"))
        out.append(_text(x, HEIGHT - _BOTTOM + 17, bar.label))
    return _svg(out, label, x_label)


def log_times(series: Sequence[Series], *, label: str, x_label: str, width: int = WIDTH) -> str:
    """Points over a logarithmic axis of milliseconds; values at or below 0 are left out."""
    values = [y for one in series for _, y, _ in one.points if y > 0]
    low = math.floor(math.log10(min(values, default=0.1)))
    high = max(low + 1, math.ceil(math.log10(max(values, default=10.0))))
    last = max([x for one in series for x, _, _ in one.points], default=1.0) or 1.0

    def x_of(x: float) -> float:
        return _LEFT + 8 + x / last * (width - _LEFT - _RIGHT - 16)

    def y_of(y: float) -> float:
        return HEIGHT - _BOTTOM - (math.log10(y) - low) / (high - low) * (HEIGHT - _TOP - _BOTTOM)

    out = [_grid([(y_of(10.0**power), _milliseconds(10.0**power)) for power in range(low, high + 1)], width)]
    for one in series:
        for x, y, tip in one.points:
            if y > 0:
                out.append(
                    f'<circle cx="{x_of(x):.1f}" cy="{y_of(y):.1f}" r="3.4" style="fill:{one.color}">'
                    f"<title>{escape(tip)}</title></circle>"
                )
    ticks = [tick for tick in _linear_ticks(last, 8) if tick <= last]
    out += [_text(x_of(tick), HEIGHT - _BOTTOM + 17, f"{tick:,.0f}") for tick in ticks]
    return _svg(out, label, x_label, width)


def _milliseconds(value: float) -> str:
    return f"{value / 1000:g} s" if value >= 1000 else f"{value:g} ms"


def legend(entries: Sequence[tuple[str, str]]) -> str:
    """Names with their colours, as HTML."""
    marks = "".join(f'<span><i style="background:{color}"></i>{escape(name)}</span>' for name, color in entries)
    return f'<p class="legend">{marks}</p>'


def _svg(parts: Sequence[str], label: str, x_label: str, width: int = WIDTH) -> str:
    foot = _text((width + _LEFT) / 2, HEIGHT - 8, x_label)
    return (
        f'<svg viewBox="0 0 {width} {HEIGHT}" role="img" aria-label="{escape(label)}">'
        + "".join(parts)
        + f"{foot}</svg>"
    )


def _text(x: float, y: float, text: str, kind: str = "axis") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="middle">{escape(text)}</text>'


def _grid(ticks: Sequence[tuple[float, str]], width: int = WIDTH) -> str:
    out = []
    for y, text in ticks:
        out.append(f'<line class="grid" x1="{_LEFT}" x2="{width - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        out.append(f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{escape(text)}</text>')
    return "".join(out)


def _linear_ticks(top: float, count: int = 4) -> list[float]:
    """About ``count`` round steps from 0 to at least ``top``."""
    raw = max(top, 1e-9) / count
    size = 10.0 ** math.floor(math.log10(raw))
    step = next(size * factor for factor in (1, 2, 2.5, 5, 10) if size * factor >= raw * 0.999)
    return [step * number for number in range(math.ceil(top / step - 1e-9) + 1)]
