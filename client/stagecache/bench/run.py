"""The whole bench: a daemon, the workloads that were asked for, interleaved, and what they say."""

from __future__ import annotations

import gc
import os
import platform
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from stagecache.bench.attribution import attribute
from stagecache.bench.batch import BLOCK_SIZE
from stagecache.bench.contenders import Contender, NoCache, Ours
from stagecache.bench.copies import CopyResult, measure_copies
from stagecache.bench.figures import CaseFigures, ContenderFigures
from stagecache.bench.hits import Hits, SameStepHits
from stagecache.bench.lookups import LookupsResult, measure_lookups
from stagecache.bench.measure import (
    FORWARDS,
    Forward,
    WrongRowsError,
    check,
    resident_bytes,
    run_block,
    run_step,
    settle,
)
from stagecache.bench.sessions import SessionsResult, measure_sessions
from stagecache.bench.workloads import Decode, Deferred, Lane, Prefill, Workload
from stagecache.local_daemon import LocalDaemon

WORKLOADS = ("decode", "prefill", "hits", "same-step", "deferred", "copies", "blocks", "sessions", "lookups")
Say = Callable[[str], None]


@dataclass
class BenchOptions:
    """What to measure. Empty ``only``: all workloads.

    forward: what runs between begin and save, one of ``FORWARDS``. rounds: turns of each contender. steps: decode steps
    a turn. seconds: how long sessions run. torch_threads: 0 for torch's own choice.
    """

    only: Sequence[str] = ()
    requests: Sequence[int] = (32, 256)
    hidden: Sequence[int] = (2048,)
    extra_keys: Sequence[int] = (0,)
    forward_ms: Sequence[float] = (0.0, 5.0)
    prefill_tokens: Sequence[int] = (2048, 8192)
    hit_tokens: Sequence[int] = (2048,)
    at_once: Sequence[int] = (1, 8)
    num_blocks: Sequence[int] = (1_000, 1_000_000)
    sessions: Sequence[int] = (1, 8)
    chunk: int = 2048
    forward: str = "sleep"
    rounds: int = 12
    steps: int = 8
    seconds: float = 4.0
    torch_threads: int = 0
    peer: bool = True


FULL: dict[str, Sequence[Any]] = {
    "requests": (1, 8, 32, 128, 256, 1024),
    "hidden": (2048, 4096),
    "extra_keys": (0, 1, 4),
    "forward_ms": (0.0, 10.0),
    "prefill_tokens": (2048, 8192, 16384),
    "hit_tokens": (512, 2048, 8192, 32768),
    "at_once": (1, 8),
    "num_blocks": (1_000, 10_000, 100_000, 1_000_000),
    "sessions": (1, 2, 4, 8),
}
"""Values of ``--full``."""


@dataclass
class BenchResult:
    """Everything that one run found."""

    machine: dict[str, Any]
    daemon: dict[str, float]
    cases: list[CaseFigures] = field(default_factory=list)
    copies: list[CopyResult] = field(default_factory=list)
    sessions: list[SessionsResult] = field(default_factory=list)
    lookups: list[LookupsResult] = field(default_factory=list)


def workloads(options: BenchOptions) -> list[Callable[[], Workload]]:
    """The workloads that need contenders; each made when its turn comes, since its rows take memory."""
    made: list[Callable[[], Workload]] = []

    def wanted(name: str) -> bool:
        return not options.only or name in options.only

    for hidden in options.hidden:
        for extra in options.extra_keys:
            if wanted("decode"):
                made += [
                    lambda r=r, h=hidden, k=extra, f=f: Decode(r, h, k, f / 1e3, options.steps)  # type: ignore[misc]
                    for r in options.requests
                    for f in options.forward_ms
                ]
            if wanted("prefill"):
                made += [
                    lambda t=t, h=hidden, k=extra: Prefill(t, options.chunk, h, k)  # type: ignore[misc]
                    for t in options.prefill_tokens
                ]
        if wanted("hits"):
            made += [
                lambda t=t, n=n, h=hidden, f=f: Hits(t, n, h, f / 1e3, options.chunk)  # type: ignore[misc]
                for t in options.hit_tokens
                for n in options.at_once
                for f in options.forward_ms
            ]
        if wanted("same-step"):
            made += [lambda t=t, h=hidden: SameStepHits(t, h, 0.0) for t in options.hit_tokens if t <= 8192]  # type: ignore[misc]
        if wanted("deferred"):
            made += [lambda r=r, h=hidden: Deferred(r, h, options.steps) for r in options.requests]  # type: ignore[misc]
    if wanted("blocks"):
        made += [
            lambda n=n: Decode(32, 8, 0, 0.0, options.steps, num_blocks=n, name="blocks")  # type: ignore[misc]
            for n in options.num_blocks
        ]
    return made


def run_bench(options: BenchOptions, say: Say) -> BenchResult:
    """Measure.

    Raises:
        StageCacheError: the daemon does not start, or has no room.
        WrongRowsError: a contender handed out wrong rows; no figure of such a run means anything.
    """
    if options.peer:
        say("importing vLLM-Omni")
        from stagecache.bench.peer import Peer  # noqa: F401  its import takes seconds, and is no part of any figure
    if options.torch_threads:
        torch.set_num_threads(options.torch_threads)
    result = BenchResult({**_machine(), "forward": options.forward}, {})
    with tempfile.TemporaryDirectory(prefix="stagecache-bench-") as folder, LocalDaemon(Path(folder)) as daemon:
        pid = daemon.pid
        assert pid is not None
        result.daemon = {"start_s": daemon.start_s, "resident_bytes": resident_bytes(pid)}
        for make in workloads(options):
            workload = make()
            say(f"{workload.name}: {workload.label}")
            result.cases.append(run_case(workload, daemon.socket, pid, options))
            del workload
            gc.collect()
        if not options.only or "copies" in options.only:
            for rows in (512, 2048):
                for scattered in (False, True):
                    say(f"copies: {rows} rows of 4096 bytes")
                    result.copies.append(measure_copies(rows, 4096, scattered=scattered))
        if not options.only or "sessions" in options.only:
            for count in options.sessions:
                say(f"sessions: {count} at once")
                found = measure_sessions(
                    daemon.socket, pid, count, requests=32, hidden=2048, forward_ms=10.0, seconds=options.seconds
                )
                result.sessions.append(found)
    if not options.only or "lookups" in options.only:
        result.lookups = measure_lookups(say=say)
    result.machine["load_at_end"] = os.getloadavg()[0]
    return result


def run_case(workload: Workload, socket: Path, daemon_pid: int, options: BenchOptions) -> CaseFigures:
    """One workload: every contender in turn, in another order each round, for ``rounds`` rounds."""
    lanes: list[tuple[Contender, Lane]] = []
    try:
        for make in _contenders(workload, socket, options):
            lane = workload.lane()
            lanes.append((make(lane), lane))
        figures = {contender.name: ContenderFigures(workload.per) for contender, _ in lanes}
        forward = FORWARDS[options.forward]()
        for contender, lane in lanes:
            _warm_up(contender, lane, workload, figures[contender.name], forward)
        for turn in range(options.rounds):
            at = turn % len(lanes)
            for contender, lane in lanes[at:] + lanes[:at]:
                block = run_block(contender, workload.block(lane), daemon_pid, forward=forward)
                figures[contender.name].blocks.append(block)
        ours, lane = next((c, lane) for c, lane in lanes if isinstance(c, Ours))
        parts, moved = attribute(ours, workload, lane)
    finally:
        for contender, _ in lanes:
            contender.close()
    return CaseFigures(
        workload.name,
        workload.parameters,
        workload.label,
        workload.per,
        workload.fewest_bytes,
        figures,
        parts,
        moved,
    )


def _contenders(workload: Workload, socket: Path, options: BenchOptions) -> list[Callable[[Lane], Contender]]:
    shape, geometry = workload.shape, workload.geometry
    makers: list[Callable[[Lane], Contender]] = [lambda lane: Ours(lane.batch, socket, shape, geometry)]
    if not workload.has_hits:
        makers.append(lambda lane: NoCache(lane.batch))
    if options.peer:
        from stagecache.bench.peer import Peer

        makers.append(lambda lane: Peer(lane.batch, shape, geometry, eager=True))
        makers.append(lambda lane: Peer(lane.batch, shape, geometry, eager=False))
    return makers


def _warm_up(contender: Contender, lane: Lane, workload: Workload, figures: ContenderFigures, forward: Forward) -> None:
    """Write what later blocks hit, then two blocks. The first step with a hit is kept by itself."""
    for step in workload.prepare(lane):
        _, outputs, ids = run_step(contender, step)
        check(contender, step, outputs, ids)
    settle(contender)
    block = run_block(contender, workload.block(lane), None, forward=forward)
    if workload.has_hits:
        figures.first = block.steps[0]
    run_block(contender, workload.block(lane), None, forward=forward)


def _machine() -> dict[str, Any]:
    return {
        "processor": _processor(),
        "cpus": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "torch": version("torch"),
        "torch_threads": torch.get_num_threads(),
        "block_size": BLOCK_SIZE,
        "unix_s": int(time.time()),
        "load_at_start": os.getloadavg()[0],
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


__all__ = ["FULL", "WORKLOADS", "BenchOptions", "BenchResult", "WrongRowsError", "run_bench", "run_case"]
