"""Real shared blocks in this process, and the memberships by which sessions' consumers reach them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from stagecache_wire.geometry import KeySchema
from stagecached.segments import SessionSegments
from stagecached.shared.layout import SharedGeometry
from stagecached.shared.membership import Membership
from stagecached.shared.segment import SharedSegment
from stagecached.shared.store import NamespaceStore
from tests.unit.server.session_kit import GEOMETRY
from tests.unit.server.shared.kit import DIGEST, segment_name


class Namespace:
    """Blocks of some keys."""

    def __init__(self, segment: SharedSegment) -> None:
        self.store = NamespaceStore(segment)
        self._keys = segment.geometry.keys

    def join(self, segments: SessionSegments, generation: int | None = None) -> Membership:
        """What the daemon does for a session that joins; a key of the namespace that it lacks gets an id of nobody."""
        ids = {store.schema: key_id for key_id, store in segments.keys.items()}
        key_ids = {ids.get(schema, 900 + at): at for at, schema in enumerate(self._keys)}
        segments.shared = Membership(
            self.store, key_ids, self.store.base_generation if generation is None else generation, lambda _: None
        )
        return segments.shared

    def rows(self, membership: Membership, block_hash: bytes, schema: KeySchema) -> bytes | None:
        """A key's rows of a kept block."""
        key_id = next(key_id for key_id, at in membership.key_ids.items() if self._keys[at] == schema)
        with membership.rows([block_hash]) as (found,):
            return None if found is None else found.by_key[key_id].tobytes()

    def evict_all(self) -> None:
        """As other blocks would, in time."""
        with self.store.lock:
            self.store.pool.evict_blocks(range(self.store.geometry.num_blocks))


@contextmanager
def namespace(keys: Sequence[KeySchema], num_blocks: int = 16) -> Iterator[Namespace]:
    with segment_name() as name:
        segment = SharedSegment.create(name, SharedGeometry(DIGEST, num_blocks, GEOMETRY.block_size, tuple(keys)))
        try:
            yield Namespace(segment)
        finally:
            segment.unlink()
