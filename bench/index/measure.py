"""How the index's benches measure: interleaved rounds, CPU time of the one thread, medians with quartiles."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from stagecached.lasting import use_huge_pages

Run = Callable[[], float]
"""Does the work once and answers the seconds of its timed part."""


def timed(work: Callable[[], object]) -> float:
    """CPU seconds that this thread spends in `work`: the time that other processes take does not count."""
    start = time.thread_time()
    work()
    return time.thread_time() - start


@contextmanager
def collector_off() -> Iterator[None]:
    """What exists is frozen and on huge pages, as in a daemon after making its pools (``stagecached.lasting``); nothing
    is collected while the clock runs.
    """
    gc.collect()
    gc.freeze()
    use_huge_pages()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


@dataclass(frozen=True)
class Spread:
    """Median and quartiles of one quantity over the rounds."""

    median: float
    low: float
    high: float

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        low, _, high = statistics.quantiles(values, n=4)
        return Spread(statistics.median(values), low, high)

    def text(self, digits: int) -> str:
        return f"{self.median:,.{digits}f} ({self.low:,.{digits}f}-{self.high:,.{digits}f})"


@dataclass(frozen=True)
class Comparison:
    """One case on both sides. Times are of the whole case, in µs; the ratio is vLLM's time by ours."""

    name: str
    items: int
    ours_us: Spread
    peer_us: Spread
    ratio: Spread
    at_least: float | None

    @property
    def met(self) -> bool:
        return self.at_least is None or self.ratio.median >= self.at_least


@dataclass(frozen=True)
class Scaling:
    """One operation at several pool sizes, in ns a block; growth is the largest pool's cost by the smallest one's."""

    name: str
    ns_per_block: dict[int, Spread]
    growth: Spread
    at_most: float | None

    @property
    def met(self) -> bool:
        return self.at_most is None or self.growth.median <= self.at_most


@dataclass
class Case:
    """Both sides do the same work on `items` blocks or requests. at_least: the ratio that we promise."""

    name: str
    items: int
    ours: Run
    peer: Run
    at_least: float | None = None
    times: dict[str, list[float]] = field(default_factory=lambda: {"ours": [], "peer": []})

    def play(self, peer_first: bool) -> None:
        """Runs both sides once, in the order asked for."""
        for side in sorted(self.times, reverse=peer_first):
            self.times[side].append({"ours": self.ours, "peer": self.peer}[side]())

    def forget(self) -> None:
        """Drops what was measured so far (warm-up)."""
        for values in self.times.values():
            values.clear()

    def result(self) -> Comparison:
        """The ratio is taken round by round, since both sides of a round met the same machine."""
        ours, peer = self.times["ours"], self.times["peer"]
        return Comparison(
            self.name,
            self.items,
            Spread.of([1e6 * seconds for seconds in ours]),
            Spread.of([1e6 * seconds for seconds in peer]),
            Spread.of([b / a for a, b in zip(ours, peer, strict=True)]),
            self.at_least,
        )


def compare(cases: Sequence[Case], rounds: int) -> list[Comparison]:
    """Every case in every round, the side that begins alternating; one round of warm-up before."""
    with collector_off():
        for number in range(rounds + 1):
            for case in cases:
                case.play(peer_first=number % 2 == 1)
                if number == 0:
                    case.forget()
    return [case.result() for case in cases]
