"""Between wire messages and the daemon's own types, every number checked on the way in."""

from __future__ import annotations

from typing import Final

from stagecache_wire.geometry import MAX_KEYS, BadGeometryError, Geometry, KeySchema
from stagecache_wire.v1 import stagecache_pb2 as pb
from stagecached.keystore import KeyStore
from stagecached.refusal import Refusal
from stagecached.segments import SessionSegments
from stagecached.session import AttachSpec, Session

MAX_NAME_BYTES: Final = 512


def attach_spec(request: pb.AttachRequest) -> AttachSpec:
    """Raises: Refusal, BAD_GEOMETRY or TOO_MANY, naming the first number that does not fit."""
    for what, name in (("model", request.model), ("stage", request.stage)):
        if not 0 < len(name.encode()) <= MAX_NAME_BYTES:
            raise Refusal(
                pb.REASON_BAD_GEOMETRY, f"{what} has {len(name.encode())} bytes, allowed are 1 to {MAX_NAME_BYTES}."
            )
    if len(request.keys) > MAX_KEYS:
        raise Refusal(pb.REASON_TOO_MANY, f"{len(request.keys)} keys are asked for, {MAX_KEYS} may be open.")
    return AttachSpec(
        model=request.model,
        stage=request.stage,
        pid=request.pid,
        rank=request.rank,
        geometry=geometry_from_wire(request.geometry),
        keys=tuple(schema_from_wire(key) for key in request.keys),
        open_remembered_keys=request.open_remembered_keys,
    )


def geometry_from_wire(geometry: pb.Geometry) -> Geometry:
    """The geometry as it would be granted. Raises: Refusal, BAD_GEOMETRY."""
    try:
        return Geometry(
            num_blocks=geometry.num_blocks,
            block_size=geometry.block_size,
            staging_capacity_tokens=geometry.staging_capacity_tokens,
            staging_depth=geometry.staging_depth,
            arena_bytes=geometry.arena_bytes,
            max_results=geometry.max_results,
        ).checked()
    except BadGeometryError as error:
        raise _bad_geometry(error) from error


def schema_from_wire(key: pb.KeySchema) -> KeySchema:
    """Raises: Refusal, BAD_GEOMETRY."""
    try:
        schema = KeySchema(key.name, key.dtype, tuple(key.row_shape), key.provisional).checked()
    except BadGeometryError as error:
        raise _bad_geometry(error) from error
    if key.row_bytes not in (0, schema.row_bytes):
        raise _bad_geometry(
            f"key {key.name}: row_bytes is {key.row_bytes}, {schema.dtype} {schema.row_shape} has {schema.row_bytes}"
        )
    return schema


def _bad_geometry(why: object) -> Refusal:
    return Refusal(pb.REASON_BAD_GEOMETRY, f"{why}.", "Correct the sizes that the worker asks for.")


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


def schema_to_wire(schema: KeySchema) -> pb.KeySchema:
    """Field by field, with the derived bytes of a row."""
    return pb.KeySchema(
        name=schema.name,
        dtype=schema.dtype,
        row_shape=schema.row_shape,
        row_bytes=schema.row_bytes,
        provisional=schema.provisional,
    )


def open_key_response(segments: SessionSegments, store: KeyStore) -> pb.OpenKeyResponse:
    """What a worker must know of an open key."""
    return pb.OpenKeyResponse(
        key_id=store.key_id,
        key=schema_to_wire(store.schema),
        staging_segment=segments.names.staging(store.key_id),
    )


def attach_response(session: Session, boot_id: int) -> pb.AttachResponse:
    """What a worker must know of its session. Names of pools and tables are the daemon's alone."""
    segments, names = session.segments, session.names
    return pb.AttachResponse(
        boot_id=boot_id,
        geometry=geometry_to_wire(segments.geometry),
        control_segment=names.control,
        arena_segment=names.arena,
        daemon_doorbell=names.daemon_doorbell,
        worker_doorbell=names.worker_doorbell,
        keys=[open_key_response(segments, store) for _, store in sorted(segments.keys.items())],
        epoch=segments.epoch,
    )
