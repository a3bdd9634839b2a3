"""The two sides of the comparison: our index, and vLLM's pool and manager made as vLLM makes them."""

from __future__ import annotations

import os
from collections.abc import Sequence
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
from vllm.v1.core.kv_cache_utils import get_none_hash_seed, get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request as PeerRequest

from stagecached.index import BlockHasher, BlockManager, BlockPool, Request

BLOCK_SIZE = 16
"""Tokens a block."""

MAX_MODEL_LEN = 65_536

init_none_hash(sha256_cbor)
OUR_HASHER = BlockHasher(BLOCK_SIZE, get_none_hash_seed())
PEER_HASHER = get_request_block_hasher(BLOCK_SIZE, sha256_cbor)
_PARAMS = SamplingParams(max_tokens=MAX_MODEL_LEN)


def digests(n: int) -> list[bytes]:
    """Hashes of contents that nobody else holds."""
    return [os.urandom(32) for _ in range(n)]


def copies(hashes: Sequence[bytes]) -> list[bytes]:
    """Equal hashes as new objects, as a call brings them."""
    return [bytes(bytearray(block_hash)) for block_hash in hashes]


def make_pools(num_blocks: int) -> tuple[BlockPool, PeerPool]:
    """Two pools with num_blocks blocks to hand out."""
    return BlockPool(num_blocks + 1, null_block=True), PeerPool(num_blocks + 1, True, BLOCK_SIZE)


def make_managers(num_blocks: int) -> tuple[BlockManager, KVCacheManager]:
    """Two managers over pools with num_blocks blocks to hand out."""
    spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=8, dtype=torch.float32)
    config = KVCacheConfig(
        num_blocks=num_blocks + 1, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer0"], spec)]
    )
    ours = BlockManager(BlockPool(num_blocks + 1, null_block=True), BLOCK_SIZE, max_model_len=MAX_MODEL_LEN)
    return ours, KVCacheManager(config, MAX_MODEL_LEN, scheduler_block_size=BLOCK_SIZE, hash_block_size=BLOCK_SIZE)


def make_requests(name: str, token_ids: list[int]) -> tuple[Request, PeerRequest]:
    """One request on both sides; their hashes are equal."""
    ours = Request(name, token_ids, OUR_HASHER)
    peer = PeerRequest(name, token_ids, _PARAMS, None, block_hasher=PEER_HASHER)
    assert ours.block_hashes == peer.block_hashes
    return ours, peer


def cache(pool: BlockPool | PeerPool, blocks: list[Any], hashes: list[bytes]) -> None:
    """Gives full blocks their hashes, on either side."""
    if isinstance(pool, BlockPool):
        pool.cache_full_blocks(blocks, hashes)
    else:
        pool.cache_full_blocks(SimpleNamespace(block_hashes=hashes), blocks, 0, len(blocks), BLOCK_SIZE, 0)


def find(pool: BlockPool | PeerPool, hashes: list[bytes]) -> list[Any]:
    """The blocks of a prefix that is cached, on either side; vLLM's loop is that of its find_longest_cache_hit."""
    if isinstance(pool, BlockPool):
        return pool.longest_prefix(hashes, len(hashes))
    found = []
    for block_hash in hashes:
        blocks = pool.get_cached_block(block_hash, [0])
        if not blocks:
            break
        found.append(blocks[0])
    return found
