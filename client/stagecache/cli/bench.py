"""``stagecache bench``."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from stagecache.cli.console import err, out, show_error

#: As stagecache.bench.run has them, which imports torch.
WORKLOADS = ("decode", "prefill", "hits", "same-step", "deferred", "copies", "blocks", "sessions", "lookups")

_Ints = Optional[list[int]]  # noqa: UP045  typer reads it at run time, on Python 3.10 too
_Floats = Optional[list[float]]  # noqa: UP045
_Texts = Optional[list[str]]  # noqa: UP045


def bench(
    only: Annotated[
        _Texts, typer.Option(help=f"A workload, repeatable: {', '.join(WORKLOADS)}. All by default.")
    ] = None,
    requests: Annotated[_Ints, typer.Option(help="Requests of a decode step, repeatable.")] = None,
    hidden: Annotated[_Ints, typer.Option(help="Width of the bf16 hidden states, repeatable.")] = None,
    extra_keys: Annotated[_Ints, typer.Option(help="Further per-token keys, repeatable.")] = None,
    forward_ms: Annotated[_Floats, typer.Option(help="Sleep in place of the forward, repeatable.")] = None,
    prefill_tokens: Annotated[_Ints, typer.Option(help="Tokens of a prefill, repeatable.")] = None,
    hit_tokens: Annotated[_Ints, typer.Option(help="Tokens of a hit, repeatable.")] = None,
    at_once: Annotated[_Ints, typer.Option(help="Hits in one step, repeatable.")] = None,
    num_blocks: Annotated[_Ints, typer.Option(help="Sizes of the KV cache, repeatable.")] = None,
    sessions: Annotated[_Ints, typer.Option(help="Sessions at once, repeatable.")] = None,
    forward: Annotated[
        str, typer.Option(help="What a forward does: sleep (the CPU is idle), or work (it multiplies matrices).")
    ] = "sleep",
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each contender.")] = 12,
    steps: Annotated[int, typer.Option(min=1, max=32, help="Decode steps a turn.")] = 8,
    seconds: Annotated[float, typer.Option(min=0.2, help="How long sessions run.")] = 4.0,
    torch_threads: Annotated[
        int, typer.Option(min=0, help="Threads of torch, which the peer copies with; 0: torch's choice.")
    ] = 0,
    full: Annotated[bool, typer.Option("--full", help="Every value of every option; takes long.")] = False,
    peer: Annotated[bool, typer.Option("--peer/--no-peer", help="Measure vLLM-Omni's in-process manager too.")] = True,
    json: Annotated[Path, typer.Option(help="Where the JSON goes.", dir_okay=False)] = Path("stagecache-bench.json"),
    plots: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="A folder for plots, as SVG; needs matplotlib.", file_okay=False),
    ] = None,
) -> None:
    """Measure what a step and a hit cost, beside no cache and beside vLLM-Omni 0.30.0, in one interleaved run.

    A daemon is started for it, and every row that a contender hands out is compared. Status 1: the peer is missing, or
    rows were wrong. A target that is not reached does not fail the command: a busy machine misses targets too.
    """
    unknown = [name for name in only or () if name not in WORKLOADS]
    if unknown:
        raise typer.BadParameter(f"{unknown[0]!r} is none of {', '.join(WORKLOADS)}", param_hint="--only")
    if forward not in ("sleep", "work"):
        raise typer.BadParameter(f"{forward!r} is neither sleep nor work", param_hint="--forward")
    if find_spec("torch") is None:
        show_error("this needs torch, which is not installed here: pip install 'stagecache[torch]'")
        raise typer.Exit(1)
    if plots is not None and find_spec("matplotlib") is None:
        show_error("--plots needs matplotlib, which is not installed here: pip install matplotlib")
        raise typer.Exit(1)
    from stagecache.bench.peer import peer_missing

    if peer and (text := peer_missing()):
        show_error(text)
        raise typer.Exit(1)
    chosen = {
        "requests": requests,
        "hidden": hidden,
        "extra_keys": extra_keys,
        "forward_ms": forward_ms,
        "prefill_tokens": prefill_tokens,
        "hit_tokens": hit_tokens,
        "at_once": at_once,
        "num_blocks": num_blocks,
        "sessions": sessions,
    }
    options = {
        "only": only or (),
        "forward": forward,
        "rounds": rounds,
        "steps": steps,
        "seconds": seconds,
        "torch_threads": torch_threads,
        "peer": peer,
    }
    raise typer.Exit(_run(chosen, options, full=full, json=json, plots=plots))


def _run(chosen: dict[str, Any], options: dict[str, Any], *, full: bool, json: Path, plots: Path | None) -> int:
    from stagecache.bench.report import show, write_json
    from stagecache.bench.run import FULL, BenchOptions, WrongRowsError, run_bench
    from stagecache.errors import StageCacheError

    wanted = BenchOptions(**options)
    for name, values in chosen.items():
        if values or full:
            setattr(wanted, name, values or FULL[name])
    try:
        with err.status("starting") as status:
            result = run_bench(wanted, status.update)
    except (StageCacheError, WrongRowsError, ValueError) as error:
        show_error(error)
        return 1
    show(result, out)
    write_json(result, json)
    out.print(f"\nEverything is in {json}.")
    if plots is not None:
        from stagecache.bench.plots import write_plots

        out.print(f"Plots: {', '.join(str(path) for path in write_plots(result, plots))}.")
    return 0
