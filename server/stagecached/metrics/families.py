"""A snapshot as Prometheus families: the one place that knows which figure is which sample.

``StagecacheCollector`` gives them to a registry of prometheus_client; ``stagecached.metrics.text`` writes them faster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, TypeAlias

from stagecached.metrics.catalog import CALL_BOUNDS_S, METRICS, Metric
from stagecached.metrics.fold import SessionFold
from stagecached.metrics.histogram import Histogram
from stagecached.metrics.sheet import KEY_LINES, SESSION_LINES, slices
from stagecached.metrics.totals import Totals, Values

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric as ClientMetric

Sample: TypeAlias = tuple[str, tuple[str, ...], float]
"""(suffix, label values in the metric's order and ``le`` of a bucket, value)"""

CALL_BOUND_NAMES: Final = (*(f"{bound:g}" for bound in CALL_BOUNDS_S), "+Inf")
_SESSION_SLICES: Final = slices(SESSION_LINES)
_KEY_SLICES: Final = slices(KEY_LINES)


@dataclass
class Snapshot:
    """All figures of one moment. plain: samples of the families that belong to no session."""

    plain: dict[str, list[Sample]] = field(default_factory=dict)
    sessions: list[SessionFold] = field(default_factory=list)
    totals: Totals = field(default_factory=Totals)

    def gauge(self, name: str, value: float, *labels: str) -> None:
        """Add a sample that is one value."""
        self.plain.setdefault(name, []).append(("", labels, value))

    def histogram(self, name: str, observed: Histogram, *labels: str) -> None:
        """Add the samples of a histogram with ``CALL_BOUNDS_S``."""
        samples = self.plain.setdefault(name, [])
        buckets = observed.cumulative()
        for bound, count in zip(CALL_BOUND_NAMES, buckets, strict=True):
            samples.append(("_bucket", (*labels, bound), count))
        samples.append(("_sum", labels, observed.sum_s))
        samples.append(("_count", labels, buckets[-1]))


def families(snapshot: Snapshot) -> Iterator[tuple[Metric, list[Sample]]]:
    """Every family that has samples, in the order of the catalog."""
    sessions, keys = _values(snapshot)
    for name, metric in METRICS.items():
        samples = snapshot.plain.get(name)
        if samples is None:
            samples = []
            if name == "stagecache_session_info":
                samples = [_info(fold) for fold in snapshot.sessions]
            elif name in _SESSION_SLICES:
                part = _SESSION_SLICES[name]
                lines = SESSION_LINES[part]
                for named, values, live in sessions:
                    if live or lines[0].total:
                        samples += [
                            (line.suffix, named + line.labels, value)
                            for line, value in zip(lines, values[part], strict=True)
                        ]
            elif name in _KEY_SLICES:
                part = _KEY_SLICES[name]
                key_lines = KEY_LINES[part]
                for named, values, live in keys:
                    if live or key_lines[0].total:
                        samples += [
                            (line.suffix, named + line.labels, value)
                            for line, value in zip(key_lines, values[part], strict=True)
                        ]
        if samples:
            yield metric, samples


Named: TypeAlias = tuple[tuple[str, ...], Values, bool]
"""(label values, values of all lines, whether its session lives)"""


def _values(snapshot: Snapshot) -> tuple[list[Named], list[Named]]:
    """Values of sessions and of keys: of those that live, then what is left of those that ended."""
    totals = snapshot.totals
    sessions: list[Named] = []
    keys: list[Named] = []
    live: set[tuple[str, str]] = set()
    for fold in snapshot.sessions:
        name = (fold.stage, fold.replica)
        live.add(name)
        sessions.append((name, totals.session(fold), True))
        mine = totals.of_keys(fold)
        keys += [((*name, key), values, True) for key, values in mine.items()]
        keys += [((*name, key), left, False) for key, left in totals.keys.get(name, {}).items() if key not in mine]
    for name, left in totals.sessions.items():
        if name not in live:
            sessions.append((name, left, False))
            keys += [((*name, key), values, False) for key, values in totals.keys.get(name, {}).items()]
    return sessions, keys


def _info(fold: SessionFold) -> Sample:
    return "", (fold.stage, fold.replica, fold.model, str(fold.rank), fold.session_id), 1


class StagecacheCollector:
    """For a registry of prometheus_client."""

    def __init__(self, take: Callable[[], Snapshot]) -> None:
        """take() makes the snapshot that a scrape shows."""
        self._take = take

    def collect(self) -> Iterator[ClientMetric]:
        from prometheus_client.metrics_core import Metric as ClientMetric

        for metric, samples in families(self._take()):
            family = ClientMetric(metric.name.removesuffix("_total"), metric.help, metric.kind)
            names = metric.labels
            for suffix, labels, value in samples:
                pairs = dict(zip((*names, "le"), labels, strict=False))
                family.add_sample(metric.name + suffix, pairs, value)
            yield family
