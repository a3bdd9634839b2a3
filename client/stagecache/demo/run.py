"""The demo from end to end: daemon, checkpoint, engine with the shim, engine without caching, comparison, report."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from stagecache.demo.checkpoint import ModelShape, write_checkpoint
from stagecache.demo.compare import RequestResult, Standard, compare
from stagecache.demo.engine import EngineSettings, Recording, record
from stagecache.demo.report import DemoOutcome, prompt_tokens, render, rows_from_cache
from stagecache.demo.workload import DemoRequest, build_requests, read_text, train_tokenizer, write_tokenizer
from stagecache.errors import StageCacheError
from stagecache.local_daemon import LocalDaemon
from stagecache.local_engine import Interrupts, environment, file_tail, quiet_engine_environment, stderr_to

_LISTED_REQUESTS = 48
_KV_TOKENS = 16384
_DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


class DemoFailedError(StageCacheError):
    """The demo could not run to its end; the text has the cause."""


@dataclass(frozen=True)
class DemoOptions:
    """What to run.

    Attributes:
        requests: how many; conversations are added as needed.
        hidden: width of the model.
        dtype: float32, bfloat16 or float16.
        report: where the HTML report goes.
    """

    requests: int = 32
    hidden: int = 256
    dtype: str = "float32"
    report: Path = Path("stagecache-demo.html")


def run_demo(options: DemoOptions, work: Path, console: Console) -> DemoOutcome:
    """Run it, show progress and the table, write the report.

    Args:
        options: what to run.
        work: an empty directory for the checkpoint and the logs.
        console: where progress and the table go.

    Raises:
        DemoFailedError: the engine or the daemon could not run.
        ValueError: the model cannot have that width.
    """
    started = time.perf_counter()
    try:
        with environment(quiet_engine_environment() | {"STAGECACHE_REQUIRED": "1"}):
            outcome = _run_in(work, options, console, started)
    except (StageCacheError, ValueError):
        raise
    except Exception as error:
        raise DemoFailedError(f"{type(error).__name__}: {error}\n{file_tail(work / 'engine.log')}") from error
    console.print(result_table(outcome))
    options.report.parent.mkdir(parents=True, exist_ok=True)
    options.report.write_text(render(outcome), encoding="utf-8")
    console.print(f"Report: [bold]{options.report.resolve()}[/]", highlight=False, soft_wrap=True)
    return outcome


def _run_in(work: Path, options: DemoOptions, console: Console, started: float) -> DemoOutcome:
    text = read_text()
    shape = ModelShape(hidden=options.hidden)
    tokenizer = train_tokenizer(text, shape.vocab)
    waves = build_requests(tokenizer, text, options.requests)
    checkpoint = work / "checkpoint"
    settings = EngineSettings(checkpoint, dtype=options.dtype, kv_bytes=_KV_TOKENS * _kv_bytes(shape, options.dtype))
    with Interrupts() as interrupts, _progress(console) as progress, stderr_to(work / "engine.log"):
        setup = progress.add_task("checkpoint and daemon", total=2)
        write_checkpoint(checkpoint, shape)
        write_tokenizer(tokenizer, checkpoint)
        progress.advance(setup)
        with LocalDaemon(work) as daemon, environment({"STAGECACHE_SOCKET": str(daemon.socket)}):
            progress.advance(setup)
            cached = _record(progress, "with prefix caching and stagecache", settings, waves, interrupts, caching=True)
            uncached = _record(progress, "without prefix caching", settings, waves, interrupts, caching=False)
    standard = Standard.of(options.dtype, options.hidden)
    return DemoOutcome(
        results=compare(waves, cached, uncached, standard),
        cached=cached,
        uncached=uncached,
        standard=standard,
        hidden=options.hidden,
        dtype=options.dtype,
        block_size=settings.block_size,
        daemon_start_s=daemon.start_s,
        total_s=time.perf_counter() - started,
    )


def _record(
    progress: Progress,
    name: str,
    settings: EngineSettings,
    waves: Sequence[Sequence[DemoRequest]],
    interrupts: Interrupts,
    *,
    caching: bool,
) -> Recording:
    total = sum(len(wave) for wave in waves)
    task = progress.add_task(f"{name}: engine starts", total=None)
    return record(
        settings,
        waves,
        prefix_caching=caching,
        on_start=lambda: progress.update(task, description=name, total=total, completed=0),
        on_prompt=lambda: progress.advance(task),
        on_step_done=interrupts.check,
    )


def _progress(console: Console) -> Progress:
    return Progress(
        SpinnerColumn(finished_text="[green]✓[/]"),
        TextColumn("{task.description}"),
        BarColumn(bar_width=28),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        redirect_stderr=False,
    )


def _kv_bytes(shape: ModelShape, dtype: str) -> int:
    """Bytes of KV cache a token."""
    return 2 * shape.layers * shape.kv_heads * shape.head_dim * _DTYPE_BYTES[dtype]


def result_table(outcome: DemoOutcome) -> Table:
    """A line a request, or a line a turn when there are many, then the totals and the control."""
    table = Table(show_footer=True, title="Full-prompt hidden states, against a run without prefix caching")
    results = outcome.results
    tokens, pooled = prompt_tokens(results), rows_from_cache(results)
    hits = sum(result.hit_tokens for result in results)
    right = len(results) - outcome.wrong
    listed = len(results) <= _LISTED_REQUESTS
    table.add_column("request" if listed else "turn", footer=f"all {len(results)}")
    table.add_column("kind" if listed else "requests", footer="control: rows\nshifted by one")
    table.add_column("prompt\ntokens", justify="right", footer=f"{tokens}")
    table.add_column("hit\ntokens", justify="right", footer=f"{hits}")
    table.add_column("rows from\nthe pool", justify="right", footer=f"{pooled}")
    table.add_column("rows\ncomputed", justify="right", footer=f"{tokens - pooled}")
    noticed = f"{outcome.controls} of {len(results)}\nreported different"
    colour = "green" if outcome.ok else "red"
    table.add_column("equal", footer=f"[{colour}]{right} of {len(results)}[/]\n{noticed}")
    if listed:
        for result in results:
            table.add_row(*_request_cells(result))
    else:
        for turn, some in outcome.turns():
            table.add_row(*_turn_cells(turn, some))
    return table


def _request_cells(result: RequestResult) -> tuple[str, ...]:
    return (
        result.request.req_id,
        result.request.kind,
        str(len(result.request.tokens)),
        str(result.hit_tokens),
        str(result.from_cache),
        str(result.computed),
        _verdict(result),
    )


def _turn_cells(turn: int, results: Sequence[RequestResult]) -> tuple[str, ...]:
    tokens, pooled = prompt_tokens(results), rows_from_cache(results)
    bad = next((result for result in results if not result.ok), None)
    return (
        str(turn),
        str(len(results)),
        str(tokens),
        str(sum(result.hit_tokens for result in results)),
        str(pooled),
        str(tokens - pooled),
        "[green]yes[/]" if bad is None else f"{bad.request.req_id}: {_verdict(bad)}",
    )


def _verdict(result: RequestResult) -> str:
    if not result.ok:
        if result.verdict in ("equal", "close"):
            why = "control missed" if not result.control_noticed else "rows do not match hits"
            return f"[red]no, {why}[/]"
        return f"[red]no, {result.verdict} ({result.difference:.1e})[/]"
    return "[green]yes[/]" if result.verdict == "equal" else f"[green]close ({result.difference:.1e})[/]"
