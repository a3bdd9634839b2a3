"""PUBLISH and FILL: rows of full blocks between a session's pool and the blocks that its namespace keeps for the node.

    PUBLISH  pool -> namespace: a block whose rows are all there is kept under its hash; whoever was first stays
    FILL     namespace -> pool: a block of the engine whose KV came from elsewhere gets the rows kept under its hash

Only the session's consumer calls this, in log order, so both are safe to do twice: a PUBLISH done again finds its block
kept, or an unsealed half that nobody reads; a FILL done again writes the same claims and rows, and where the hash has
gone meanwhile, the slots become UNKNOWN unless this very record had filled them before.

What is published is all that the block's tenant wrote: every key of the namespace is PRESENT and every other key of the
session ABSENT. So a filled block reads as it would have read where it was computed (H5), whatever keys its reader has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Final, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from stagecache_wire import presence
from stagecache_wire.figures import SHARED_BLOCKS
from stagecache_wire.geometry import KeySchema
from stagecache_wire.records import Record
from stagecached.keystore import KeyStore, Span, Words
from stagecached.metrics.record_figures import RecordFigures
from stagecached.segments import SessionSegments

SharedRows: TypeAlias = Mapping[str, NDArray[np.void]]
"""A kept block: for each key name void [block_size], one item a row; views of the namespace's memory."""

KEPT, HELD, INCOMPLETE, NO_ROOM, CLOSED, FILLED, MISSING = SHARED_BLOCKS
assert SHARED_BLOCKS == ("kept", "held", "incomplete", "no_room", "closed", "filled", "missing")
_PRESENT: Final = np.uint64(presence.WRITTEN)


class Membership(Protocol):
    """What a session's consumer sees of the namespace that the session joined. Called on the consumer's thread."""

    @property
    def schemas(self) -> Sequence[KeySchema]:
        """The keys of every block of the namespace."""

    def publish(self, block_hash: bytes, copy_rows: Callable[[SharedRows], None]) -> str:
        """Keep a block: find room for it, have ``copy_rows`` write its rows, then seal it.

        Returns:
            "kept"; "held" where the hash was kept before; "no_room"; "closed" where the session is not in the
            namespace's generation. Only for "kept" is ``copy_rows`` called.
        """

    def rows(self, block_hash: bytes) -> AbstractContextManager[SharedRows | None]:
        """The kept block of that hash, protected from eviction inside; None where it is not kept, or the session is
        not in the namespace's generation.
        """

    def reset(self, sequence: int) -> None:
        """The session's RESET record ``sequence`` (R5): doing it twice does it once."""


class BlockSharing:
    """PUBLISH and FILL of one session.

    Attributes:
        membership: the namespace that the session joined; None while it has not. Set by whoever joins it, before the
            call that joins is answered or the consumer of an adopted session starts.
    """

    def __init__(self, segments: SessionSegments, figures: RecordFigures, point: Callable[[str], None]) -> None:
        """point: called between any two shared stores."""
        self.membership: Membership | None = None
        self._segments = segments
        self._figures = figures
        self._point = point

    # ---------------------------------------------------------------- PUBLISH

    def publish(self, record: Record) -> None:
        """Keep each block of the record whose rows are all there."""
        membership, blocks = self.membership, record.named_blocks()
        stores = None if membership is None else self._stores(membership)
        if membership is None or stores is None:
            self._figures.shared(CLOSED if membership is None else INCOMPLETE, len(blocks))
            return
        whole = self._whole(record.runs.astype(np.int64), stores)
        for (block, block_hash), complete in zip(blocks, whole.tolist(), strict=True):
            outcome = INCOMPLETE
            if complete:
                outcome = membership.publish(block_hash, partial(self._copy_out, self._run(block), stores))
                self._point("after_publish")
            self._figures.shared(outcome, 1)

    def _copy_out(self, run: slice, stores: Sequence[KeyStore], kept: SharedRows) -> None:
        for store in stores:
            store.read(run, kept[store.schema.name])
            self._point("after_published_rows")

    def _whole(self, blocks: NDArray[np.int64], stores: Sequence[KeyStore]) -> NDArray[np.bool_]:
        """bool [blocks]: all rows of these keys PRESENT, and of no other key any row."""
        segments = self._segments
        size = segments.geometry.block_size
        slots = (blocks[:, None] * size + np.arange(size)).reshape(-1)
        slot_words: Words = segments.slot_words[slots]
        oldest = np.uint64(segments.epoch_sequence << presence.SLOT_SHIFT | presence.LOST)
        good = slot_words > oldest
        one = np.uint64(1)
        present = slot_words << one | _PRESENT
        mine = {store.key_id for store in stores}
        for store in list(segments.keys.values()):
            claims = store.claims[slots]
            if store.key_id in mine:
                good &= claims == present
            else:
                good &= claims >> np.uint64(presence.CLAIM_SHIFT) < slot_words >> one
        whole: NDArray[np.bool_] = good.reshape(-1, size).all(axis=1)
        return whole

    # ------------------------------------------------------------------- FILL

    def fill(self, record: Record) -> None:
        """Claim each block's slots for this record, and write the rows that the namespace keeps under its hash."""
        membership = self.membership
        stores = None if membership is None else self._stores(membership)
        for block, block_hash in record.named_blocks():
            run = self._run(block)
            if membership is None or stores is None:
                self._lose(run, record.sequence)
                continue
            with membership.rows(block_hash) as kept:
                if kept is not None:
                    self._fill(run, stores, kept, record.sequence)
                elif not self._filled(run, stores, record.sequence):
                    self._lose(run, record.sequence)

    def _fill(self, run: slice, stores: Sequence[KeyStore], kept: SharedRows, sequence: int) -> None:
        span = Span(np.arange(run.start, run.stop, dtype=np.int64), run.stop - run.start, run)
        for store in stores:
            store.claim(span, sequence, failed=False)
            self._point("after_fill_claim")
        self._segments.slot_words[run] = sequence << presence.SLOT_SHIFT
        self._point("after_fill_slot_words")
        for store in stores:
            store.write(run, kept[store.schema.name])
            self._point("after_fill_rows")
            store.mark_written(span, sequence)
            self._point("after_fill_written")
        self._figures.shared(FILLED, 1)

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
        self._figures.shared(MISSING, 1)

    # ------------------------------------------------------------------ shared

    def reset(self, record: Record) -> None:
        """A new epoch of the session (R5)."""
        if self.membership is not None:
            self.membership.reset(record.sequence)
            self._point("after_shared_reset")

    def _run(self, block: int) -> slice:
        size = self._segments.geometry.block_size
        return slice(block * size, (block + 1) * size)

    def _stores(self, membership: Membership) -> list[KeyStore] | None:
        """The session's keys that are the namespace's; None where one is not open with the same rows."""
        by_name = {store.schema.name: store for store in list(self._segments.keys.values())}
        stores = []
        for schema in membership.schemas:
            store = by_name.get(schema.name)
            if store is None or not store.schema.same_rows(schema):
                return None
            stores.append(store)
        return stores
