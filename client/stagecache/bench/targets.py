"""The figures to hold, each with what was found and the command that gives it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from stagecache.bench.figures import CaseFigures
from stagecache.bench.lookups import HASHES
from stagecache.bench.run import BenchResult

_NOT_HERE = "not measured in this run"


@dataclass(frozen=True)
class Target:
    """One line of the table. found: None where this run did not measure it."""

    what: str
    wanted: str
    found: str | None
    reached: bool | None
    command: str

    @property
    def verdict(self) -> str:
        return {True: "reached", False: "not reached", None: _NOT_HERE}[self.reached]

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "verdict": self.verdict}


def targets(result: BenchResult) -> list[Target]:
    """All lines, those that were not measured included."""
    return [
        *_decode(result),
        *_copies(result),
        *_hits(result),
        *_lookups(result),
        *_rest(result),
    ]


def _find(result: BenchResult, workload: str, **parameters: Any) -> CaseFigures | None:
    for case in result.cases:
        if case.workload == workload and all(case.parameters.get(k) == v for k, v in parameters.items()):
            return case
    return None


def _of(case: CaseFigures | None, what: str) -> float | None:
    found: float | None = getattr(case, what) if case is not None else None
    return found


def _line(
    what: str, command: str, bound: float, found: float | None, *, most: bool = False, unit: str = "x", digits: int = 1
) -> Target:
    wanted = f"{'at most' if most else 'at least'} {bound:g}{unit}"
    if found is None:
        return Target(what, wanted, None, None, command)
    return Target(what, wanted, f"{found:.{digits}f}{unit}", found <= bound if most else found >= bound, command)


def _decode(result: BenchResult) -> list[Target]:
    lines = []
    found = {
        requests: _find(result, "decode", requests=requests, hidden=2048, **{"extra keys": 0, "forward ms": 0.0})
        for requests in (32, 256)
    }
    for requests, bound in ((32, 30.0), (256, 60.0)):
        case = found[requests]
        command = f"stagecache bench --only decode --requests {requests} --hidden 2048 --forward-ms 0"
        lines.append(
            _line(f"decode, {requests} requests: engine thread, less than the peer", command, bound, _of(case, "ratio"))
        )
        lines.append(
            _line(f"decode, {requests} requests: engine process' CPU, less", command, 10.0, _of(case, "cpu_ratio"))
        )
        lines.append(_daemon_under_saving(requests, command, case))
    growth = None
    few, many = found[32], found[256]
    if few is not None and many is not None:
        growth = many.ours.total.median / few.ours.total.median
    command = "stagecache bench --only decode --requests 32 --requests 256 --hidden 2048 --forward-ms 0"
    lines.append(_line("decode, 256 over 32 requests: our growth", command, 8.0, growth, most=True))
    return lines


def _daemon_under_saving(requests: int, command: str, case: CaseFigures | None) -> Target:
    what = f"decode, {requests} requests: daemon's CPU a step, of what the engine thread saves"
    if case is None or case.peer is None:
        return _line(what, command, 1.0, None, most=True)
    saved = (case.peer[1].total.median - case.ours.total.median) * 1e3
    spent = case.ours.per_unit(lambda block: block.daemon_cpu)
    return _line(what, command, 1.0, spent / saved if saved > 0 else float("inf"), most=True, digits=2)


def _copies(result: BenchResult) -> list[Target]:
    lines = []
    for kind in ("scatter", "gather"):
        shares = [copy.share(kind) for copy in result.copies]
        found = 100 * min(shares) if shares else None
        what = f"{kind} of 512 and 2048 rows, the copy itself, of one memmove's speed"
        lines.append(_line(what, "stagecache bench --only copies", 80.0, found, unit=" %", digits=0))
    return lines


def _hits(result: BenchResult) -> list[Target]:
    lines = []
    command = "stagecache bench --only hits --hit-tokens 2048 --at-once 1 --forward-ms {}"
    for forward, bound in ((5.0, 3.0), (0.0, 1.3)):
        case = _find(result, "hits", tokens=2048, hidden=2048, **{"at once": 1, "forward ms": forward})
        how = f"with a {forward:g} ms forward" if forward else "back to back"
        lines.append(
            _line(
                f"hit of 2048 tokens, {how}: faster than the peer",
                command.format(f"{forward:g}"),
                bound,
                _of(case, "ratio"),
            )
        )
        first = None
        if case is not None and case.ours.first is not None:
            first = case.ours.first.total / 1e3 / case.ours.total.median
        lines.append(
            _line(
                f"first hit of 2048 tokens over later ones, {how}",
                command.format(f"{forward:g}"),
                1.5,
                first,
                most=True,
            )
        )
    return lines


def _lookups(result: BenchResult) -> list[Target]:
    found = {run.way: median(run.per_second) for run in result.lookups}
    return [
        _line(
            f"lookups of {HASHES} hashes a second from one client, half of them stored, {way}",
            "stagecache bench --only lookups --no-peer",
            2000.0,
            found.get(way),
            unit="/s",
            digits=0,
        )
        for way in ("8 calls in flight", "16 a call")
    ]


def _rest(result: BenchResult) -> list[Target]:
    by_blocks = {
        case.parameters["blocks"]: case.ours.total.median for case in result.cases if case.workload == "blocks"
    }
    flat = max(by_blocks.values()) / by_blocks[min(by_blocks)] if len(by_blocks) > 1 else None
    p99 = {run.sessions: _p99(run.totals) for run in result.sessions}
    slower = p99[8] / p99[1] if {1, 8} <= set(p99) else None
    resident = result.daemon.get("resident_bytes")
    return [
        _line(
            "cost of a step, most over fewest blocks", "stagecache bench --only blocks", 1.5, flat, most=True, digits=2
        ),
        _line("p99 of a step, 8 sessions over 1", "stagecache bench --only sessions", 2.0, slower, most=True),
        _line(
            "daemon without pools, resident",
            "stagecache bench",
            80.0,
            None if resident is None else resident / (1 << 20),
            most=True,
            unit=" MiB",
            digits=0,
        ),
        _line("daemon's start", "stagecache bench", 1.0, result.daemon.get("start_s"), most=True, unit=" s", digits=2),
    ]


def _p99(totals: list[int]) -> float:
    ordered = sorted(totals)
    return ordered[min(len(ordered) - 1, round(0.99 * len(ordered)))]
