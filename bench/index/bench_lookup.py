"""Lookups in the block index over gRPC from one client; also the workload ``lookups`` of ``stagecache bench``.

    python bench/index/bench_lookup.py [--rounds N] [--lookups N]

64 hashes each, half of them stored, every answer checked. One lookup a call is bounded by what a gRPC call costs in
Python; a scheduler asks for all new requests of a step in one call, so batched lookups count too. The exit status is 1
where neither way with several lookups under way comes to 2,000 a second.
"""

from __future__ import annotations

import argparse
import sys
from statistics import median

from stagecache.bench.lookups import measure_lookups

AT_LEAST = 2000.0


def main() -> int:
    """Measures, prints a line a way and answers the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds (default 5)")
    parser.add_argument("--lookups", type=int, default=2000, help="lookups a round and way (default 2000)")
    options = parser.parse_args()
    results = measure_lookups(rounds=options.rounds, lookups=options.lookups)
    for run in results:
        rounds = ", ".join(f"{value:,.0f}" for value in run.per_second)
        latency = f", {median(run.latency_us):.0f} µs a call" if run.latency_us else ""
        print(f"{run.way:<20}{rounds} a second{latency}, daemon {median(run.daemon_cpu_us):.0f} µs of CPU a lookup")
    return 0 if max(median(run.per_second) for run in results) >= AT_LEAST else 1


if __name__ == "__main__":
    sys.exit(main())
