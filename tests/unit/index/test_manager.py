"""Block tables: the three cases of allocate_slots, the last token, chunks, preallocation, and errors that change
nothing."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from stagecached.index import (
    BlockHasher,
    BlockManager,
    BlockPool,
    MissingBlockHash,
    Request,
    RequestAlreadyRunning,
    StalePrefix,
)

BLOCK_SIZE = 4
HASHER = BlockHasher(BLOCK_SIZE)


def request(name: str, token_ids: Sequence[int]) -> Request:
    return Request(name, token_ids, HASHER)


def admit(manager: BlockManager, req: Request, num_new_tokens: int | None = None) -> int:
    """Look up and allocate, all tokens or some, as a scheduler does; answers the hit tokens."""
    hit = manager.get_computed_blocks(req)
    num_hit = len(hit) * BLOCK_SIZE
    num_new_tokens = req.num_tokens - num_hit if num_new_tokens is None else num_new_tokens
    assert manager.allocate_slots(req, num_new_tokens, hit) is not None
    req.num_computed_tokens = num_hit + num_new_tokens
    return num_hit


def free_ids(manager: BlockManager) -> list[int]:
    return [block.block_id for block in manager.pool.queue]


@pytest.fixture
def manager() -> BlockManager:
    return BlockManager(BlockPool(10), BLOCK_SIZE)


def test_the_worked_example_of_take_two(manager: BlockManager) -> None:
    """Allocation, append, a full block, a shared prefix, free in reverse, reuse from the queue."""
    first = request("0", range(15))
    assert admit(manager, first) == 0
    assert manager.block_ids("0") == [0, 1, 2, 3]
    first.append([15])
    assert manager.allocate_slots(first, 1) == []  # fills block 3
    assert first.block_hashes[3] in manager.pool.cached
    first.num_computed_tokens = 16
    first.append([16])
    new_blocks = manager.allocate_slots(first, 1)
    assert new_blocks is not None
    assert [block.block_id for block in new_blocks] == [4]

    second = request("1", [*range(10), 90, 91, 92, 93])
    assert admit(manager, second) == 8
    assert manager.block_ids("1") == [0, 1, 5, 6]
    assert [manager.pool.blocks[i].ref_cnt for i in (0, 1, 2)] == [2, 2, 1]

    manager.free("0")
    # 4 had no hash: it goes first. 3 and 2 are cached, tail first; 0 and 1 are still held.
    assert free_ids(manager) == [4, 7, 8, 9, 3, 2]
    manager.free("1")
    # 6 had no hash; of the cached ones the tail goes first, the shared start last.
    assert free_ids(manager) == [6, 4, 7, 8, 9, 3, 2, 5, 1, 0]

    third = request("2", range(12))
    assert admit(manager, third) == 8  # the last token is recomputed, and with it its block
    assert manager.block_ids("2") == [0, 1, 6]
    assert free_ids(manager) == [4, 7, 8, 9, 3, 2, 5]


def test_a_prompt_cached_to_its_end_recomputes_its_last_block(manager: BlockManager) -> None:
    admit(manager, request("a", range(8)))
    assert len(manager.get_computed_blocks(request("b", range(8)))) == 1
    assert len(manager.get_computed_blocks(request("c", range(9)))) == 2


def test_the_recomputed_block_is_a_duplicate_and_ids_already_told_stay(manager: BlockManager) -> None:
    one, two = request("a", range(8)), request("b", range(8))
    admit(manager, one)
    admit(manager, two)
    assert (manager.block_ids("a"), manager.block_ids("b")) == ([0, 1], [0, 2])
    assert [block.block_id for block in manager.pool.cached.blocks_of(one.block_hashes[1])] == [1, 2]
    manager.free("a")
    assert [block.block_id for block in manager.get_computed_blocks(request("c", range(9)))] == [0, 1]


def test_blocks_are_hit_as_soon_as_they_are_allocated(manager: BlockManager) -> None:
    """A hit in the step that computes the block (H6)."""
    admit(manager, request("a", range(12)))
    assert admit(manager, request("b", range(12))) == 8


def test_a_chunked_prefill_caches_each_block_when_it_fills(manager: BlockManager) -> None:
    req = request("a", range(11))
    admit(manager, req, 3)
    assert len(manager.pool.cached) == 0
    for chunk, cached in ((1, 1), (3, 1), (4, 2)):
        assert manager.allocate_slots(req, chunk) is not None
        req.num_computed_tokens += chunk
        assert len(manager.pool.cached) == cached
    assert manager.block_ids("a") == [0, 1, 2]


def test_a_lookup_changes_nothing(manager: BlockManager) -> None:
    admit(manager, request("a", range(12)))
    manager.free("a")
    before = free_ids(manager)
    assert len(manager.get_computed_blocks(request("b", range(12)))) == 2
    assert free_ids(manager) == before
    assert manager.num_requests == 0


def test_a_request_that_does_not_fit_is_refused_and_nothing_changes() -> None:
    manager = BlockManager(BlockPool(4), BLOCK_SIZE)
    admit(manager, request("a", range(9)))
    manager.free("a")
    big = request("b", [*range(8), *range(50, 62)])
    hit = manager.get_computed_blocks(big)
    before = free_ids(manager)
    # 3 blocks are missing, and the hit takes 2 of the 4 free ones
    assert manager.allocate_slots(big, 12, hit) is None
    assert free_ids(manager) == before
    assert manager.block_ids("b") == []
    assert [block.ref_cnt for block in hit] == [0, 0]


def test_an_admission_may_demand_that_all_of_the_request_fits() -> None:
    manager = BlockManager(BlockPool(2), BLOCK_SIZE)
    long = request("a", range(12))
    assert manager.allocate_slots(long, 4, full_sequence_must_fit=True) is None
    assert manager.allocate_slots(long, 4) is not None


def test_reserved_blocks_are_left_alone() -> None:
    manager = BlockManager(BlockPool(2), BLOCK_SIZE)
    assert manager.allocate_slots(request("a", range(8)), 8, reserved_blocks=1) is None
    assert manager.allocate_slots(request("a", range(8)), 4, reserved_blocks=1) is not None


def test_no_slot_lies_beyond_max_model_len() -> None:
    manager = BlockManager(BlockPool(9), BLOCK_SIZE, max_model_len=9)
    manager.allocate_slots(request("a", range(9)), 9, num_lookahead_tokens=20)
    assert len(manager.block_ids("a")) == 3


def test_drafts_get_slots_but_no_hash(manager: BlockManager) -> None:
    manager.allocate_slots(request("a", range(3)), 3 + 5)
    assert len(manager.block_ids("a")) == 2
    assert len(manager.pool.cached) == 0


def test_external_tokens_get_slots_and_may_be_cached_later(manager: BlockManager) -> None:
    req = request("a", range(12))
    manager.allocate_slots(req, 0, num_external_computed_tokens=8, delay_cache_blocks=True)
    assert manager.block_ids("a") == [0, 1]
    assert len(manager.pool.cached) == 0
    manager.cache_blocks(req, 8)
    manager.cache_blocks(req, 8)
    assert len(manager.pool.cached) == 2


def test_a_preempted_request_finds_what_it_computed(manager: BlockManager) -> None:
    req = request("a", range(10))
    admit(manager, req)
    manager.free("a")
    req.num_computed_tokens = 0
    assert admit(manager, req) == 8
    assert manager.block_ids("a") == [0, 1, 2]


def test_freeing_a_request_without_blocks_is_legal(manager: BlockManager) -> None:
    manager.free("never seen")
    assert len(free_ids(manager)) == 10


class TestPreallocation:
    def test_an_allocation_takes_blocks_ahead_so_that_the_next_needs_none(self) -> None:
        manager = BlockManager(BlockPool(10), BLOCK_SIZE, num_preallocated_blocks=2)
        req = request("a", range(4))
        admit(manager, req)
        assert manager.block_ids("a") == [0, 1, 2]
        req.append(range(4, 12))
        assert manager.allocate_slots(req, 8) == []
        req.num_computed_tokens = 12
        req.append([12])
        assert manager.allocate_slots(req, 1) is not None
        assert manager.block_ids("a") == [0, 1, 2, 3, 4, 5]

    def test_only_as_many_as_are_free(self) -> None:
        manager = BlockManager(BlockPool(3), BLOCK_SIZE, num_preallocated_blocks=4)
        admit(manager, request("a", range(8)))
        assert manager.block_ids("a") == [0, 1, 2]

    def test_only_as_many_as_max_model_len_allows(self) -> None:
        manager = BlockManager(BlockPool(9), BLOCK_SIZE, max_model_len=10, num_preallocated_blocks=4)
        admit(manager, request("a", range(8)))
        assert manager.block_ids("a") == [0, 1, 2]

    def test_lookahead_slots_count_as_taken_ahead(self) -> None:
        manager = BlockManager(BlockPool(9), BLOCK_SIZE, num_preallocated_blocks=1)
        manager.allocate_slots(request("a", range(4)), 4, num_lookahead_tokens=4)
        assert manager.block_ids("a") == [0, 1]

    def test_blocks_taken_ahead_have_no_content_and_are_reused_first(self) -> None:
        manager = BlockManager(BlockPool(4), BLOCK_SIZE, num_preallocated_blocks=2)
        admit(manager, request("a", range(4)))
        manager.free("a")
        assert free_ids(manager) == [2, 1, 3, 0]


class TestErrorsChangeNothing:
    def test_a_hit_for_a_running_request(self, manager: BlockManager) -> None:
        admit(manager, request("other", range(9)))
        running = request("a", range(9))
        manager.allocate_slots(running, 9)
        before = free_ids(manager)
        with pytest.raises(RequestAlreadyRunning):
            manager.allocate_slots(running, 1, manager.get_computed_blocks(running))
        assert free_ids(manager) == before

    def test_a_prefix_that_was_evicted_after_the_lookup(self, manager: BlockManager) -> None:
        admit(manager, request("a", range(9)))
        manager.free("a")
        late = request("b", range(9))
        hit = manager.get_computed_blocks(late)
        manager.allocate_slots(request("big", range(100, 140)), 40)
        with pytest.raises(StalePrefix, match="computed block 0"):
            manager.allocate_slots(late, 1, hit)
        assert manager.block_ids("b") == []

    def test_a_block_that_fills_without_a_hash(self, manager: BlockManager) -> None:
        req = request("a", range(8))
        req.block_hashes.pop()
        with pytest.raises(MissingBlockHash, match="2 blocks are full, 1 hashes are known"):
            manager.allocate_slots(req, 8)
        assert len(free_ids(manager)) == 10

    def test_no_tokens_at_all(self, manager: BlockManager) -> None:
        with pytest.raises(ValueError, match="slots for 0 tokens"):
            manager.allocate_slots(request("a", range(8)), 0)
