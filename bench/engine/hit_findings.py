"""What the runs at several hit rates found: samples by engine and rate, figures made of them, and what must hold."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from bench.engine.hits import hit_tokens
from bench.engine.intervals import Interval, Rounds, differences, interval, judge

BARE, BARE_AGAIN, SHIM, SHIM_AGAIN = "no shim", "no shim, again", "shim", "shim, again"
OFF_BARE, OFF_SHIM = "caching off, no shim", "caching off, shim"
CACHING = (BARE, SHIM, BARE_AGAIN, SHIM_AGAIN)
"""Engines with prefix caching; of each kind two, which show how far equal engines are apart."""
ENGINES = (*CACHING, OFF_BARE, OFF_SHIM)
BARES, SHIMS = (BARE, BARE_AGAIN), (SHIM, SHIM_AGAIN)

MOST_ADDED = 0.01
"""Share of the engine process' CPU that the shim may add where nothing hits."""
MOST_LATER = 0.10
"""How much later the first token may come at the highest hit rate, of prefix caching without the shim."""

Sample = dict[str, Any]


@dataclass
class Findings:
    """Samples, a list a round of a list a turn.

    Attributes:
        rates: hit rates of the requests that come one after another, in percent, rising.
        prompt, output: tokens of each request; batch_output: output tokens of a batch's.
        block_size: tokens in a KV block. requests: in a batch.
        serve: by engine and rate, what ``worker.Driver.serve`` answered.
        batch: by engine and rate, what ``worker.Driver.batch`` answered.
    """

    rates: tuple[int, ...]
    prompt: int
    output: int
    block_size: int
    requests: int
    batch_output: int
    serve: dict[str, dict[int, list[list[Sample]]]] = field(default_factory=dict)
    batch: dict[str, dict[int, list[list[Sample]]]] = field(default_factory=dict)

    def begin_round(self) -> None:
        for engine in CACHING:
            for rate in self.rates:
                self.serve.setdefault(engine, {}).setdefault(rate, []).append([])
        for engine in ENGINES:
            for rate in (0, 50) if engine in CACHING else (0,):
                self.batch.setdefault(engine, {}).setdefault(rate, []).append([])

    # -------------------------------------------------------------- figures

    def served(self, engine: str, rate: int, read: str | Callable[[Sample], float]) -> Rounds:
        return _values(self.serve[engine][rate], read)

    def batched(self, engine: str, rate: int, read: str | Callable[[Sample], float]) -> Rounds:
        return _values(self.batch[engine][rate], read)

    def of_kind(self, engines: Iterable[str], rate: int, what: str) -> Interval:
        """Of both engines of a kind, one request after another."""
        return interval(_joined([self.served(engine, rate, what) for engine in engines]))

    def throughput(self, engines: Iterable[str], rate: int) -> Interval:
        """Tokens a second, prompt and output, of a batch."""
        return interval(_joined([self.batched(engine, rate, self._tokens_per_s) for engine in engines]))

    def _tokens_per_s(self, sample: Sample) -> float:
        return float(self.requests * (self.prompt + self.batch_output) / sample["wall_s"])

    def later(self, rate: int, what: str) -> Interval:
        """How much more ``what`` is with the shim than without, by turn, as a share."""
        pairs = [[self.served(engine, rate, what) for engine in kind] for kind in (SHIMS, BARES)]
        return interval(differences(*pairs))

    def again(self, kind: tuple[str, str], rate: int, what: str) -> Interval:
        """A/A: the same of the second engine of a kind over the first."""
        return interval(differences([self.served(kind[1], rate, what)], [self.served(kind[0], rate, what)]))

    def batch_difference(self, ours: tuple[str, ...], base: tuple[str, ...], rate: int, what: str) -> Interval:
        """The same of batches."""
        pairs = [[self.batched(engine, rate, what) for engine in kind] for kind in (ours, base)]
        return interval(differences(*pairs))

    def shim_share(self, rate: int) -> Interval:
        """What the shim measured of itself, its threads included, as a share of the CPU of the rest of a batch."""
        return interval(_joined([self.batched(engine, rate, _share) for engine in SHIMS]))

    def shim_step_ms(self, rate: int) -> tuple[Interval, Interval]:
        """The shim's CPU in ms on the engine's thread: a request's first step, and a decode step of it alone."""
        steps = self.output - 1

        def decode(sample: Sample) -> float:
            return 1e3 * float(sample["shim_cpu_s"] - sample["shim_first_cpu_s"]) / steps

        def first(sample: Sample) -> float:
            return 1e3 * float(sample["shim_first_cpu_s"])

        found = [interval(_joined([self.served(e, rate, read) for e in SHIMS])) for read in (first, decode)]
        return found[0], found[1]

    def figures(self) -> dict[str, Any]:
        """Medians and intervals, of times in seconds, by what, kind and rate in percent."""
        kinds = {"without": BARES, "with": SHIMS}
        every = {
            what: {name: {rate: self.of_kind(kind, rate, what) for rate in self.rates} for name, kind in kinds.items()}
            for what in ("ttft_s", "tpot_s", "first_cpu_s", "cpu_s")
        }
        later = {rate: self.later(rate, "ttft_s") for rate in self.rates}
        batches = {
            "off": {"without": self.throughput((OFF_BARE,), 0), "with": self.throughput((OFF_SHIM,), 0)},
            **{f"{rate} %": {name: self.throughput(kind, rate) for name, kind in kinds.items()} for rate in (0, 50)},
        }
        return {**every, "ttft_more": later, "tokens_per_s": batches, "shim_share": self.shim_share(0)}

    # ----------------------------------------------------------- must hold

    def checks(self) -> list[Check]:
        """Everything that must hold, in the order of the tables."""
        return [*self._exact(), self._rows(), self._first_token(), *self._added(), *self._with_hits()]

    def _exact(self) -> list[Check]:
        lines = []
        for rate in self.rates:
            every = _flat(self.serve[engine][rate] for engine in CACHING)
            hit = hit_tokens(self.prompt, rate, self.block_size)
            blocks = f"{hit // self.block_size} blocks of {self.block_size} hit"
            right = sum(sample["cached"] == hit for sample in every)
            lines.append(
                Check(
                    f"hit rate {rate} %: prompt tokens that the engine computed",
                    f"exactly {self.prompt - hit} of {self.prompt}: {blocks}",
                    f"{right} of {len(every)} requests",
                    right == len(every),
                )
            )
        right = total = 0
        for engine in ENGINES:
            for rate, found in self.batch[engine].items():
                cached = [count for sample in _flat([found]) for count in sample["cached"]]
                right += cached.count(hit_tokens(self.prompt, rate, self.block_size))
                total += len(cached)
        wanted = f"exactly {self.prompt}, and {self.prompt - hit_tokens(self.prompt, 50, self.block_size)} at 50 % hits"
        found_text = f"{right} of {total} requests"
        return [*lines, Check("batches: prompt tokens that the engine computed", wanted, found_text, right == total)]

    def _rows(self) -> Check:
        served = _flat(found for engine in SHIMS for found in self.serve[engine].values())
        batches = _flat(found for engine in (*SHIMS, OFF_SHIM) for found in self.batch[engine].values())
        complete = [s["complete"] for s in served] + [each for s in batches for each in s["complete"]]
        equal = [sample["equal"] for sample in served if sample["hit"]]
        right, same = (sum(value is True for value in values) for values in (complete, equal))
        return Check(
            "rows of every step at the consumer",
            "each position once; rows of hits are those first computed, bit for bit",
            f"complete {right} of {len(complete)} requests, equal {same} of {len(equal)}",
            right == len(complete) and same == len(equal),
        )

    def _first_token(self) -> Check:
        low, high = (self.of_kind(SHIMS, rate, "ttft_s") for rate in (self.rates[-1], self.rates[0]))
        return Check(
            f"time to the first token, shim on: {self.rates[-1]} % below {self.rates[0]} %",
            "intervals apart",
            f"{milliseconds(low)} and {milliseconds(high)} ms",
            low.below(high),
        )

    def _added(self) -> list[Check]:
        share = self.shim_share(0)
        compared = self.batch_difference(SHIMS, BARES, 0, "cpu_s")
        pairs = [self.batch_difference((kind[1],), (kind[0],), 0, "cpu_s") for kind in (BARES, SHIMS)]
        wanted = f"at most {100 * MOST_ADDED:g} % of the engine process' CPU"
        return [
            Check(
                "no hits: the shim's own CPU, measured in place, its threads included",
                wanted,
                percent(share),
                share.middle <= MOST_ADDED,
            ),
            Check(
                "no hits: batches with the shim over those without, CPU",
                wanted,
                f"{percent(compared)}; A/A {percent(pairs[0])} without, {percent(pairs[1])} with",
                judge(compared, pairs, MOST_ADDED),
            ),
        ]

    def _with_hits(self) -> list[Check]:
        """The time, which is what is wanted, and the CPU, which others on the machine lengthen less."""
        rate, lines = self.rates[-1], []
        for what, read in (("time", "ttft_s"), ("engine process' CPU", "first_cpu_s")):
            pairs = [self.again(kind, rate, read) for kind in (BARES, SHIMS)]
            later = self.later(rate, read)
            lines.append(
                Check(
                    f"{rate} % hits: {what} to the first token with the shim over that without",
                    f"at most {100 * MOST_LATER:g} % more",
                    f"{percent(later)}; A/A {percent(pairs[0])} without, {percent(pairs[1])} with",
                    judge(later, pairs, MOST_LATER),
                )
            )
        return lines


@dataclass(frozen=True)
class Check:
    """One line of what must hold. held: None where this run allows no verdict."""

    what: str
    wanted: str
    found: str
    held: bool | None

    @property
    def verdict(self) -> str:
        return {True: "holds", False: "DOES NOT HOLD", None: "no verdict"}[self.held]


def percent(share: Interval) -> str:
    """``+1.2 % (-0.3 to +2.0)``; of too few values for an interval, without one."""
    spread = f" ({100 * share.low:+.1f} to {100 * share.high:+.1f})" if share.enough else ""
    return f"{100 * share.middle:+.2f} %{spread}"


def milliseconds(seconds: Interval) -> str:
    """Seconds as ``12.3 (12.1 to 12.9)``, in ms."""
    spread = f" ({1e3 * seconds.low:.1f} to {1e3 * seconds.high:.1f})" if seconds.enough else ""
    return f"{1e3 * seconds.middle:.1f}{spread}"


def _share(sample: Sample) -> float:
    own = float(sample["shim_cpu_s"] + sample["shim_threads_s"])
    return own / (float(sample["cpu_s"]) - own)


def _flat(found: Iterable[list[list[Sample]]]) -> list[Sample]:
    return [sample for rounds in found for turns in rounds for sample in turns]


def _values(rounds: list[list[Sample]], read: str | Callable[[Sample], float]) -> Rounds:
    return [[float(sample[read] if isinstance(read, str) else read(sample)) for sample in turns] for turns in rounds]


def _joined(engines: list[Rounds]) -> Rounds:
    """The values of several engines, round by round."""
    return [[value for engine in engines for value in engine[at]] for at in range(len(engines[0]))]
