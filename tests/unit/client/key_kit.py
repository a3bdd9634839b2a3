"""Keys with staging pages in memory of this process."""

from __future__ import annotations

import mmap

from stagecache.mapping import StagedKey
from stagecache_wire import shm
from stagecache_wire.geometry import Geometry, KeySchema, staging_bytes

GEOMETRY = Geometry(8, 4, 16, 2).checked()


def staged(key_id: int, schema: KeySchema) -> StagedKey:
    """A key over memory that nobody shares."""
    size = staging_bytes(GEOMETRY, schema.row_bytes)
    return StagedKey(key_id, schema, shm.Segment(f"key{key_id}", size, mmap.mmap(-1, size)), GEOMETRY)
