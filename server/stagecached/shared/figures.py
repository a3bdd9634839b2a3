"""Figures of shared blocks for metrics: of all namespaces together, where totals never fall, also where a namespace is
dropped, and of each one that is there now (``--shared-namespaces`` at most).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, TypeAlias

from stagecached.metrics.catalog import (
    EVICTIONS,
    INDEX_BYTES,
    INDEX_STATES,
    LOOKUPS,
    NAMESPACE_EVENTS,
    PREFIXES,
    PUBLISHES,
    RECOVERED,
)
from stagecached.shared.space import Space
from stagecached.shared.store import PublishOutcome, StoreFigures

Sample: TypeAlias = tuple[str, tuple[str, ...], float]
"""(metric, label values in the catalog's order, value)"""

SHORT_ID: Final = 12
"""Hex digits that name a namespace in a label; logs and `stagecache index` begin with the same."""

_NOT_KEPT: Final = (PublishOutcome.CHANGED, PublishOutcome.NOT_JOINED)


class IndexTotals:
    """``metrics.monitor.IndexFigures`` of the shared blocks. On the event loop, but for ``note``."""

    def __init__(self, spaces: Callable[[], list[Space]], limit_bytes: int) -> None:
        self._spaces = spaces
        self._limit_bytes = limit_bytes
        self._past: Counter[str] = Counter()
        """Of namespaces that were dropped, and what happened outside of every one."""

    def note(self, event: str, kept: int = 0, dropped: int = 0) -> None:
        """A namespace was made, recovered, ... (``catalog.NAMESPACE_EVENTS``); blocks that a recovery kept, and not."""
        self._past.update({f"event {event}": 1, "recovered kept": kept, "recovered dropped": dropped})

    def not_joined(self, blocks: int) -> None:
        """Blocks that a session which is in no namespace wanted to have kept."""
        self._past["publishes not_kept"] += blocks

    def dropping(self, space: Space) -> None:
        """A namespace is about to go: its totals are kept, its blocks count as evicted by request."""
        self._past.update(_totals(space.store.figures))
        self._past["evictions request"] += space.store.geometry.num_blocks - space.store.counts()["free"]
        self.note("dropped")

    def samples(self) -> Iterator[Sample]:
        """Every sample of ``catalog.INDEX_METRICS``, as of now."""
        spaces, now_s = self._spaces(), time.time()
        total, blocks = Counter(self._past), Counter[str]()
        leases = used = 0
        for space in spaces:
            totals, counts, held = _totals(space.store.figures), space.store.counts(), len(space.leases)
            total.update(totals)
            blocks.update(counts)
            leases, used = leases + held, used + space.total_bytes
            yield from _of_one(space, totals, counts, held, now_s)
        yield "stagecache_index_namespaces", (), len(spaces)
        yield "stagecache_index_leases", (), leases
        yield "stagecache_index_filled_blocks_total", (), total["filled"]
        yield from _each("stagecache_index_bytes", INDEX_BYTES, "", {"used": used, "limit": self._limit_bytes})
        yield from _each("stagecache_index_blocks", INDEX_STATES, "", blocks)
        for name, values, start in (
            ("stagecache_index_namespace_events_total", NAMESPACE_EVENTS, "event "),
            ("stagecache_index_recovered_blocks_total", RECOVERED, "recovered "),
            ("stagecache_index_evictions_total", EVICTIONS, "evictions "),
            ("stagecache_index_lookup_hashes_total", LOOKUPS, "hashes "),
            ("stagecache_index_prefixes_total", PREFIXES, "prefixes "),
            ("stagecache_index_published_blocks_total", PUBLISHES, "publishes "),
        ):
            yield from _each(name, values, start, total)

    def state(self) -> dict[str, Any]:
        """What status page and `top` show: bytes, and every namespace that is there."""
        spaces, now_s = self._spaces(), time.time()
        return {
            "limit_bytes": self._limit_bytes,
            "used_bytes": sum(space.total_bytes for space in spaces),
            "namespaces": [_state_of(space, now_s) for space in spaces],
        }


def _state_of(space: Space, now_s: float) -> dict[str, Any]:
    figures = space.store.figures
    return {
        "id": space.namespace_id[:SHORT_ID],
        "stage": space.manifest.stage,
        "sessions": len(space.members),
        "leases": len(space.leases),
        "bytes": space.total_bytes,
        "blocks": space.store.geometry.num_blocks,
        **space.store.counts(),
        "asked": figures.lookup_hashes,
        "hit_ratio": figures.hit_hashes / figures.lookup_hashes if figures.lookup_hashes else None,
        "stored": figures.published,
        "filled": figures.filled,
        "evicted": sum(figures.evictions.values()),
        "oldest_s": _oldest_s(space, now_s),
    }


def _oldest_s(space: Space, now_s: float) -> float:
    oldest_ns = space.store.oldest_ns()
    return max(now_s - oldest_ns / 1e9, 0.0) if oldest_ns else 0.0


def _each(name: str, values: tuple[str, ...], start: str, found: Mapping[str, int], *named: str) -> Iterator[Sample]:
    """A sample for each value of the last label; start: how the keys of ``found`` begin."""
    for value in values:
        yield name, (*named, value), found.get(start + value, 0)


def _of_one(
    space: Space, totals: Mapping[str, int], counts: Mapping[str, int], leases: int, now_s: float
) -> Iterator[Sample]:
    """Samples of one namespace."""
    named = (space.manifest.stage, space.namespace_id[:SHORT_ID])
    yield "stagecache_namespace_members", named, len(space.members)
    yield "stagecache_namespace_leases", named, leases
    yield "stagecache_namespace_bytes", named, space.total_bytes
    yield "stagecache_namespace_locked", named, int(space.store.segment.locked)
    yield "stagecache_namespace_oldest_seconds", named, _oldest_s(space, now_s)
    yield from _each("stagecache_namespace_blocks", INDEX_STATES, "", counts, *named)
    yield from _each("stagecache_namespace_lookup_hashes_total", LOOKUPS, "hashes ", totals, *named)
    yield "stagecache_namespace_stored_blocks_total", named, totals["publishes stored"]
    yield "stagecache_namespace_filled_blocks_total", named, totals["filled"]
    yield "stagecache_namespace_evictions_total", named, sum(totals[f"evictions {cause}"] for cause in EVICTIONS)


def _totals(figures: StoreFigures) -> dict[str, int]:
    skipped = dict(figures.skipped)
    return {
        "hashes hit": figures.hit_hashes,
        "hashes miss": figures.lookup_hashes - figures.hit_hashes,
        **{f"prefixes {result}": figures.prefixes.get(result, 0) for result in PREFIXES},
        "publishes stored": figures.published,
        "publishes known": figures.known,
        "publishes not_present": skipped.get(PublishOutcome.NOT_PRESENT, 0),
        "publishes no_room": skipped.get(PublishOutcome.NO_ROOM, 0),
        "publishes not_kept": sum(skipped.get(outcome, 0) for outcome in _NOT_KEPT),
        "filled": figures.filled,
        **{f"evictions {cause}": count for cause, count in figures.evictions.items()},
    }
