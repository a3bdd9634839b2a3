"""What is compared with vLLM: pools of 100,000 blocks, requests of 32k tokens, a decode step, hashing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from measure import Case, Run, timed
from sides import BLOCK_SIZE, OUR_HASHER, PEER_HASHER, cache, copies, digests, make_managers, make_pools, make_requests

POOL_BLOCKS = 100_000
PREFIX_TOKENS = 32_768
PREFIX_BLOCKS = PREFIX_TOKENS // BLOCK_SIZE
LOT = 64
"""Blocks of one request in the case that allocates request by request."""

MIN_ALLOCATE_RATIO = 1.0
MIN_LOOKUP_RATIO = 2.0


def pool_cases() -> list[Case]:
    """Allocate and free all blocks of a pool: at once and request by request, without content and with."""
    ours, peer = make_pools(POOL_BLOCKS)
    hashes = digests(POOL_BLOCKS)

    def at_once(pool: Any) -> None:
        pool.free_blocks(reversed(pool.get_new_blocks(POOL_BLOCKS)))

    def by_request(pool: Any) -> None:
        held = [pool.get_new_blocks(LOT) for _ in range(POOL_BLOCKS // LOT)]
        for blocks in held:
            pool.free_blocks(reversed(blocks))

    def with_content(pool: Any) -> None:
        blocks = pool.get_new_blocks(POOL_BLOCKS)
        cache(pool, blocks, hashes)
        pool.free_blocks(reversed(blocks))

    def bare(work: Callable[[Any], None], pool: Any) -> Run:
        def play() -> float:
            ours.reset()
            peer.reset_prefix_cache()
            return timed(lambda: work(pool))

        return play

    def case(name: str, items: int, work: Callable[[Any], None]) -> Case:
        return Case(name, items, bare(work, ours), bare(work, peer), MIN_ALLOCATE_RATIO)

    return [
        case("allocate + free, at once", POOL_BLOCKS, at_once),
        case(f"allocate + free, {LOT} a request", POOL_BLOCKS // LOT * LOT, by_request),
        Case(
            "allocate (evict) + cache + free",
            POOL_BLOCKS,
            lambda: timed(lambda: with_content(ours)),
            lambda: timed(lambda: with_content(peer)),
            MIN_ALLOCATE_RATIO,
        ),
    ]


def manager_cases() -> list[Case]:
    """A request of 32k tokens, new and cached, and a decode step of 256 requests."""
    ours, peer = make_managers(POOL_BLOCKS)
    our_request, peer_request = make_requests("long", [(7 * i) % 150_000 for i in range(PREFIX_TOKENS + 1)])
    batch = [make_requests(f"r{i}", [i, *range(100)]) for i in range(256)]

    def ours_prefill() -> float:
        ours.pool.evict_blocks(range(POOL_BLOCKS + 1))

        def work() -> None:
            ours.allocate_slots(our_request, PREFIX_TOKENS + 1)
            ours.free(our_request.request_id)

        return timed(work)

    def peer_prefill() -> float:
        peer.evict_blocks(set(range(POOL_BLOCKS + 1)))

        def work() -> None:
            peer.allocate_slots(peer_request, PREFIX_TOKENS + 1)
            peer.free(peer_request)

        return timed(work)

    def ours_lookup() -> float:
        answers: list[Any] = []
        seconds = timed(lambda: answers.append(ours.get_computed_blocks(our_request)))
        assert len(answers[0]) == PREFIX_BLOCKS
        return seconds

    def peer_lookup() -> float:
        answers: list[Any] = []
        seconds = timed(lambda: answers.append(peer.get_computed_blocks(peer_request)))
        assert answers[0][1] == PREFIX_TOKENS
        return seconds

    def with_new_hashes(request: Any, run: Run) -> Run:
        def play() -> float:
            request.block_hashes = copies(request.block_hashes)
            return run()

        return play

    def ours_hit() -> float:
        def work() -> None:
            ours.allocate_slots(our_request, 1, ours.get_computed_blocks(our_request))
            ours.free(our_request.request_id)

        return timed(work)

    def peer_hit() -> float:
        def work() -> None:
            blocks, num_tokens, _ = peer.get_computed_blocks(peer_request)
            peer.allocate_slots(peer_request, 1, num_tokens, blocks)
            peer.free(peer_request)

        return timed(work)

    for our_running, peer_running in batch:
        ours.allocate_slots(our_running, our_running.num_tokens)
        peer.allocate_slots(peer_running, peer_running.num_tokens)
        our_running.num_computed_tokens = peer_running.num_computed_tokens = our_running.num_tokens - 1

    return [
        Case("allocate_slots + free, 32k new tokens", PREFIX_BLOCKS, ours_prefill, peer_prefill),
        Case("get_computed_blocks, 32k prefix", PREFIX_BLOCKS, ours_lookup, peer_lookup, MIN_LOOKUP_RATIO),
        Case(
            "the same, hashes are new objects",
            PREFIX_BLOCKS,
            with_new_hashes(our_request, ours_lookup),
            with_new_hashes(peer_request, peer_lookup),
            MIN_LOOKUP_RATIO,
        ),
        Case("lookup + allocate_slots + free, 32k hit", PREFIX_BLOCKS, ours_hit, peer_hit),
        Case(
            "allocate_slots, decode of 256 requests",
            len(batch),
            lambda: timed(lambda: [ours.allocate_slots(running, 1) for running, _ in batch]),
            lambda: timed(lambda: [peer.allocate_slots(running, 1) for _, running in batch]),
        ),
    ]


def hash_case() -> Case:
    """The hashes of a 32k-token prompt, from its token ids."""
    token_ids = [(7 * i) % 150_000 for i in range(PREFIX_TOKENS)]
    _, peer_request = make_requests("hashed", token_ids)

    def peer_hash() -> float:
        peer_request.block_hashes = []
        return timed(lambda: PEER_HASHER(peer_request))

    return Case(
        "hash a 32k-token prompt", PREFIX_BLOCKS, lambda: timed(lambda: OUR_HASHER.hash_blocks(token_ids)), peer_hash
    )
