"""Figures of processes and of /dev/shm over time, and whether they are flat."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from stagecache_wire.names import RunPaths
from stagecache_wire.shm import PREFIX, SHM_DIRECTORY
from tests.soak.flat import Trend, trend

MIB = 1 << 20

_STATUS = {"VmRSS": "resident", "RssAnon": "anonymous", "RssShmem": "shared", "Threads": "threads"}


@dataclass(frozen=True)
class Allowance:
    """How much a figure may grow and still be flat: ``absolute`` in its unit, and a part of its level."""

    absolute: float
    relative: float = 0.0


ALLOWED: dict[str, Allowance] = {
    "resident": Allowance(2 * MIB, 0.02),
    "anonymous": Allowance(1 * MIB, 0.02),
    "shared": Allowance(1 * MIB, 0.05),
    "descriptors": Allowance(3),
    "threads": Allowance(3),
    "mappings": Allowance(3, 0.05),
    "shm bytes": Allowance(1 * MIB, 0.05),
    "shm files": Allowance(3, 0.05),
    "manifests": Allowance(2),
    "run directory bytes": Allowance(16384, 0.02),
}
"""For a long run. Short ones, where a warm-up is not over after seconds, multiply them."""


def process_figures(pid: int) -> dict[str, float]:
    """Figures of a process, bytes and counts; empty where it is gone."""
    proc = Path(f"/proc/{pid}")
    try:
        found: dict[str, float] = {}
        for line in (proc / "status").read_text().splitlines():
            name, _, value = line.partition(":")
            if name in _STATUS:
                number = int(value.split()[0])
                found[_STATUS[name]] = number if name == "Threads" else number * 1024
        found["descriptors"] = sum(1 for _ in (proc / "fd").iterdir())
        found["mappings"] = sum(f"{PREFIX}." in line for line in (proc / "maps").read_text().splitlines())
        return found if "resident" in found else {}
    except (FileNotFoundError, ProcessLookupError):
        return {}


def node_figures(paths: RunPaths) -> dict[str, float]:
    """What a daemon and its sessions hold in /dev/shm, and in the run directory."""
    files = size = 0
    for path in SHM_DIRECTORY.glob(f"*{PREFIX}.{paths.node}.*"):
        try:
            size += path.stat().st_blocks * 512
            files += 1
        except FileNotFoundError:
            continue
    kept = 0
    for path in _files(paths.directory):
        try:
            kept += path.stat().st_size
        except FileNotFoundError:
            continue
    manifests = sum(1 for _ in paths.sessions.iterdir())
    return {"shm bytes": size, "shm files": files, "manifests": manifests, "run directory bytes": kept}


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.iterdir() if path.is_file())


@dataclass
class Series:
    """One figure of one life."""

    times: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)


class Samples:
    """Every figure of everybody, by (who, figure). ``who`` names one life of a process."""

    def __init__(self) -> None:
        self.series: defaultdict[tuple[str, str], Series] = defaultdict(Series)

    def note(self, who: str, figures: dict[str, float], at: float | None = None) -> None:
        now = time.monotonic() if at is None else at
        for name, value in figures.items():
            series = self.series[who, name]
            series.times.append(now)
            series.values.append(value)

    def trends(self, who: str) -> dict[str, Trend]:
        """Trends of all figures of one life."""
        return {name: trend(s.times, s.values) for (of, name), s in self.series.items() if of == who}

    def growing(self, who: str, slack: float = 1.0) -> dict[str, Trend]:
        """Figures that are not flat. slack: factor on every allowance."""
        return {
            name: found
            for name, found in self.trends(who).items()
            if not found.is_flat(ALLOWED[name].absolute * slack, ALLOWED[name].relative * slack)
        }


def told(name: str, found: Trend) -> str:
    """``anonymous 41.2 MiB +0.1 MiB in 1350 s``."""
    if ALLOWED[name].absolute >= 16384:
        return f"{name} {found.level / MIB:.2f} MiB {found.growth / MIB:+.3f} MiB in {found.window_s:.0f} s"
    return f"{name} {found.level:.0f} {found.growth:+.1f} in {found.window_s:.0f} s"
