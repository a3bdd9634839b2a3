"""The demo's report: one HTML file without any outside resource, for light and dark screens."""

from __future__ import annotations

import html
import platform
from collections.abc import Sequence
from dataclasses import dataclass

from stagecache.demo.charts import Bar, Series, columns, legend, log_times
from stagecache.demo.compare import RequestResult, Standard
from stagecache.demo.engine import Recording, StepSample

_POOL, _COMPUTED, _WITHOUT, _SHIM = "var(--pool)", "var(--computed)", "var(--without)", "var(--shim)"


@dataclass(frozen=True)
class DemoOutcome:
    """Everything that the table and the report show.

    Attributes:
        results: one a request.
        cached: the run with prefix caching and the row cache.
        uncached: the run without either.
        standard: what counted as the same row.
        hidden: width of a row.
        dtype: of a row.
        block_size: tokens in a KV block.
        daemon_start_s: seconds until the daemon served.
        total_s: seconds of the whole demo.
    """

    results: Sequence[RequestResult]
    cached: Recording
    uncached: Recording
    standard: Standard
    hidden: int
    dtype: str
    block_size: int
    daemon_start_s: float
    total_s: float

    @property
    def ok(self) -> bool:
        """Every request's rows are right, and every control was noticed."""
        return bool(self.results) and all(result.ok for result in self.results)

    @property
    def agreement(self) -> str:
        """How the rows of right requests agree with those of the run without prefix caching."""
        if all(result.verdict == "equal" for result in self.results):
            return "the same bits"
        return f"the same within {max(result.difference for result in self.results):.1e}"

    @property
    def wrong(self) -> int:
        """Requests whose rows are not right or not all there."""
        right = (r.verdict in ("equal", "close") and r.from_cache == r.hit_tokens for r in self.results)
        return sum(not one for one in right)

    @property
    def controls(self) -> int:
        """Requests whose shifted rows were noticed."""
        return sum(result.control_noticed for result in self.results)

    def turns(self) -> list[tuple[int, list[RequestResult]]]:
        """The results of each turn."""
        numbers = sorted({result.request.turn for result in self.results})
        return [(number, [r for r in self.results if r.request.turn == number]) for number in numbers]


def prompt_tokens(results: Sequence[RequestResult]) -> int:
    """Tokens of the requests' prompts together."""
    return sum(len(result.request.tokens) for result in results)


def rows_from_cache(results: Sequence[RequestResult]) -> int:
    """Rows of the requests that the pool gave together."""
    return sum(result.from_cache for result in results)


def render(outcome: DemoOutcome) -> str:
    """The whole page."""
    results = outcome.results
    tokens, pooled = prompt_tokens(results), rows_from_cache(results)
    verdict = (
        f"Every row is right: {outcome.agreement} as without prefix caching"
        if outcome.ok
        else f"{outcome.wrong} of {len(results)} requests have wrong or missing rows"
        if outcome.wrong
        else "The control was not noticed, so the comparison proves nothing"
    )
    tiles = "".join(
        _tile(*tile)
        for tile in (
            (f"{len(results)}", "requests", f"{len(outcome.turns())} turns, one shared system prompt"),
            (f"{tokens:,}", "prompt tokens", f"every one has its row of {outcome.hidden} {outcome.dtype}"),
            (f"{pooled:,}", "rows from the pool", f"{_percent(pooled, tokens)} of all rows were not computed again"),
            (f"{tokens - pooled:,}", "rows computed", f"{_percent(tokens - pooled, tokens)} of all rows"),
            (f"{outcome.controls} of {len(results)}", "controls noticed", "rows shifted by one position"),
        )
    )
    charts = "".join((_hit_chart(outcome), _row_chart(outcome), _step_chart(outcome)))
    return (
        _PAGE.replace("@VERDICT@", html.escape(verdict))
        .replace("@STATE@", "good" if outcome.ok else "bad")
        .replace("@MARK@", "✓" if outcome.ok else "✗")
        .replace("@TILES@", tiles)
        .replace("@CHARTS@", charts)
        .replace("@ROWS@", "".join(_row(result) for result in results))
        .replace("@FACTS@", _facts(outcome))
    )


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f} %" if whole else "0 %"


def _tile(value: str, name: str, note: str) -> str:
    texts = (("b", value), ("span", name), ("small", note))
    return '<div class="tile">' + "".join(f"<{tag}>{html.escape(text)}</{tag}>" for tag, text in texts) + "</div>"


def _figure(title: str, text: str, body: str, *, wide: bool = False) -> str:
    kind = ' class="wide"' if wide else ""
    return f"<figure{kind}><h2>{html.escape(title)}</h2><p>{html.escape(text)}</p>{body}</figure>"


def _hit_chart(outcome: DemoOutcome) -> str:
    bars = []
    for turn, results in outcome.turns():
        tokens, hits = prompt_tokens(results), sum(result.hit_tokens for result in results)
        ratio = 100 * hits / tokens if tokens else 0.0
        tip = f"turn {turn}: {hits:,} of {tokens:,} prompt tokens hit"
        bars.append(Bar(f"turn {turn}", [(ratio, _POOL, tip)], f"{ratio:.0f} %"))
    chart = columns(bars, top=100, unit=" %", label="Hit ratio by turn", x_label="turn of the conversation")
    return _figure("Hit ratio by turn", "Prompt tokens whose KV was there already.", chart)


def _row_chart(outcome: DemoOutcome) -> str:
    bars = []
    for turn, results in outcome.turns():
        tokens, pooled = prompt_tokens(results), rows_from_cache(results)
        parts = [
            (float(tokens - pooled), _COMPUTED, f"turn {turn}: {tokens - pooled:,} rows computed"),
            (float(pooled), _POOL, f"turn {turn}: {pooled:,} rows from the pool"),
        ]
        bars.append(Bar(f"turn {turn}", parts, f"{tokens:,}"))
    chart = columns(bars, top=0, unit="", label="Rows served against computed", x_label="turn of the conversation")
    keys = legend([("from the pool", _POOL), ("computed by the engine", _COMPUTED)])
    text = "Hidden rows that were handed out, by where they came from."
    return _figure("Rows served against computed", text, keys + chart)


def _step_chart(outcome: DemoOutcome) -> str:
    def points(steps: Sequence[StepSample], what: str) -> list[tuple[float, float, str]]:
        return [
            (float(number), 1e3 * (step.shim_s if what == "row cache" else step.step_s), _step_tip(number, step, what))
            for number, step in enumerate(steps, 1)
        ]

    series = [
        Series("engine step without prefix caching", _WITHOUT, points(outcome.uncached.steps, "without caching")),
        Series("engine step with prefix caching", _POOL, points(outcome.cached.steps, "with caching")),
        Series("added by the row cache", _SHIM, points(outcome.cached.steps, "row cache")),
    ]
    chart = log_times(series, label="Step time", x_label="step", width=1100)
    text = (
        f"Time of each engine step. All steps together: {sum(s.step_s for s in outcome.uncached.steps):.2f} s without "
        f"prefix caching, {sum(s.step_s for s in outcome.cached.steps):.2f} s with it, and "
        f"{sum(s.shim_s for s in outcome.cached.steps):.3f} s for the row cache."
    )
    keys = legend([(one.name, one.color) for one in series])
    return _figure("Step time", text, keys + f'<div class="scroll">{chart}</div>', wide=True)


def _step_tip(number: int, step: StepSample, what: str) -> str:
    time_ms = 1e3 * (step.shim_s if what == "row cache" else step.step_s)
    return (
        f"step {number}, {what}: {time_ms:.2f} ms, {step.requests} requests, {step.computed} tokens computed, "
        f"{step.from_cache} rows from the pool"
    )


def _row(result: RequestResult) -> str:
    request = result.request
    share = 100 * result.from_cache / len(request.tokens)
    note = result.verdict if result.difference in (0.0, float("inf")) else f"{result.verdict} ({result.difference:.1e})"
    cells = (
        f"<td>{html.escape(request.req_id)}</td><td>{html.escape(request.title)}</td><td>{request.turn}</td>"
        f"<td>{request.kind}</td><td class=n>{len(request.tokens)}</td><td class=n>{result.hit_tokens}</td>"
        f'<td class="n bar" style="--share:{share:.0f}%">{result.from_cache}</td><td class=n>{result.computed}</td>'
        f'<td><span class="{"good" if result.ok else "bad"}">{html.escape(note)}</span></td>'
        f"<td>{'different' if result.control_noticed else 'not noticed'}</td>"
    )
    return f"<tr>{cells}</tr>"


def _facts(outcome: DemoOutcome) -> str:
    facts = (
        ("Model", f"Llama layout, random weights, hidden {outcome.hidden}, {outcome.dtype}"),
        ("KV block", f"{outcome.block_size} tokens"),
        ("A row is right when it is", str(outcome.standard)),
        ("Requests took", f"{outcome.cached.run_s:.2f} s with, {outcome.uncached.run_s:.2f} s without prefix caching"),
        ("Daemon served after", f"{outcome.daemon_start_s:.2f} s"),
        ("Whole demo", f"{outcome.total_s:.0f} s on {platform.machine()}, Python {platform.python_version()}"),
    )
    return "".join(f"<dt>{html.escape(name)}</dt><dd>{html.escape(value)}</dd>" for name, value in facts)


_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>stagecache demo</title>
<style>
:root { --page:#f6f7f9; --card:#ffffff; --ink:#1b2330; --soft:#5d6878; --line:#dfe3ea; --pool:#1f7a8c;
  --computed:#e0a34a; --without:#9aa5b4; --shim:#b5446e; --good:#1d7a46; --bad:#b3261e; --tint:#e4f1f3; }
@media (prefers-color-scheme: dark) {
  :root { --page:#12161d; --card:#1b212b; --ink:#e6eaf0; --soft:#9aa6b6; --line:#2d3542; --pool:#4fb3c6;
    --computed:#e3b067; --without:#6b7788; --shim:#e0789f; --good:#62c78d; --bad:#ff8a80; --tint:#1d3238; } }
* { box-sizing:border-box; }
body { margin:0; background:var(--page); color:var(--ink);
  font:15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
main { max-width:1180px; margin:0 auto; padding:32px 20px 56px; }
h1 { font-size:26px; margin:0; letter-spacing:-.01em; }
h2 { font-size:16px; margin:0; }
header p { color:var(--soft); margin:6px 0 18px; max-width:110ch; }
.verdict { display:flex; gap:12px; align-items:center; padding:14px 18px; border-radius:12px; background:var(--card);
  border:1px solid var(--line); border-left:5px solid var(--good); font-weight:600; }
.verdict.bad { border-left-color:var(--bad); }
.verdict i { font-style:normal; font-size:20px; color:var(--good); } .verdict.bad i { color:var(--bad); }
.tiles { display:grid; grid-template-columns:repeat(auto-fit,minmax(190px,1fr)); gap:14px; margin:16px 0; }
.tile, figure, section { background:var(--card); border:1px solid var(--line); border-radius:12px; }
.tile { padding:14px 16px; display:flex; flex-direction:column; }
.tile b { font-size:26px; line-height:1.2; font-variant-numeric:tabular-nums; letter-spacing:-.02em; }
.tile span { font-weight:600; } .tile small { color:var(--soft); }
.charts { display:grid; grid-template-columns:repeat(2,minmax(0,1fr)); gap:16px; }
figure { margin:0; padding:18px 20px 12px; display:flex; flex-direction:column; } figure.wide { grid-column:1/-1; }
figure p { margin:2px 0 8px; color:var(--soft); }
figure svg { width:100%; height:auto; display:block; margin-top:auto; }
figure.wide .scroll svg { min-width:720px; }
svg text { font-size:12px; fill:var(--soft); font-variant-numeric:tabular-nums; }
svg text.value { fill:var(--ink); font-size:13px; font-weight:600; }
svg .grid { stroke:var(--line); stroke-width:1; } svg circle { fill-opacity:.8; }
.legend { display:flex; flex-wrap:wrap; gap:4px 18px; margin:0 0 4px; font-size:13px; }
.legend i { display:inline-block; width:11px; height:11px; border-radius:3px; margin-right:7px; vertical-align:-1px; }
section { margin-top:16px; padding:18px 20px; } .scroll { overflow-x:auto; }
table { border-collapse:collapse; width:100%; margin-top:8px; font-size:14px; font-variant-numeric:tabular-nums; }
th { text-align:left; color:var(--soft); font-weight:600; font-size:13px; border-bottom:2px solid var(--line); }
th, td { padding:5px 12px 5px 0; white-space:nowrap; } td { border-bottom:1px solid var(--line); }
.n { text-align:right; } td.n, th.n { padding-right:18px; }
td.bar { background:linear-gradient(to left, var(--tint) var(--share), transparent var(--share)); padding-right:10px; }
th.n.bar { padding-right:10px; } td.bar + td, th.bar + th { padding-left:14px; }
td .good { color:var(--good); font-weight:600; } td .bad { color:var(--bad); font-weight:700; }
dl { display:grid; grid-template-columns:max-content 1fr; gap:4px 22px; margin:8px 0 0; }
dt { color:var(--soft); } dd { margin:0; }
@media (max-width:820px) { .charts, dl { grid-template-columns:minmax(0,1fr); } dd { margin-bottom:6px; } }
</style>
<main>
<header><h1>stagecache demo</h1>
<p>Conversations over several turns ran on a real vLLM engine. With prefix caching on, the engine computes only the
new part of each prompt, and stagecache gives back the hidden rows of the rest. The same prompts then ran with prefix
caching off, and the rows of both runs were compared.</p></header>
<div class="verdict @STATE@"><i>@MARK@</i>@VERDICT@.</div>
<div class="tiles">@TILES@</div>
<div class="charts">@CHARTS@</div>
<section><h2>Requests</h2><div class="scroll"><table>
<thead><tr><th>request<th>topic<th>turn<th>kind<th class=n>prompt tokens<th class=n>hit tokens
<th class="n bar">rows from the pool<th class=n>rows computed<th>against uncached<th>shifted by one</tr></thead>
<tbody>@ROWS@</tbody></table></div></section>
<section><h2>How it ran</h2><dl>@FACTS@</dl></section>
</main>
</html>
"""
