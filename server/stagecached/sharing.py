"""PUBLISH and FILL: rows of full blocks between a session's pool and the blocks that its namespace keeps for the node.

    PUBLISH  pool -> namespace: a block whose rows are all there is kept under its hash; whoever was first stays
    FILL     namespace -> pool: a block of the engine whose KV came from elsewhere gets the rows kept under its hash

Only the session's consumer calls this, in log order, and both are safe to do twice: a PUBLISH done again finds its
block kept, or an unsealed half that nobody reads; a FILL done again writes the same claims and rows, and where the hash
has gone meanwhile, the slots become UNKNOWN unless this very record had filled them before.

What is published is all that the block's tenant wrote (``shared.transfer``): every key of the namespace is PRESENT and
every other key of the session ABSENT. So a filled block reads as it would have read where it was computed (H5),
whatever keys its reader has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from stagecache_wire import presence
from stagecache_wire.records import Record
from stagecached.keystore import KeyStore, Span
from stagecached.metrics.record_figures import RecordFigures
from stagecached.segments import SessionSegments
from stagecached.shared.membership import Membership
from stagecached.shared.segment import SharedRows
from stagecached.shared.store import PublishOutcome
from stagecached.shared.transfer import publish_blocks


class BlockSharing:
    """PUBLISH and FILL of one session, in the namespace of ``segments.shared``."""

    def __init__(self, segments: SessionSegments, figures: RecordFigures, point: Callable[[str], None]) -> None:
        """point: called between any two shared stores of a FILL; those of a PUBLISH are the store's."""
        self._segments = segments
        self._figures = figures
        self._point = point

    def publish(self, record: Record) -> None:
        """Keep each block of the record whose rows are all there."""
        membership, blocks = self._segments.shared, record.named_blocks()
        outcomes = [PublishOutcome.NOT_JOINED] * len(blocks)
        if membership is not None:
            ids, hashes = [block for block, _ in blocks], [block_hash for _, block_hash in blocks]
            outcomes = publish_blocks(self._segments, membership, ids, hashes)
            self._point("after_publish")
        for outcome in outcomes:
            self._figures.shared(outcome.name.lower())

    def fill(self, record: Record) -> None:
        """Claim each block's slots for this record, and write the rows that the namespace keeps under its hash."""
        membership, blocks = self._segments.shared, record.named_blocks()
        stores = [] if membership is None else self._stores(membership)
        if membership is None or not stores:
            for block, _ in blocks:
                self._lose(self._run(block), record.sequence)
            return
        with membership.rows([block_hash for _, block_hash in blocks]) as kept:
            for (block, _), rows in zip(blocks, kept, strict=True):
                run = self._run(block)
                if rows is not None:
                    self._fill(run, stores, rows, record.sequence)
                elif not self._filled(run, stores, record.sequence):
                    self._lose(run, record.sequence)

    def _fill(self, run: slice, stores: Sequence[KeyStore], rows: SharedRows, sequence: int) -> None:
        span = Span(np.arange(run.start, run.stop, dtype=np.int64), run.stop - run.start, run)
        for store in stores:
            store.claim(span, sequence, failed=False)
            self._point("after_fill_claim")
        self._segments.slot_words[run] = sequence << presence.SLOT_SHIFT
        self._point("after_fill_slot_words")
        for store in stores:
            store.write(run, rows.by_key[store.key_id])
            self._point("after_fill_rows")
            store.mark_written(span, sequence)
            self._point("after_fill_written")
        self._figures.shared("filled")

    def _filled(self, run: slice, stores: Sequence[KeyStore], sequence: int) -> bool:
        """Whether this record filled the block before the daemon died: its hash may be gone since."""
        if not (self._segments.slot_words[run] == sequence << presence.SLOT_SHIFT).all():
            return False
        word = sequence << presence.CLAIM_SHIFT | presence.WRITTEN
        return all((store.claims[run] == word).all() for store in stores)

    def _lose(self, run: slice, sequence: int) -> None:
        """Rows that cannot be had are UNKNOWN for every key: a hit on them errs, it never guesses."""
        self._segments.slot_words[run] = sequence << presence.SLOT_SHIFT | presence.LOST
        self._point("after_fill_lost")
        self._figures.shared("missing")

    def reset(self, record: Record) -> None:
        """Before a new epoch begins (R5): where the model may be another one now, the session shares with none of those
        that go on with the old one.
        """
        membership = self._segments.shared
        if membership is not None and not record.same_model:
            membership.reset()
            self._point("after_shared_reset")

    def _run(self, block: int) -> slice:
        size = self._segments.geometry.block_size
        return slice(block * size, (block + 1) * size)

    def _stores(self, membership: Membership) -> list[KeyStore]:
        """The session's keys that a block of the namespace consists of; none where one of them was closed."""
        found = [self._segments.keys.get(key_id) for key_id in membership.key_ids]
        stores = [store for store in found if store is not None]
        return stores if len(stores) == len(found) else []
