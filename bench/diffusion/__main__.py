"""Dense, paged, and paged with prefix caching, side by side on the small DiT and a daemon of the bench's own.

    make bench-diffusion
    python -m bench.diffusion [--rounds N] [--json FILE]

Every workload is two warm-ups and eight measured requests a round: guidance 2.5 (two rows), 8 denoise steps, seed 42.
The modes take turns request by request, in an order that rotates; outputs are compared bit by bit as it goes. Times
are medians with quartiles over all measured requests; a ratio is taken request by request. Throughput is measured
requests by the sum of their times.

The exit status is 1 where distinct prompts cost more than 2 % with prefix caching, or the full prefix is not faster.
The verdicts are on the worker thread's CPU time, which other processes lengthen least; wall time stands beside it.
"paged again" is a second stage like "paged": what it differs by is noise, and within twice its error nothing is said.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from bench.diffusion.measure import Figures, Spread, ratio, run
from bench.diffusion.modes import AGAIN, DENSE, PAGED, PREFIX, all_modes, threads
from bench.diffusion.workloads import BLOCK_SIZE, MODEL, WORKLOADS, Workload
from examples.small_dit import SmallDiT
from stagecache.local_daemon import LocalDaemon

MOST_OVERHEAD = 1.02


def render(workload: Workload, figures: Mapping[str, Figures]) -> str:
    """One table."""
    header = f"  {'mode':<16}{'tokens':>8}{'hit blocks':>12}{'latency ms':>26}{'requests/s':>12}{'CPU ms':>26}"
    header += f"{'CPU / dense':>22}{'CPU / paged':>22}"
    lines = [f"{workload.name}: {workload.what}", header]
    for name, mode in figures.items():
        wall = Spread.of([1000 * value for value in mode.wall_s])
        cpu = Spread.of([1000 * value for value in mode.cpu_s])
        lines.append(
            f"  {name:<16}{mode.tokens:>8.0f}{mode.hit_blocks:>12.1f}{wall.text():>26}"
            f"{len(mode.wall_s) / sum(mode.wall_s):>12.2f}{cpu.text():>26}"
            f"{ratio(mode, figures[DENSE], cpu=True).text(3):>22}{ratio(mode, figures[PAGED], cpu=True).text(3):>22}"
        )
    tokens = 1 - figures[PREFIX].tokens / figures[PAGED].tokens
    rows = 1 - figures[PREFIX].rows / figures[PAGED].rows
    wall_gain, cpu_gain = ratio(figures[PREFIX], figures[PAGED]), ratio(figures[PREFIX], figures[PAGED], cpu=True)
    lines.append(
        f"  with prefix caching {100 * tokens:.1f} % fewer tokens, {100 * rows:.1f} % fewer rows in tiles, "
        f"{100 * (1 - cpu_gain.median):.1f} % less CPU time, {100 * (1 - wall_gain.median):.1f} % less latency"
    )
    return "\n".join(lines)


def verdicts(figures: Mapping[str, Mapping[str, Figures]]) -> list[tuple[str, str]]:
    """What is promised, and what was seen: ok, MISSED, or undecided where noise is as large as what is looked for."""
    full, distinct = figures.get("full prefix"), figures.get("distinct prompts")
    return [*(_verdict_full(full) if full else []), *(_verdicts_distinct(distinct) if distinct else [])]


def _verdict_full(full: Mapping[str, Figures]) -> list[tuple[str, str]]:
    gain = ratio(full[PREFIX], full[PAGED], cpu=True)
    text = f"the full prefix is faster with prefix caching: {gain.text(3)} of the time"
    return [(text, "ok" if gain.high < 1 else "MISSED")]


def _verdicts_distinct(distinct: Mapping[str, Figures]) -> list[tuple[str, str]]:
    cost = ratio(distinct[PREFIX], distinct[PAGED], cpu=True)
    noise = ratio(distinct[AGAIN], distinct[PAGED], cpu=True)
    own = Spread.of([a / b for a, b in zip(distinct[PREFIX].own_cpu_s, distinct[PAGED].cpu_s, strict=True)])
    within = "ok" if cost.median <= MOST_OVERHEAD else "MISSED"
    if abs(cost.median - MOST_OVERHEAD) < 2 * max(cost.error, noise.error):
        within = "undecided"
    return [
        (f"distinct prompts cost at most 2 % more: {cost.text(3)} of the time; paged again {noise.text(3)}", within),
        (
            f"prefix caching's own work on the worker's thread then takes {100 * own.median:.2f} % of the time",
            "ok" if own.high <= MOST_OVERHEAD - 1 else "MISSED",
        ),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints, writes the JSON and answers the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="rounds of ten requests, at least 1 (default 3)")
    names = [workload.name for workload in WORKLOADS]
    parser.add_argument("--only", action="append", choices=names, help="a workload, may be repeated (default: all)")
    parser.add_argument("--threads", type=int, default=1, help="torch's threads (default 1)")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    options = parser.parse_args(argv)
    threads(options.threads)
    figures: dict[str, Mapping[str, Figures]] = {}
    load = os.getloadavg()
    with (
        tempfile.TemporaryDirectory() as folder,
        LocalDaemon(Path(folder), arguments=["--shared-bytes", "512MiB"]) as daemon,
        all_modes(SmallDiT(MODEL), daemon.socket) as modes,
    ):
        print(
            f"small DiT: {MODEL.layers} layers of width {MODEL.width}, blocks of {BLOCK_SIZE} tokens, {options.rounds} "
            f"rounds; torch {torch.__version__} with {options.threads} thread(s), {os.cpu_count()} CPUs, "
            f"load {load[0]:.1f}"
        )
        for workload in (each for each in WORKLOADS if each.name in (options.only or names)):
            figures[workload.name] = run(workload, modes, options.rounds)
            print(f"\n{render(workload, figures[workload.name])}", flush=True)
    results = verdicts(figures)
    print()
    for text, met in results:
        print(f"{met:<10}{text}")
    if options.json:
        report = {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cpus": os.cpu_count(),
            "load_average": load,
            "rounds": options.rounds,
            "figures": {name: {mode: asdict(found) for mode, found in by.items()} for name, by in figures.items()},
            "verdicts": results,
        }
        options.json.write_text(json.dumps(report, indent=1))
    return 1 if any(met == "MISSED" for _, met in results) else 0


if __name__ == "__main__":
    sys.exit(main())
