"""One of several engines at one daemon: decode steps with a forward between, in a process of its own.

Arguments: socket, requests, hidden, forward in ms, seconds. It prints a line when it is attached, begins when it reads
one, and prints the nanoseconds of its steps as JSON.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from stagecache.bench.contenders import Ours
from stagecache.bench.measure import check, run_step
from stagecache.bench.workloads import Decode


def main(arguments: list[str]) -> None:
    """Run one session to its end."""
    socket, requests, hidden = Path(arguments[0]), int(arguments[1]), int(arguments[2])
    forward_s, seconds = float(arguments[3]) / 1e3, float(arguments[4])
    workload = Decode(requests, hidden, 0, forward_s, 8)
    lane = workload.lane()
    ours = Ours(lane.batch, socket, workload.shape, workload.geometry)
    for steps in (workload.prepare, workload.block):
        for step in steps(lane):
            run_step(ours, step)
    print("ready", flush=True)
    sys.stdin.readline()
    ends = time.monotonic() + seconds
    totals: list[int] = []
    while time.monotonic() < ends:
        for step in workload.block(lane):
            sample, outputs, ids = run_step(ours, step)
            totals.append(sample.total)
            if len(totals) % 16 == 0:
                check(ours, step, outputs, ids)
    ours.close()
    print(json.dumps(totals), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
