"""Lookups by token ids: the hashes of a prompt's full blocks, made as the engine makes them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from stagecache_wire.v1 import stagecache_pb2 as pb
from stagecached.index import HASH_BYTES, ExtraKeys, MultiModalSpan, Namespace, UnsupportedKey


@dataclass(frozen=True)
class Question:
    """One prefix that is asked for: the hashes of its full blocks, and its tokens, which may be more."""

    hashes: list[bytes]
    tokens: int


def questions_of(namespace: Namespace, request: pb.LookupBlocksRequest) -> list[Question]:
    """One question a span of token ids; spans are checked.

    Raises:
        UnsupportedHash: only the engine can make this namespace's hashes.
        UnsupportedKey: identities that are not one a span, or do not fit together.
    """
    hasher = namespace.hasher()
    identities = list(request.identities) or [pb.SpanIdentity()] * len(request.span_tokens)
    if len(identities) != len(request.span_tokens):
        raise UnsupportedKey(f"{len(identities)} identities for {len(request.span_tokens)} spans of token ids")
    tokens = np.fromiter(request.token_ids, np.uint32, len(request.token_ids))
    questions, at = [], 0
    for count, identity in zip(request.span_tokens, identities, strict=True):
        hashes = hasher.hash_blocks(tokens[at : at + count], extra_keys_of(identity))
        questions.append(Question(hashes, count))
        at += count
    return questions


def extra_keys_of(identity: pb.SpanIdentity) -> ExtraKeys:
    """What beside its token ids tells a span apart. Raises: UnsupportedKey."""
    items = (identity.mm_identifiers, identity.mm_offsets, identity.mm_lengths)
    if len({len(item) for item in items}) != 1:
        raise UnsupportedKey("a multimodal item needs an identifier, an offset and a length")
    if len(identity.embeds_digests) % HASH_BYTES:
        raise UnsupportedKey(f"digests of prompt embeddings have {HASH_BYTES} bytes each")
    raw = identity.embeds_digests
    return ExtraKeys(
        lora_name=identity.lora_name or None,
        mm_spans=tuple(MultiModalSpan(name, offset, length) for name, offset, length in zip(*items, strict=True)),
        cache_salt=identity.cache_salt or None,
        embeds_digests=tuple(raw[at : at + HASH_BYTES] for at in range(0, len(raw), HASH_BYTES)) or None,
    )
