"""Presence counts of pools, and their maps: what costs a look at whole tables, so it is bounded in time.

A key is looked at again only when its session's log went on. A scrape spends ``budget_s`` at most on it and takes the
keys in turn, those looked at longest ago first; on a node whose pools are small every scrape sees them all.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np

from stagecache_wire import presence as words
from stagecached import keystore
from stagecached.keystore import KeyStore
from stagecached.metrics.fold import Presence, SessionFold
from stagecached.segments import SessionSegments
from stagecached.session import Session

BUDGET_S: Final = 0.008
MAX_CELLS: Final = 1024


@dataclass(slots=True)
class _Look:
    """One key's last look: at what point of the log, when, and what was seen."""

    consumed: int = -1
    at: float = -1.0
    counts: Presence | None = None


@dataclass(frozen=True, slots=True)
class PoolMap:
    """A pool's blocks, several to a cell where there are more than ``MAX_CELLS``.

    blocks_a_cell: at least 1. present, absent, pending: percent of a cell's slots. newest: sequence of the last record
    that wrote into the cell; 0 for none, and for cells of an older epoch.
    """

    num_blocks: int
    blocks_a_cell: int
    present: list[int]
    absent: list[int]
    pending: list[int]
    newest: list[int]


class Survey:
    """Looks at keys in turn. One thread at a time."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._looks: dict[tuple[str, int], _Look] = {}

    def look(self, pairs: Iterable[tuple[Session, SessionFold]], budget_s: float = BUDGET_S) -> None:
        """Fill in ``presence`` of every key of the folds. The sessions' segments must stay mapped meanwhile."""
        stores: list[tuple[_Look, KeyStore, SessionSegments]] = []
        seen: dict[tuple[str, int], _Look] = {}
        fills: list[tuple[Presence, _Look]] = []
        for session, fold in pairs:
            for key in fold.keys:
                name = (fold.session_id, key.key_id)
                seen[name] = look = self._looks.get(name) or _Look()
                fills.append((key.presence, look))
                store = session.segments.keys.get(key.key_id)
                if store is not None and look.consumed != fold.consumed:
                    stores.append((look, store, session.segments))
        self._looks = seen
        stores.sort(key=lambda item: item[0].at)
        deadline = self._clock() + budget_s
        for look, store, segments in stores:
            look.consumed = segments.consumed
            look.counts = count(store, segments)
            look.at = self._clock()
            if look.at >= deadline:
                break
        now = self._clock()
        for presence, look in fills:
            if look.counts is not None:
                presence.present, presence.absent = look.counts.present, look.counts.absent
                presence.pending, presence.unknown = look.counts.pending, look.counts.unknown
                presence.age_s = now - look.at


def count(store: KeyStore, segments: SessionSegments) -> Presence:
    """Slots of a key by presence, now."""
    return Presence(*keystore.count(segments.slot_words, store.claims, segments.epoch_sequence), 0.0)


def pool_map(store: KeyStore, segments: SessionSegments, max_cells: int = MAX_CELLS) -> PoolMap:
    """What is where in a key's pool, now. In pieces of whole cells, see ``keystore.count``."""
    geometry = segments.geometry
    blocks, size = geometry.num_blocks, geometry.block_size
    step = -(-blocks // max_cells)
    found = PoolMap(blocks, step, [], [], [], [])
    width = step * size * max(1, keystore.PIECE // (step * size))
    for start in range(0, blocks * size, width):
        slots, claims = segments.slot_words[start : start + width].copy(), store.claims[start : start + width].copy()
        _map_piece(found, slots, claims, segments.epoch_sequence, step * size)
    return found


def _map_piece(found: PoolMap, slots: keystore.Words, claims: keystore.Words, epoch: int, width: int) -> None:
    """Add the cells of some slots to a map. width: slots of a cell."""
    one, written = np.uint64(1), np.uint64(words.WRITTEN)
    in_epoch = slots > np.uint64(epoch << words.SLOT_SHIFT | words.LOST)
    held = in_epoch & (slots & one == 0)
    present = held & (claims == (slots << one | one))
    claimer = claims >> np.uint64(words.CLAIM_SHIFT)
    absent = held & (claimer < slots >> one)
    pending = held & ~absent & ~present & (claims & (written | np.uint64(words.FAILED)) == 0)
    newest = np.where(held, slots >> one, np.uint64(0))
    starts = np.arange(0, len(slots), width, dtype=np.int64)
    lengths = np.diff(np.append(starts, len(slots)))

    def percent(mask: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> list[int]:
        sums = np.add.reduceat(mask, starts, dtype=np.int64)
        # One slot of many is still seen: rounded up.
        return (-(-sums * 100 // lengths)).tolist()  # type: ignore[no-any-return]

    found.present.extend(percent(present))
    found.absent.extend(percent(absent))
    found.pending.extend(percent(pending))
    found.newest.extend(np.maximum.reduceat(newest, starts).tolist())
