"""One session in one namespace: the seam between a session's consumer and the shared blocks.

    publish   PUBLISH records: keep the rows of a full block under its hash
    rows      FILL records: read the rows of shared blocks, which are not evicted meanwhile
    reset     RESET records: from here on, this session shares with nobody that did not make the same decision

Generations (R5). A join says that the model is what the fingerprint names, so sessions that joined and were not reset
since may read each other's rows. After a reset nobody but the session itself knows what its rows are computed with:
it goes on in a generation of its own, and what it left is not found by sessions that join later. It comes back among
the others by joining again, which says anew what the model is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from stagecached.shared.segment import SharedRows
from stagecached.shared.store import NamespaceStore, PublishOutcome

CopyIn = Callable[[SharedRows], bool]
"""Writes a block's rows into the shared block. False: they are not to be kept (PublishOutcome.CHANGED)."""


class Membership:
    """Thread-safe. Ended, it answers NOT_JOINED and finds nothing."""

    def __init__(
        self,
        store: NamespaceStore,
        key_ids: Mapping[int, int],
        generation: int,
        note_generation: Callable[[int], None],
    ) -> None:
        """key_ids: the session's key id to the position in ``store.geometry.keys``, all of them.
        generation: as noted before, or the store's base; note_generation(generation) makes a new one durable with the
        session, by one store.
        """
        self.store = store
        self.key_ids = dict(key_ids)
        self.ended = False
        self._generation = generation
        self._note_generation = note_generation
        with store.lock:
            store.generations[generation] = store.generations.get(generation, 0) + 1
        note_generation(generation)

    @property
    def generation(self) -> int:
        return self._generation

    def publish(self, block_hash: bytes, copy_rows: CopyIn) -> PublishOutcome:
        """Keep one block. ``copy_rows`` is called at most once, on this thread, and only where there is something to
        copy. Blocks of one prefix are best published last one first, so that the tail is evicted first.
        """
        generation = self._generation

        def copy(regions: Sequence[NDArray[np.void]]) -> bool:
            return copy_rows(self._by_key(regions))

        return self.store.publish(
            block_hash, generation, copy, lambda: not self.ended and self._generation == generation
        )

    @contextmanager
    def rows(self, block_hashes: Sequence[bytes]) -> Iterator[list[SharedRows | None]]:
        """Rows of the blocks that hold these contents, in order; None where one is not there. To be read only while
        inside.
        """
        if self.ended:
            yield [None] * len(block_hashes)
            return
        regions = self.store.segment.regions
        with self.store.pinned(block_hashes, self._generation) as block_ids:
            yield [
                None if block_id is None else self._by_key([region[block_id] for region in regions])
                for block_id in block_ids
            ]

    def reset(self) -> None:
        """Leave the present generation for one of its own. Doing it twice does no harm: nothing is stored between."""
        store = self.store
        with store.lock:
            if self.ended:
                return
            fresh = store.new_generation()
            store.retire(self._generation)
            self._leave_generation()
            store.generations[fresh] = 1
            self._note_generation(fresh)
            store.point("after_session_generation")
            self._generation = fresh
        store.drop_unreachable()

    def end(self) -> None:
        """Nothing is published or read any more; a copy that is under way is not kept. May be called again."""
        with self.store.lock:
            if self.ended:
                return
            self.ended = True
            self._leave_generation()
        self.store.drop_unreachable()

    def _leave_generation(self) -> None:
        left = self.store.generations[self._generation] - 1
        if left:
            self.store.generations[self._generation] = left
        else:
            del self.store.generations[self._generation]

    def _by_key(self, regions: Sequence[NDArray[np.void]]) -> SharedRows:
        return SharedRows(MappingProxyType({key_id: regions[at] for key_id, at in self.key_ids.items()}))
