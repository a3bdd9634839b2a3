"""Rows from a session's own pool into shared blocks, from any thread.

The consumer of a session writes its pool while others may read it here, so a copy is held against the words that say
whose rows these are: a record claims a slot before it writes it, hence claims and slot words that are the same before
and behind the copy say that the rows between are theirs. In the consumer's own thread they always are.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from stagecache_wire import presence
from stagecache_wire.fence import fence
from stagecached.keystore import KeyStore
from stagecached.segments import SessionSegments
from stagecached.shared.membership import Membership
from stagecached.shared.segment import SharedRows
from stagecached.shared.store import PublishOutcome


def publish_blocks(
    segments: SessionSegments, membership: Membership, block_ids: Sequence[int], block_hashes: Sequence[bytes]
) -> list[PublishOutcome]:
    """Keep blocks of a session's pool under their hashes, each where every slot has every key of the namespace PRESENT
    at the session's epoch, and every other key ABSENT: what is kept is all that the tenant wrote, so that a reader who
    has more keys open reads of them what this session would (H5). One outcome a block, in order.

    block_ids: checked against the geometry. block_hashes: 32 bytes each.
    """
    outcomes = [PublishOutcome.NOT_JOINED] * len(block_ids)
    for index in range(len(block_ids) - 1, -1, -1):  # The tail of a prefix is evicted first.
        outcomes[index] = _publish_block(segments, membership, block_ids[index], block_hashes[index])
    return outcomes


def _publish_block(
    segments: SessionSegments, membership: Membership, block_id: int, block_hash: bytes
) -> PublishOutcome:
    keys = [segments.keys.get(key_id) for key_id in membership.key_ids]
    size = segments.geometry.block_size
    span = slice(block_id * size, (block_id + 1) * size)
    stores = [key for key in keys if key is not None]
    others = [key for key_id, key in list(segments.keys.items()) if key_id not in membership.key_ids]
    watched = [*stores, *others]
    before = _words(segments, watched, span)
    if len(stores) < len(keys) or not _complete(before, len(stores)):
        membership.store.skip(PublishOutcome.NOT_PRESENT)
        return PublishOutcome.NOT_PRESENT

    def copy(shared: SharedRows) -> bool:
        for store in stores:
            np.copyto(shared.by_key[store.key_id], store.rows(span))
        fence()
        return all(np.array_equal(now, then) for now, then in zip(_words(segments, watched, span), before, strict=True))

    return membership.publish(block_hash, copy)


def _words(segments: SessionSegments, keys: Sequence[KeyStore], span: slice) -> list[NDArray[np.uint64]]:
    """Copies of the words that presence follows from: epoch, slot words, claims of each key."""
    epoch = np.array([segments.epoch_sequence], np.uint64)
    return [epoch, segments.slot_words[span].copy(), *(key.claims[span].copy() for key in keys)]


def _complete(words: Sequence[NDArray[np.uint64]], num_keys: int) -> bool:
    """Whether every slot is PRESENT for the first ``num_keys`` keys and ABSENT for the others:
    ``stagecached.keystore.classify`` for the case that all are.
    """
    (epoch_sequence,), slot_words, *claims = words
    newest_old = np.uint64(int(epoch_sequence) << presence.SLOT_SHIFT | presence.LOST)
    if not (slot_words > newest_old).all():
        return False
    present = slot_words << np.uint64(1) | np.uint64(presence.WRITTEN)
    writer = slot_words >> np.uint64(presence.SLOT_SHIFT)
    return all(np.array_equal(claim, present) for claim in claims[:num_keys]) and all(
        (claim >> np.uint64(presence.CLAIM_SHIFT) < writer).all() for claim in claims[num_keys:]
    )
