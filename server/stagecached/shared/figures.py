"""Figures of all namespaces together, for metrics: totals never fall, also where a namespace is dropped."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from stagecached.shared.space import Space
from stagecached.shared.store import StoreFigures


class IndexTotals:
    """``metrics.monitor.IndexFigures`` of the shared blocks. On the event loop."""

    def __init__(self, spaces: Callable[[], list[Space]], limit_bytes: int) -> None:
        self._spaces = spaces
        self._limit_bytes = limit_bytes
        self._dropped: Counter[str] = Counter()

    def dropping(self, space: Space) -> None:
        """A namespace is about to go: its totals are kept, its blocks count as evicted by request."""
        self._dropped.update(_totals(space.store.figures))
        self._dropped["evictions request"] += space.store.geometry.num_blocks - space.store.counts()["free"]

    def blocks(self) -> dict[str, int]:
        total: Counter[str] = Counter()
        for space in self._spaces():
            total.update(space.store.counts())
        return dict(total)

    def evictions(self) -> dict[str, int]:
        return self._labelled("evictions")

    def lookups(self) -> dict[str, int]:
        return self._labelled("lookups")

    def publishes(self) -> dict[str, int]:
        return self._labelled("publishes")

    def fills(self) -> int:
        return self._all()["fills"]

    def leases(self) -> int:
        return sum(len(space.leases) for space in self._spaces())

    def bytes(self) -> dict[str, int]:
        return {"used": sum(space.total_bytes for space in self._spaces()), "limit": self._limit_bytes}

    def _all(self) -> Counter[str]:
        total = Counter(self._dropped)
        for space in self._spaces():
            total.update(_totals(space.store.figures))
        return total

    def _labelled(self, name: str) -> dict[str, int]:
        start = name + " "
        return {key.removeprefix(start): count for key, count in self._all().items() if key.startswith(start)}


def _totals(figures: StoreFigures) -> dict[str, int]:
    return {
        "lookups hit": figures.hit_hashes,
        "lookups miss": figures.lookup_hashes - figures.hit_hashes,
        "publishes stored": figures.published,
        "publishes known": figures.known,
        "publishes skipped": sum(list(figures.skipped.values())),
        "fills": figures.filled,
        **{f"evictions {cause}": count for cause, count in figures.evictions.items()},
    }
