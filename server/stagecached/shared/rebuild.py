"""A namespace's store again, from the sealed headers that a daemon before this one left."""

from __future__ import annotations

import numpy as np

from stagecached.shared import layout
from stagecached.shared.layout import block_word, hash_words, seals_of
from stagecached.shared.segment import SegmentMismatchError
from stagecached.shared.store import NamespaceStore, key_of


def rebuild(store: NamespaceStore) -> tuple[int, int]:
    """Make every block whose seal fits findable, in the order in which they were used. Returns how many these are, and
    how many had a seal that does not fit, or content that another block has.

    A header without its seal, or with one that does not fit, is a block without content: its rows may be half written.

    Raises:
        SegmentMismatchError: the segment's own words make no sense; nothing of it can be used.
    """
    segment = store.segment
    base, last = segment.words[layout.S_BASE_GENERATION], segment.words[layout.S_LAST_GENERATION]
    if not 1 <= base <= last < 1 << 62:
        raise SegmentMismatchError(f"its generations are {base} and {last}")
    headers = segment.headers
    seals = headers[:, layout.B_SEAL]
    fits = (seals == seals_of(hash_words(segment.geometry.digest)[0], headers)) & (
        headers[:, layout.B_GENERATION] <= np.uint64(last)
    )
    broken = np.flatnonzero(~fits & (seals != 0)).tolist()
    for block_id in broken:
        segment.words[block_word(block_id) + layout.B_SEAL] = 0
    with store.lock:
        ids = np.flatnonzero(fits)
        ids = ids[np.argsort(headers[ids, layout.B_USED], kind="stable")]
        hashes = headers[ids, layout.B_HASH : layout.B_GENERATION].astype("<u8").tobytes()
        generations = headers[ids, layout.B_GENERATION].tolist()
        found = 0
        for index, block_id in enumerate(ids.tolist()):
            key = key_of(hashes[32 * index : 32 * index + 32], generations[index])
            if key in store.pool.cached:
                segment.words[block_word(block_id) + layout.B_SEAL] = 0
                continue
            block = store.pool.blocks[block_id]
            store.pool.touch((block,))
            store.pool.cache_full_blocks((block,), (key,))
            store.pool.free_blocks((block,))
            found += 1
        if len(ids):
            store.last_use = int(headers[ids, layout.B_USED].max())
    return found, len(broken) + len(ids) - found
