"""One workload, all modes interleaved: request by request, each mode in turn, in an order that rotates."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from bench.diffusion.modes import DENSE, Mode
from bench.diffusion.workloads import MEASURED, WARM_UPS, Workload
from stagecache.diffusion.counts import DiffusionCounts


class UnequalOutputError(AssertionError):
    """A mode's output differs from dense's: its times mean nothing."""


@dataclass
class Figures:
    """Of one mode in one workload, the warm-ups left out. wall_s, cpu_s: a request each; cpu is the worker's thread.

    own_cpu_s: of it, prefix caching's own. A request: tokens computed, rows that this took with the padding of the
    model's tiles, hit_blocks.
    """

    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    own_cpu_s: list[float] = field(default_factory=list)
    tokens: float = 0.0
    rows: float = 0.0
    hit_blocks: float = 0.0


@dataclass(frozen=True)
class Spread:
    """Median and quartiles."""

    median: float
    low: float
    high: float
    count: int = 1

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        low, _, high = statistics.quantiles(values, n=4)
        return Spread(statistics.median(values), low, high, len(values))

    @property
    def error(self) -> float:
        """Standard error of the median, from the quartiles, as if values were normal."""
        return 1.2533 * (self.high - self.low) / 1.349 / self.count**0.5

    def text(self, digits: int = 1) -> str:
        return f"{self.median:.{digits}f} ({self.low:.{digits}f}-{self.high:.{digits}f})"


def run(workload: Workload, modes: Sequence[Mode], rounds: int) -> dict[str, Figures]:
    """Figures by mode. Outputs of all modes are compared, as float32, request by request.

    Raises:
        UnequalOutputError: they differ in a bit.
    """
    figures = {mode.name: Figures() for mode in modes}
    before: dict[str, DiffusionCounts] = {}
    counts = {mode.name: [0, 0, 0] for mode in modes}
    for turn in range(rounds):
        for index, request in enumerate(workload.requests(turn)):
            outputs: dict[str, torch.Tensor] = {}
            shift = (turn + index) % len(modes)
            for mode in (*modes[shift:], *modes[:shift]):
                before[mode.name], rows = mode.stage.counts.copy(), mode.model.transformer.computed_rows
                own = mode.own_cpu_s
                gc.collect()
                wall, cpu = time.perf_counter(), time.thread_time()
                image = mode.stage.generate(f"{workload.name} {turn}.{index}", request)
                cpu, wall = time.thread_time() - cpu, time.perf_counter() - wall
                outputs[mode.name] = image.latents
                if index >= WARM_UPS:
                    figures[mode.name].wall_s.append(wall)
                    figures[mode.name].cpu_s.append(cpu)
                    figures[mode.name].own_cpu_s.append(mode.own_cpu_s - own)
                    done = mode.stage.counts.since(before[mode.name])
                    counts[mode.name][0] += done.computed_tokens
                    counts[mode.name][1] += mode.model.transformer.computed_rows - rows
                    counts[mode.name][2] += done.hit_blocks
                if mode.node is not None:
                    mode.node.wait(30.0)  # Requests come at leisure: what one left to the node is there for the next.
            for name, latents in outputs.items():
                if not torch.equal(latents, outputs[DENSE]):
                    largest = float((latents - outputs[DENSE]).abs().max())
                    raise UnequalOutputError(f"{workload.name}, request {index}: {name} differs by {largest:g}")
    for name, (tokens, rows, hits) in counts.items():
        figures[name].tokens = tokens / (rounds * MEASURED)
        figures[name].rows = rows / (rounds * MEASURED)
        figures[name].hit_blocks = hits / (rounds * MEASURED)
    return figures


def ratio(figures: Figures, base: Figures, *, cpu: bool = False) -> Spread:
    """Time of each request by that of the same request in another mode."""
    ours, theirs = (figures.cpu_s, base.cpu_s) if cpu else (figures.wall_s, base.wall_s)
    return Spread.of([a / b for a, b in zip(ours, theirs, strict=True)])
