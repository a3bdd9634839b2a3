"""What an operation costs as the pool grows.

Every pool is in steady state: each block holds content that may be hit. Between two runs on one pool all the others
run, so the processor's caches are cold for each.

Evicting and caching must delete one entry of the hash map and set another for every block, at random places of a
table that outgrows the processor's caches; the last rows show what just that costs in a plain dict of that size.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from measure import Scaling, Spread, collector_off, timed
from sides import cache, digests, find, make_pools

SIZES = (1_000, 10_000, 100_000, 1_000_000)
LOT = 256
"""Blocks that each operation works on."""

MAX_GROWTH = 1.5


class SizedPool:
    """One side's pool, full of content."""

    def __init__(self, pool: Any, num_blocks: int) -> None:
        self.pool = pool
        self.prefix: list[bytes] = []
        for _ in range(-(-num_blocks // LOT)):
            self._move_in()

    def _move_in(self) -> None:
        """New content takes the place of the oldest."""
        self.prefix = digests(LOT)
        blocks = self.pool.get_new_blocks(LOT)
        cache(self.pool, blocks, self.prefix)
        self.pool.free_blocks(reversed(blocks))

    def allocate_and_free(self) -> float:
        """Blocks without content, as a request that never fills one leaves them behind."""
        self.pool.free_blocks(reversed(self.pool.get_new_blocks(LOT)))
        seconds = timed(lambda: self.pool.free_blocks(reversed(self.pool.get_new_blocks(LOT))))
        self._move_in()
        return seconds

    def look_up(self) -> float:
        return timed(lambda: find(self.pool, self.prefix))

    def hit(self) -> float:
        """Out of the middle of the queue, and back to its end."""
        blocks = find(self.pool, self.prefix)

        def work() -> None:
            self.pool.touch(blocks)
            self.pool.free_blocks(reversed(blocks))

        return timed(work)

    def evict(self) -> float:
        hashes = digests(LOT)

        def work() -> None:
            blocks = self.pool.get_new_blocks(LOT)
            cache(self.pool, blocks, hashes)
            self.pool.free_blocks(reversed(blocks))

        self.prefix = hashes
        return timed(work)


class SizedDict:
    """The control: a dict with as many entries as a pool has blocks."""

    def __init__(self, num_entries: int) -> None:
        self._keys = deque(digests(num_entries))
        self._entries = dict.fromkeys(self._keys)

    def replace(self) -> float:
        """The oldest entries out, new ones in."""
        entries = self._entries
        old, new = [self._keys.popleft() for _ in range(LOT)], digests(LOT)
        self._keys.extend(new)

        def work() -> None:
            for key in old:
                del entries[key]
            for key in new:
                entries.setdefault(key, None)

        return timed(work)


OPERATIONS: dict[str, tuple[Callable[[SizedPool], float], bool]] = {
    "allocate + free": (SizedPool.allocate_and_free, True),
    "look up a prefix": (SizedPool.look_up, True),
    "hit: touch + free": (SizedPool.hit, True),
    "allocate (evict) + cache + free": (SizedPool.evict, False),
}
"""By name: what is done, and whether its growth is promised."""


def scale(sizes: Sequence[int], rounds: int) -> list[Scaling]:
    """Every operation, on both sides, in pools of every size."""
    runs: dict[tuple[str, int], Callable[[], float]] = {}
    pools = {size: [SizedPool(pool, size) for pool in make_pools(size)] for size in sizes}
    for name, (operation, _) in OPERATIONS.items():
        for size in sizes:
            for side, pool in zip(("ours", "vLLM"), pools[size], strict=True):
                runs[f"{name}, {side}", size] = lambda operation=operation, pool=pool: operation(pool)  # type: ignore[misc]
    for size in sizes:
        runs["control: delete + set in a dict", size] = SizedDict(size).replace

    times: dict[tuple[str, int], list[float]] = {key: [] for key in runs}
    with collector_off():
        for number in range(rounds):
            for key in list(runs) if number % 2 else reversed(runs):
                times[key].append(runs[key]() / LOT * 1e9)

    promised = {f"{name}, ours" for name, (_, promise) in OPERATIONS.items() if promise}
    results = []
    for name in dict.fromkeys(name for name, _ in runs):
        small, large = times[name, min(sizes)], times[name, max(sizes)]
        results.append(
            Scaling(
                name,
                {size: Spread.of(times[name, size]) for size in sizes},
                Spread.of([b / a for a, b in zip(small, large, strict=True)]),
                MAX_GROWTH if name in promised else None,
            )
        )
    return results
