"""Drives the block index and vLLM's KVCacheManager with the same requests and compares everything, call by call.

`Pair` makes each call on both sides, each with its own request object (so the hashes are compared too), and then
`compare` looks at all that there is: free order, references, the hash of every block, the blocks of every hash in
order, the table of every request. `conform` plays one `Scenario`.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

import torch
from hypothesis import strategies as st
from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.block_pool import BlockPool as PeerPool
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_block_hash, get_none_hash_seed, get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request as PeerRequest

from stagecached.index import BlockHasher, BlockManager, BlockPool, ExtraKeys, Request

MAX_MODEL_LEN = 40

init_none_hash(sha256_cbor)
_PARAMS = SamplingParams(ignore_eos=True, max_tokens=MAX_MODEL_LEN)
_LORAS = {name: LoRARequest(lora_name=name, lora_int_id=i, lora_path="/none") for i, name in enumerate("ab", 1)}


class Divergence(AssertionError):
    """The two sides differ; the text says in what."""


def agree(what: str, ours: object, peer: object) -> None:
    if ours != peer:
        raise Divergence(f"{what}: ours {ours!r}, vLLM {peer!r}")


def make_peer_manager(num_blocks: int, block_size: int, max_model_len: int = MAX_MODEL_LEN) -> KVCacheManager:
    spec = FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=8, dtype=torch.float32)
    config = KVCacheConfig(
        num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer0"], spec)]
    )
    return KVCacheManager(
        config, max_model_len=max_model_len, scheduler_block_size=block_size, hash_block_size=block_size
    )


def compare_pools(ours: BlockPool, peer: PeerPool) -> None:
    """Everything that two pools hold, in order."""
    peer_free = [block.block_id for block in peer.free_block_queue.get_all_free_blocks()]
    agree("free order", [block.block_id for block in ours.queue], peer_free)
    agree("number of free blocks", ours.num_free_blocks, peer.get_num_free_blocks())
    usable = [block for block in peer.blocks if not block.is_null]
    agree("references", [ours.blocks[block.block_id].ref_cnt for block in usable], [b.ref_cnt for b in usable])
    peer_hashes = [block.block_hash and get_block_hash(block.block_hash) for block in usable]
    agree("block hashes", [ours.blocks[block.block_id].block_hash for block in usable], peer_hashes)
    peer_map = peer.cached_block_hash_to_block._cache
    agree("number of hashes", len(ours.cached), len(peer_map))
    for key, held in peer_map.items():
        ids = list(held) if isinstance(held, dict) else [held.block_id]
        agree("blocks of a hash", [b.block_id for b in ours.cached.blocks_of(get_block_hash(key))], ids)
        agree("block that is handed out", ours.get_cached_block(get_block_hash(key)), ours.blocks[ids[0]])


@dataclass
class Tracked:
    """One request on both sides. `output` numbers the tokens decoded so far."""

    ours: Request
    peer: PeerRequest
    delayed: bool = False
    output: int = 0

    @property
    def id(self) -> str:
        return self.ours.request_id

    @property
    def remaining(self) -> int:
        return self.ours.num_tokens - self.ours.num_computed_tokens

    def advance(self, num_tokens: int) -> None:
        self.ours.num_computed_tokens += num_tokens
        self.peer.num_computed_tokens += num_tokens

    def decode(self, token_id: int) -> None:
        self.output += 1
        self.ours.append([token_id])
        self.peer.append_output_token_ids(token_id)
        agree("hashes after decoding", self.ours.block_hashes, self.peer.block_hashes)


class Pair:
    """Both managers, over pools of equal size; every method makes one call on both and compares all state."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.pool = BlockPool(num_blocks, null_block=True)
        self.ours = BlockManager(self.pool, block_size, max_model_len=MAX_MODEL_LEN)
        self.peer = make_peer_manager(num_blocks, block_size)
        self._hasher = BlockHasher(block_size, get_none_hash_seed())
        self._peer_hasher = get_request_block_hasher(block_size, sha256_cbor)
        self.seen: Counter[str] = Counter()
        self.waiting: list[Tracked] = []
        self.running: list[Tracked] = []
        self.compare()

    def compare(self) -> None:
        self.seen["comparisons"] += 1
        compare_pools(self.pool, self.peer.block_pool)
        for request in self.waiting + self.running:
            agree(f"table of {request.id}", self.ours.block_ids(request.id), self.peer.get_block_ids(request.id)[0])

    def add(self, request_id: str, token_ids: list[int], lora: str | None, salt: str | None) -> None:
        ours = Request(request_id, token_ids, self._hasher, ExtraKeys(lora_name=lora, cache_salt=salt))
        peer = PeerRequest(
            request_id=request_id,
            prompt_token_ids=token_ids,
            sampling_params=_PARAMS,
            pooling_params=None,
            lora_request=_LORAS[lora] if lora else None,
            cache_salt=salt,
            block_hasher=self._peer_hasher,
        )
        agree("hashes of the prompt", ours.block_hashes, peer.block_hashes)
        self.waiting.append(Tracked(ours, peer))

    def look_up(self, request: Tracked) -> tuple[list, object, int]:
        ours = self.ours.get_computed_blocks(request.ours)
        peer, num_peer, _ = self.peer.get_computed_blocks(request.peer)
        agree("hit blocks", [block.block_id for block in ours], peer.get_block_ids()[0])
        agree("hit tokens", len(ours) * self.block_size, num_peer)
        self.seen["hit"] += bool(ours)
        self.seen["hit of a free block"] += any(block.ref_cnt == 0 for block in ours)
        self.seen["hit of a held block"] += any(block.ref_cnt > 0 for block in ours)
        self.seen["hit with duplicates"] += any(block.next_same is not block for block in ours)
        self.seen["prompt cached to its end"] += num_peer < len(request.ours.block_hashes) * self.block_size and all(
            block_hash in self.pool.cached for block_hash in request.ours.block_hashes
        )
        self.compare()
        return ours, peer, num_peer

    def allocate(
        self, request: Tracked, num_new_tokens: int, *, hit: tuple[list, object, int] | None = None, **options: int
    ) -> bool:
        blocks, peer_blocks, num_hit = hit or ([], None, 0)
        ours = self.ours.allocate_slots(request.ours, num_new_tokens, blocks, **options)
        peer = self.peer.allocate_slots(request.peer, num_new_tokens, num_hit, peer_blocks, **options)
        agree("refused", ours is None, peer is None)
        if ours is not None and not options.get("num_external_computed_tokens"):
            agree("new blocks", [block.block_id for block in ours], peer.get_block_ids()[0])
        self.compare()
        if ours is None:
            self.seen["refused"] += 1
            return False
        self.seen["chunk of a prefill"] += num_new_tokens < request.remaining - num_hit
        self.seen["external tokens"] += bool(options.get("num_external_computed_tokens"))
        request.advance(num_new_tokens + num_hit + options.get("num_external_computed_tokens", 0))
        return True

    def cache_delayed(self, request: Tracked) -> None:
        self.seen["cached later"] += 1
        num_tokens = min(request.ours.num_computed_tokens, request.ours.num_tokens)
        self.ours.cache_blocks(request.ours, num_tokens)
        self.peer.cache_blocks(request.peer, num_tokens)
        request.delayed = False
        self.compare()

    def free(self, request: Tracked) -> None:
        self.ours.free(request.id)
        self.peer.free(request.peer)
        self.compare()

    def preempt(self, request: Tracked) -> None:
        self.seen["preempted"] += 1
        self.running.remove(request)
        self.free(request)
        request.ours.num_computed_tokens = request.peer.num_computed_tokens = 0
        request.delayed = False
        self.waiting.insert(0, request)

    def evict(self, block_ids: set[int]) -> None:
        self.pool.evict_blocks(block_ids)
        self.peer.evict_blocks(block_ids)
        self.compare()

    def reset(self) -> None:
        done = self.pool.reset()
        agree("reset", done, self.peer.reset_prefix_cache())
        self.seen["reset done" if done else "reset refused"] += 1
        self.compare()


@dataclass(frozen=True)
class Scenario:
    """num_blocks counts block 0, which is never used. Each action is a name and three numbers that it interprets."""

    num_blocks: int
    block_size: int
    num_lookahead_tokens: int
    actions: list[tuple[str, int, int, int]] = field(repr=True)


ACTIONS = (
    ["add"] * 4
    + ["follow_up", "twin", "twin"]
    + ["admit"] * 6
    + ["admit_external"]
    + ["step"] * 9
    + ["finish"] * 3
    + ["abort", "preempt", "look_up", "evict", "reset"]
)


def scenarios(max_actions: int = 60) -> st.SearchStrategy[Scenario]:
    """Four bytes an action: as one draw of bytes, since drawing would else take longer than playing."""

    def decode(data: bytes) -> list[tuple[str, int, int, int]]:
        whole = len(data) // 4 * 4
        return [(ACTIONS[data[i] % len(ACTIONS)], *data[i + 1 : i + 4]) for i in range(0, whole, 4)]

    return st.builds(
        Scenario,
        num_blocks=st.integers(4, 48),
        block_size=st.sampled_from([1, 2, 4]),
        num_lookahead_tokens=st.sampled_from([0, 0, 0, 1, 3]),
        actions=st.binary(min_size=4 * max_actions // 2, max_size=4 * max_actions).map(decode),
    )


class _Player:
    """Interprets the actions of a scenario; one that makes no sense in the state reached does nothing."""

    def __init__(self, scenario: Scenario) -> None:
        self.pair = Pair(scenario.num_blocks, scenario.block_size)
        self.lookahead = scenario.num_lookahead_tokens
        self.num_added = 0
        self.transcripts: list[list[int]] = []

    def play(self, action: tuple[str, int, int, int]) -> None:
        name, *numbers = action
        method: Callable[[int, int, int], None] = getattr(self, f"on_{name}")
        method(*numbers)

    def _add(self, token_ids: list[int], variant: int) -> None:
        self.num_added += 1
        lora = {13: "a", 14: "b", 15: "a"}.get(variant)
        salt = {11: "s", 12: "t", 15: "s"}.get(variant)
        self.pair.add(f"r{self.num_added}", token_ids, lora, salt)

    def on_add(self, document: int, length: int, variant: int) -> None:
        """One of two documents, cut, with one of two endings: shared prefixes of every length."""
        body = [100 + 40 * (document % 2) + i for i in range(length % 24)]
        self._add(body + [7 + variant % 2] * (1 + variant // 2 % 6), variant // 16)

    def on_follow_up(self, which: int, length: int, variant: int) -> None:
        """The next turn: what an earlier request said and was answered, and some more."""
        if self.transcripts:
            transcript = self.transcripts[which % len(self.transcripts)]
            self._add((transcript + [9] * (1 + length % 5))[: MAX_MODEL_LEN - 4], variant // 16)

    def on_twin(self, which: int, length: int, variant: int) -> None:
        """The prompt of a request that is still there, once more or longer: both fill blocks of equal content."""
        present = self.pair.running + self.pair.waiting
        if present:
            token_ids = present[which % len(present)].ours.token_ids
            self._add((token_ids + [9] * (length % 4))[: MAX_MODEL_LEN - 4], variant // 16)

    def on_look_up(self, which: int, _length: int, _variant: int) -> None:
        if self.pair.waiting:
            self.pair.look_up(self.pair.waiting[which % len(self.pair.waiting)])

    def on_admit(self, which: int, length: int, variant: int) -> None:
        if not self.pair.waiting:
            return
        request = self.pair.waiting[which % len(self.pair.waiting)]
        hit = self.pair.look_up(request)
        self._allocate_first(request, hit, length, variant, external=0)

    def on_admit_external(self, which: int, length: int, variant: int) -> None:
        if not self.pair.waiting:
            return
        request = self.pair.waiting[which % len(self.pair.waiting)]
        hit = self.pair.look_up(request)
        left = request.remaining - hit[2] - 1
        self._allocate_first(request, hit, length, variant, external=variant % left if left > 0 else 0)

    def _allocate_first(self, request: Tracked, hit: tuple, length: int, variant: int, external: int) -> None:
        left = request.remaining - hit[2] - external
        delayed = external > 0 and variant % 3 == 0
        num_new = 0 if delayed else self._chunk(left, length)
        admitted = self.pair.allocate(
            request,
            num_new,
            hit=hit,
            num_external_computed_tokens=external,
            num_lookahead_tokens=self.lookahead,
            delay_cache_blocks=delayed,
            full_sequence_must_fit=variant % 4 == 0,
            reserved_blocks=variant // 4 % 3 if variant % 5 == 0 else 0,
        )
        if admitted:
            request.delayed = delayed
            self.pair.waiting.remove(request)
            self.pair.running.append(request)

    def on_step(self, which: int, length: int, variant: int) -> None:
        """Chunked prefill, or one decoded token; where no block is free, somebody is preempted."""
        if not self.pair.running:
            return
        request = self.pair.running[which % len(self.pair.running)]
        if request.delayed:
            self.pair.cache_delayed(request)
        if request.remaining == 0:
            if request.ours.num_tokens >= MAX_MODEL_LEN:
                self._end(request)
                return
            request.decode(variant % 2)
        num_new = self._chunk(request.remaining, length)
        if not self.pair.allocate(request, num_new, num_lookahead_tokens=self.lookahead):
            self.pair.preempt(self.pair.running[-1])

    def _chunk(self, left: int, length: int) -> int:
        return left if length % 2 else 1 + length // 2 % left

    def _end(self, request: Tracked) -> None:
        self.transcripts.append(list(request.ours.token_ids))
        self.pair.running.remove(request)
        self.pair.free(request)

    def on_finish(self, which: int, _length: int, _variant: int) -> None:
        if self.pair.running:
            self._end(self.pair.running[which % len(self.pair.running)])

    def on_abort(self, which: int, _length: int, _variant: int) -> None:
        """A request may be aborted before it was ever allocated."""
        if self.pair.waiting:
            self.pair.free(self.pair.waiting.pop(which % len(self.pair.waiting)))

    def on_preempt(self, which: int, _length: int, _variant: int) -> None:
        if self.pair.running:
            self.pair.preempt(self.pair.running[which % len(self.pair.running)])

    def on_evict(self, first: int, length: int, _variant: int) -> None:
        usable = self.pair.pool.num_usable_blocks
        self.pair.evict({1 + (first + i) % usable for i in range(1 + length % 3)})

    def on_reset(self, which: int, _length: int, _variant: int) -> None:
        """Now and then only: what is forgotten cannot be hit."""
        if which % 4 == 3:
            self.pair.reset()


def conform(scenario: Scenario) -> Counter[str]:
    """Raises Divergence where the two sides differ; answers how often each situation of interest was met."""
    player = _Player(scenario)
    for action in scenario.actions:
        player.play(action)
    player.pair.seen["evicted"] += player.pair.pool.num_evictions
    return player.pair.seen
