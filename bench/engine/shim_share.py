"""What the shim adds to a decode step of the real vLLM engine on the CPU, when no request hits: engine-process CPU with
it and without it, and twice without it (A/A), which says how much of a difference is noise.

    python -m bench.engine.shim_share [--requests 16] [--steps 20] [--hidden 1024] [--layers 28] [--rounds 3]
        [--turns 6] [--threads 1] [--json FILE]

A round starts three engines anew, each in a process of its own. They take turns, in another order each time: all
requests are prefilled, and their decode steps are measured. A turn's figure is the median over its steps; a difference
is taken turn by turn, since engines that ran right after each other met the same machine, and comes with its 95 %
bootstrap interval over all turns. Rows are handed out in every step, as to a consumer that takes them. What the shim's
code and threads take is also measured in place (``shim_cpu``), which needs no comparison.

The model has the width and the layers of the smallest ones that people serve (0.6B parameters): what the shim takes
hardly depends on the layers, what a step takes does. The engine computes with one thread: with one on each core
(--threads 0) they spin at each other's barriers, and CPU and time then say most of all how busy the machine was. There
is a verdict on the comparison only where the A/A interval lies within 1 %. The exit status is 1 where the shim's own
measure says more than 1 %, and 2 where an engine or the daemon failed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console

from bench.engine.intervals import Interval, differences, interval, judge
from bench.engine.processes import EngineFailedError, EngineProcess, EngineSettings, in_turn, wait_all
from stagecache.demo.checkpoint import ModelShape, write_checkpoint
from stagecache.errors import StageCacheError
from stagecache.local_daemon import LocalDaemon
from stagecache.local_engine import Interrupts

KINDS = ("without", "with", "without again")
BOUND = 0.01

Found = dict[str, list[list[dict[str, Any]]]]
"""By kind, a list a round of a list a turn: what ``worker.Driver.decode`` answered."""


def measure(settings: argparse.Namespace, say: Callable[[str], None]) -> Found:
    """All rounds."""
    found: Found = {kind: [] for kind in KINDS}
    with tempfile.TemporaryDirectory(prefix="stagecache-share-") as name:
        folder = Path(name)
        write_checkpoint(folder / "checkpoint", ModelShape(hidden=settings.hidden, layers=settings.layers, std=0.02))
        engine = EngineSettings(
            str(folder / "checkpoint"),
            max_len=64 + settings.steps + 16,
            max_seqs=settings.requests,
            threads=settings.threads,
        )
        for number in range(settings.rounds):
            say(f"round {number + 1} of {settings.rounds}: engines start")
            with LocalDaemon(folder) as daemon, contextlib.ExitStack() as stack:
                engines = {}
                for kind in KINDS:
                    socket = daemon.socket if kind == "with" else None
                    process = EngineProcess(engine, kind, socket=socket, log=folder / f"{kind.replace(' ', '-')}.log")
                    engines[kind] = stack.enter_context(process)
                    found[kind].append([])
                wait_all(list(engines.values()))
                for turn in range(settings.turns):
                    for kind in in_turn(KINDS, number + turn):
                        say(f"round {number + 1} of {settings.rounds}, turn {turn + 1} of {settings.turns}: {kind}")
                        run = engines[kind].ask(
                            "decode", requests=settings.requests, steps=settings.steps, seed=f"{number} {turn}"
                        )
                        found[kind][-1].append(run)
    return found


def summary(found: Found, requests: int) -> dict[str, Any]:
    """Medians in milliseconds, tokens per second, shares of a step's CPU with their intervals."""

    def by_turn(kind: str, read: Callable[[dict[str, Any]], float]) -> list[list[float]]:
        return [[read(run) for run in turns] for turns in found[kind]]

    def step(what: str) -> dict[str, Interval]:
        return {kind: interval(by_turn(kind, lambda run: 1e3 * median(run[what]))) for kind in KINDS}

    cpu = {kind: by_turn(kind, lambda run: median(run["cpu"])) for kind in KINDS}
    own = by_turn("with", lambda run: median(run["shim"]) + run["shim_threads_s"] / len(run["shim"]))
    base = [cpu["without"], cpu["without again"]]
    again = interval(differences([cpu["without again"]], [cpu["without"]]))
    more = interval(differences([cpu["with"]], base))
    wall = step("wall")
    return {
        "step_cpu_ms": step("cpu"),
        "step_wall_ms": wall,
        "tokens_per_s": {kind: 1e3 * requests / wall[kind].middle for kind in KINDS},
        "shim_thread_ms": interval(by_turn("with", lambda run: 1e3 * median(run["shim"]))),
        "shim_ms": interval([[1e3 * value for value in turns] for turns in own]),
        # differences() are shares more than the base: one more than those is the share of it.
        "shim_share": interval([[1 + share for share in turns] for turns in differences([own], base)]),
        "difference": more,
        "a_a": again,
        "verdict": judge(more, [again], BOUND),
    }


def show(result: dict[str, Any]) -> str:
    """The summary for people."""
    verdict = {None: "no verdict: noise is as wide as what is looked for", True: "at most 1 %", False: "more than 1 %"}
    compared = f"A/A: {_share(result['a_a'])}   with the shim: {_share(result['difference'])}"
    own, share = result["shim_ms"], result["shim_share"]
    measured = (
        f"the shim's own CPU, its threads included: {own.middle:.3f} ms a step "
        f"({result['shim_thread_ms'].middle:.3f} on the engine's thread), {100 * share.middle:.2f} % of a step's "
        f"({100 * share.low:.2f} to {100 * share.high:.2f})"
    )
    return "\n".join(
        [
            f"{'':<16}{'CPU a step, ms':>26}{'wall a step, ms':>26}{'tokens a second':>18}",
            *(
                f"{kind:<16}{_spread(result['step_cpu_ms'][kind]):>26}{_spread(result['step_wall_ms'][kind]):>26}"
                f"{result['tokens_per_s'][kind]:>18.0f}"
                for kind in KINDS
            ),
            f"{compared}   {verdict[result['verdict']]}",
            measured,
        ]
    )


def _spread(value: Interval) -> str:
    return f"{value.middle:.2f} ({value.low:.2f} to {value.high:.2f})"


def _share(value: Interval) -> str:
    return f"{100 * value.middle:+.2f} % ({100 * value.low:+.2f} to {100 * value.high:+.2f})"


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write the JSON and answer the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.engine.shim_share",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--requests", type=int, default=16, help="requests of a decode step (default 16)")
    parser.add_argument("--steps", type=int, default=20, help="decode steps a turn (default 20)")
    parser.add_argument("--hidden", type=int, default=1024, help="width of the model (default 1024)")
    parser.add_argument("--layers", type=int, default=28, help="layers of the model (default 28)")
    parser.add_argument("--rounds", type=int, default=3, help="how often the engines are started (default 3)")
    parser.add_argument("--turns", type=int, default=6, help="turns of each engine a round (default 6)")
    parser.add_argument("--threads", type=int, default=1, help="computing threads; 0: vLLM's choice (default 1)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    settings = parser.parse_args(argv)
    err = Console(stderr=True)
    load = os.getloadavg()[0]
    try:
        with Interrupts(), err.status("starting") as status:
            found = measure(settings, status.update)
    except (EngineFailedError, StageCacheError) as error:
        err.print(f"error: {error}", style="red", markup=False)
        return 2
    except KeyboardInterrupt:
        return 130
    result = summary(found, settings.requests)
    print(f"{settings.layers} layers, hidden {settings.hidden}, load {load:.1f} to {os.getloadavg()[0]:.1f}")
    print(show(result))
    if settings.json:
        settings.json.write_text(json.dumps(result, indent=1, default=vars) + "\n")
    return 0 if result["shim_share"].middle <= BOUND else 1


if __name__ == "__main__":
    sys.exit(main())
