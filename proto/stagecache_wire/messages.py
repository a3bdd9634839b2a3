"""Geometry and key schemas as messages, both ways, for both sides. Nothing is checked here: the daemon checks what
comes in, the types say what may be (``Geometry.checked``, ``KeySchema.checked``).
"""

from __future__ import annotations

from stagecache_wire.geometry import Geometry, KeySchema
from stagecache_wire.v1 import stagecache_pb2 as pb


def geometry_to_wire(geometry: Geometry) -> pb.Geometry:
    """Field by field."""
    return pb.Geometry(
        num_blocks=geometry.num_blocks,
        block_size=geometry.block_size,
        staging_capacity_tokens=geometry.staging_capacity_tokens,
        staging_depth=geometry.staging_depth,
        arena_bytes=geometry.arena_bytes,
        max_results=geometry.max_results,
    )


def geometry_from_wire(geometry: pb.Geometry) -> Geometry:
    """Field by field."""
    return Geometry(
        num_blocks=geometry.num_blocks,
        block_size=geometry.block_size,
        staging_capacity_tokens=geometry.staging_capacity_tokens,
        staging_depth=geometry.staging_depth,
        arena_bytes=geometry.arena_bytes,
        max_results=geometry.max_results,
    )


def schema_to_wire(schema: KeySchema) -> pb.KeySchema:
    """Field by field, with the derived bytes of a row."""
    return pb.KeySchema(
        name=schema.name,
        dtype=schema.dtype,
        row_shape=schema.row_shape,
        row_bytes=schema.row_bytes,
        provisional=schema.provisional,
    )


def schema_from_wire(key: pb.KeySchema) -> KeySchema:
    """Field by field; the derived bytes of a row are left out."""
    return KeySchema(key.name, key.dtype, tuple(key.row_shape), key.provisional)
