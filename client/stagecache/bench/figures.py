"""From samples to figures: medians with their spread, ratios, and what is written as JSON."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

from stagecache.bench.contenders import NONE, OURS, peer_names
from stagecache.bench.measure import BlockSample, StepSample


@dataclass(frozen=True)
class Spread:
    """A median with the tenth and the ninetieth of a hundred, in microseconds."""

    median: float
    p10: float
    p90: float
    count: int

    @classmethod
    def of(cls, nanoseconds: Sequence[float]) -> Spread:
        ordered = sorted(value / 1e3 for value in nanoseconds)
        last = len(ordered) - 1
        return cls(median(ordered), ordered[round(0.1 * last)], ordered[round(0.9 * last)], len(ordered))

    def as_dict(self) -> dict[str, float]:
        return {"median_us": self.median, "p10_us": self.p10, "p90_us": self.p90, "count": self.count}


@dataclass
class ContenderFigures:
    """What one contender's samples say of one workload. per: see ``Workload.per``."""

    per: str
    blocks: list[BlockSample] = field(default_factory=list)
    first: StepSample | None = None

    def values(self, read: Callable[[StepSample], int]) -> list[float]:
        """One value a step or a block."""
        if self.per == "step":
            return [read(step) for block in self.blocks for step in block.steps]
        combine: Callable[[list[int]], float] = sum if self.per == "block" else fmean
        return [combine([read(step) for step in block.steps]) for block in self.blocks]

    @property
    def total(self) -> Spread:
        return Spread.of(self.values(lambda step: step.total))

    @property
    def phases(self) -> dict[str, float]:
        """Medians by phase, in microseconds."""
        return {
            "begin": Spread.of(self.values(lambda step: step.begin)).median,
            "save": Spread.of(self.values(lambda step: step.save)).median,
            "materialize": Spread.of(self.values(lambda step: step.materialize)).median,
        }

    @property
    def thread_cpu(self) -> Spread:
        return Spread.of(self.values(lambda step: step.thread_cpu))

    def per_unit(self, read: Callable[[BlockSample], int]) -> float:
        """Median over blocks of a figure of the whole block, by step unless the block is the unit."""
        return median(read(block) / (1 if self.per == "block" else len(block.steps)) for block in self.blocks)

    def as_dict(self) -> dict[str, Any]:
        return {
            "engine_thread": self.total.as_dict(),
            "phases_us": self.phases,
            "thread_cpu": self.thread_cpu.as_dict(),
            "engine_process_cpu_us": self.per_unit(lambda block: block.engine_cpu) / 1e3,
            "daemon_cpu_us": self.per_unit(lambda block: block.daemon_cpu) / 1e3,
            "faults": self.per_unit(lambda block: block.faults),
            "context_switches": self.per_unit(lambda block: block.switches),
            **({"first_us": self.first.total / 1e3} if self.first is not None else {}),
        }


@dataclass
class CaseFigures:
    """One workload with one set of parameters, for all contenders.

    attribution: microseconds a step of our parts, and bytes moved a block.
    """

    workload: str
    parameters: dict[str, Any]
    label: str
    per: str
    fewest_bytes: int
    by_name: dict[str, ContenderFigures]
    attribution: dict[str, float] = field(default_factory=dict)
    moved_bytes: dict[str, int] = field(default_factory=dict)

    @property
    def ours(self) -> ContenderFigures:
        return self.by_name[OURS]

    @property
    def none(self) -> ContenderFigures | None:
        return self.by_name.get(NONE)

    @property
    def peer(self) -> tuple[str, ContenderFigures] | None:
        """The faster one of the peer's two modes."""
        modes = [(name, self.by_name[name]) for name in peer_names() if name in self.by_name]
        return min(modes, key=lambda mode: mode[1].total.median, default=None)

    @property
    def ratio(self) -> float | None:
        """How many times our engine-thread time the peer takes."""
        peer = self.peer
        return None if peer is None else peer[1].total.median / self.ours.total.median

    @property
    def cpu_ratio(self) -> float | None:
        """How many times our engine process' CPU the peer's takes: the least of its two modes."""
        modes = [self.by_name[name] for name in peer_names() if name in self.by_name]
        if not modes:
            return None
        least = min(mode.per_unit(lambda block: block.engine_cpu) for mode in modes)
        return least / max(self.ours.per_unit(lambda block: block.engine_cpu), 1.0)

    def as_dict(self) -> dict[str, Any]:
        peer = self.peer
        return {
            "workload": self.workload,
            "parameters": self.parameters,
            "per": self.per,
            "contenders": {name: figures.as_dict() for name, figures in self.by_name.items()},
            "peer_counted": None if peer is None else peer[0],
            "ratio": self.ratio,
            "engine_process_cpu_ratio": self.cpu_ratio,
            "fewest_bytes": self.fewest_bytes,
            "moved_bytes": self.moved_bytes,
            "attribution_us": self.attribution,
        }
