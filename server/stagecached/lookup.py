"""Presence of hit spans, key by key, for people and for schedulers. Advisory: the log goes on while it reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from stagecached.keystore import classify
from stagecached.segments import SessionSegments


@dataclass(slots=True)
class LookupAnswer:
    """Parallel lists in span-major order, one entry a (span, key); the fields of LookupResponse."""

    key_ids: list[int] = field(default_factory=list)
    readable: list[int] = field(default_factory=list)
    first_missing_slot: list[int] = field(default_factory=list)
    pending: list[int] = field(default_factory=list)
    absent: list[int] = field(default_factory=list)
    unknown: list[int] = field(default_factory=list)
    consumed: int = 0


def lookup(
    segments: SessionSegments,
    block_ids: NDArray[np.int64],
    span_tokens: Sequence[int],
    key_ids: Sequence[int],
) -> LookupAnswer:
    """Presence of each span for each key.

    block_ids: int64, the blocks of all spans one after another, ceil(tokens / block_size) a span.
    span_tokens: tokens of each span. key_ids: empty for all open keys.

    Raises:
        ValueError: blocks and spans do not fit together, or a block lies outside the geometry.
        KeyError: a key that is not open.
    """
    geometry = segments.geometry
    size = geometry.block_size
    wanted = list(key_ids) or sorted(segments.keys.copy())  # the consumer may close a key meanwhile
    stores = [segments.keys[key_id] for key_id in wanted]
    if len(block_ids) and not (int(block_ids.min()) >= 0 and int(block_ids.max()) < geometry.num_blocks):
        raise ValueError(f"a block id lies outside 0 to {geometry.num_blocks - 1}")
    if sum(-(-tokens // size) for tokens in span_tokens) != len(block_ids):
        raise ValueError(f"{len(block_ids)} block ids for spans of {list(span_tokens)[:8]} tokens in blocks of {size}")
    answer = LookupAnswer(key_ids=wanted, consumed=segments.consumed)
    at = 0
    offsets = np.arange(size, dtype=np.int64)
    epoch_sequence = segments.epoch_sequence
    for tokens in span_tokens:
        blocks = block_ids[at : at - (-tokens // size)]
        at += len(blocks)
        slots = (blocks[:, None] * size + offsets).reshape(-1)[:tokens]
        slot_words = segments.slot_words[slots]
        for store in stores:
            found, _ = classify(slot_words, store.claims[slots], epoch_sequence)
            answer.readable.append(found.first_missing)
            complete = found.first_missing == tokens
            answer.first_missing_slot.append(-1 if complete else int(slots[found.first_missing]))
            answer.pending.append(found.pending)
            answer.absent.append(found.absent)
            answer.unknown.append(found.unknown)
    return answer
