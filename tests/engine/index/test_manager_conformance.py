"""The block manager does what vLLM 0.30.0's KVCacheManager does, call by call; and the test would notice."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable

import pytest

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
pytest.importorskip("vllm")

from hypothesis import HealthCheck, Phase, given, settings

from stagecached.index import BlockHashMap, BlockIndexError, BlockManager, BlockPool, FreeBlockQueue
from stagecached.index.blocks import Block
from tests.engine.index.conformance import Divergence, Scenario, conform, scenarios

pytestmark = pytest.mark.engine

_COMMON = settings(
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture],
)


# How often the sequences of the test meet each situation, at least: a test that meets none of them proves nothing.
LEAST = {
    "hit of a free block": 1000,
    "hit of a held block": 1000,
    "hit with duplicates": 100,
    "prompt cached to its end": 100,
    "chunk of a prefill": 1000,
    "refused": 1000,
    "preempted": 1000,
    "evicted": 1000,
    "external tokens": 100,
    "cached later": 20,
    "reset done": 100,
    "reset refused": 100,
}


@pytest.mark.timeout(600)  # 30 s on an idle core
def test_same_ids_hits_and_free_order_as_vllm_at_every_step() -> None:
    seen: Counter[str] = Counter()

    @settings(_COMMON, max_examples=2000, derandomize=True)
    @given(scenario=scenarios())
    def play(scenario: Scenario) -> None:
        seen.update(conform(scenario))
        seen["sequences"] += 1

    play()
    print(dict(seen))
    assert seen["sequences"] >= 2000
    assert {what: seen[what] for what, least in LEAST.items() if seen[what] < least} == {}


@pytest.mark.soak
@pytest.mark.timeout(3600)
@settings(_COMMON, max_examples=50_000)
@given(scenario=scenarios(max_actions=120))
def test_same_as_vllm_in_many_more_and_longer_sequences(scenario: Scenario) -> None:
    conform(scenario)


Patch = Callable[[pytest.MonkeyPatch], None]


def _forward_free(patch: pytest.MonkeyPatch) -> None:
    def free(self: BlockManager, request_id: str) -> None:
        table = self._tables.pop(request_id, None)
        if table is not None:
            self.pool.free_blocks(table.blocks)

    patch.setattr(BlockManager, "free", free)


def _cached_blocks_freed_to_the_front(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FreeBlockQueue, "append_n", lambda self, blocks: self.prepend_n(list(blocks)))


def _blocks_without_content_freed_to_the_end(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FreeBlockQueue, "prepend_n", FreeBlockQueue.append_n)


def _hit_stays_in_the_queue(patch: pytest.MonkeyPatch) -> None:
    def touch(_self: BlockPool, blocks: list[Block]) -> None:
        for block in blocks:
            block.ref_cnt += 1

    patch.setattr(BlockPool, "touch", touch)


def _lookup_changes_lru(patch: pytest.MonkeyPatch) -> None:
    original = BlockPool.longest_prefix

    def longest_prefix(self: BlockPool, block_hashes: list[bytes], max_blocks: int) -> list[Block]:
        blocks = original(self, block_hashes, max_blocks)
        self.touch(blocks)
        self.free_blocks(reversed(blocks))
        return blocks

    patch.setattr(BlockPool, "longest_prefix", longest_prefix)


def _last_token_not_recomputed(patch: pytest.MonkeyPatch) -> None:
    def get_computed_blocks(self: BlockManager, request: object) -> list[Block]:
        return self.pool.longest_prefix(request.block_hashes, len(request.block_hashes))  # type: ignore[attr-defined]

    patch.setattr(BlockManager, "get_computed_blocks", get_computed_blocks)


def _last_duplicate_handed_out(patch: pytest.MonkeyPatch) -> None:
    def prefix(self: BlockHashMap, block_hashes: list[bytes], max_blocks: int) -> list[Block]:
        found = []
        for block_hash in block_hashes[:max_blocks]:
            if block_hash not in self:
                break
            found.append(list(self.blocks_of(block_hash))[-1])
        return found

    patch.setattr(BlockHashMap, "prefix", prefix)


def _hit_skips_a_missing_block(patch: pytest.MonkeyPatch) -> None:
    def prefix(self: BlockHashMap, block_hashes: list[bytes], max_blocks: int) -> list[Block]:
        return [block for block in map(self.get, block_hashes[:max_blocks]) if block is not None]

    patch.setattr(BlockHashMap, "prefix", prefix)


def _eviction_drops_the_duplicates_too(patch: pytest.MonkeyPatch) -> None:
    original = BlockHashMap.remove

    def remove(self: BlockHashMap, block: Block) -> bool:
        if block.block_hash is None:
            return False
        return all(original(self, held) for held in list(self.blocks_of(block.block_hash)))

    patch.setattr(BlockHashMap, "remove", remove)


def _duplicates_not_kept(patch: pytest.MonkeyPatch) -> None:
    original = BlockHashMap.insert

    def insert(self: BlockHashMap, block: Block, block_hash: bytes, after: Block | None = None) -> None:
        if block_hash not in self:
            original(self, block, block_hash, after)

    patch.setattr(BlockHashMap, "insert", insert)


def _hint_followed_unchecked(patch: pytest.MonkeyPatch) -> None:
    def prefix(self: BlockHashMap, block_hashes: list[bytes], max_blocks: int) -> list[Block]:
        found: list[Block] = []
        for block_hash in block_hashes[:max_blocks]:
            block = self.get(block_hash)
            if found and found[-1].next_in_prefix is not found[-1]:
                block = found[-1].next_in_prefix
            if block is None:
                break
            found.append(block)
        return found

    patch.setattr(BlockHashMap, "prefix", prefix)


def _next_duplicate_not_served(patch: pytest.MonkeyPatch) -> None:
    """The first duplicate leaves and still answers in its hint's place."""
    original = BlockHashMap.remove

    def remove(self: BlockHashMap, block: Block) -> bool:
        served = block.served_hash
        removed = original(self, block)
        block.served_hash = served
        return removed

    patch.setattr(BlockHashMap, "remove", remove)


def _handed_out_block_keeps_its_hash(patch: pytest.MonkeyPatch) -> None:
    def get_new_blocks(self: BlockPool, n: int) -> list[Block]:
        blocks = self.queue.popleft_n(n)
        for block in blocks:
            block.ref_cnt = 1
        return blocks

    patch.setattr(BlockPool, "get_new_blocks", get_new_blocks)


def _cached_one_step_late(patch: pytest.MonkeyPatch) -> None:
    original = BlockManager._cache

    def cache(self: BlockManager, request: object, table: object, num_full: int) -> None:
        computed = request.num_computed_tokens // self.block_size  # type: ignore[attr-defined]
        original(self, request, table, min(num_full, computed))  # type: ignore[arg-type]

    patch.setattr(BlockManager, "_cache", cache)


def _hits_in_the_queue_not_counted(patch: pytest.MonkeyPatch) -> None:
    """Blocks that a hit takes out of the queue are still counted as free."""
    original = BlockManager.allocate_slots

    class Counting:
        def __init__(self, pool: BlockPool, extra: int) -> None:
            self._pool, self._extra = pool, extra

        def __getattr__(self, name: str) -> object:
            if name == "num_free_blocks":
                return self._pool.num_free_blocks + self._extra
            return getattr(self._pool, name)

    def allocate_slots(self, request, num_new_tokens, computed_blocks=(), **options):  # type: ignore[no-untyped-def]
        pool = self.pool
        self.pool = Counting(pool, sum(block.ref_cnt == 0 for block in computed_blocks))
        try:
            return original(self, request, num_new_tokens, computed_blocks, **options)
        finally:
            self.pool = pool

    patch.setattr(BlockManager, "allocate_slots", allocate_slots)


def _eviction_frees_the_block_of_a_holder(patch: pytest.MonkeyPatch) -> None:
    original = BlockPool.evict_blocks

    def evict_blocks(self: BlockPool, block_ids: set[int]) -> int:
        for block_id in block_ids:
            if self.blocks[block_id].ref_cnt:
                self.free_blocks([self.blocks[block_id]])
        return original(self, block_ids)

    patch.setattr(BlockPool, "evict_blocks", evict_blocks)


def _reset_while_blocks_are_held(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BlockPool, "reset", lambda self: self.cached.clear() >= 0)


def _one_block_preallocated(patch: pytest.MonkeyPatch) -> None:
    original = BlockManager.__init__

    def init(self, *args, **options):  # type: ignore[no-untyped-def]
        original(self, *args, **options)
        self.num_preallocated_blocks = 1

    patch.setattr(BlockManager, "__init__", init)


MUTANTS: list[Patch] = [
    _forward_free,
    _cached_blocks_freed_to_the_front,
    _blocks_without_content_freed_to_the_end,
    _hit_stays_in_the_queue,
    _lookup_changes_lru,
    _last_token_not_recomputed,
    _last_duplicate_handed_out,
    _hit_skips_a_missing_block,
    _eviction_drops_the_duplicates_too,
    _duplicates_not_kept,
    _hint_followed_unchecked,
    _next_duplicate_not_served,
    _handed_out_block_keeps_its_hash,
    _cached_one_step_late,
    _hits_in_the_queue_not_counted,
    _eviction_frees_the_block_of_a_holder,
    _reset_while_blocks_are_held,
    _one_block_preallocated,
]


@pytest.fixture(params=MUTANTS, ids=lambda mutant: mutant.__name__.strip("_"))
def mutant(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    request.param(monkeypatch)


@pytest.mark.usefixtures("mutant")
def test_every_mutant_is_caught() -> None:
    """The control of the conformance test: each fault is found within a fraction of its sequences."""

    @settings(_COMMON, max_examples=500, derandomize=True, phases=[Phase.generate], report_multiple_bugs=False)
    @given(scenario=scenarios())
    def play(scenario: Scenario) -> None:
        conform(scenario)

    with pytest.raises((Divergence, BlockIndexError)):
        play()
