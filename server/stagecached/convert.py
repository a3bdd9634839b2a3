"""Between wire messages and the daemon's own types, every number checked on the way in."""

from __future__ import annotations

from typing import Final

from stagecache_wire.geometry import MAX_KEYS, BadGeometryError, Geometry, KeySchema
from stagecache_wire.messages import geometry_from_wire, geometry_to_wire, schema_from_wire, schema_to_wire
from stagecache_wire.v1 import stagecache_pb2 as pb
from stagecached.keystore import KeyStore
from stagecached.refusal import Refusal
from stagecached.segments import SessionSegments
from stagecached.session import AttachSpec, Session

MAX_NAME_BYTES: Final = 512


def attach_spec(request: pb.AttachRequest) -> AttachSpec:
    """Raises: Refusal, BAD_GEOMETRY or TOO_MANY, naming the first number that does not fit."""
    for what, name in (("model", request.model), ("stage", request.stage), ("engine", request.engine or "-")):
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
        geometry=checked_geometry(request.geometry),
        keys=tuple(checked_schema(key) for key in request.keys),
        open_remembered_keys=request.open_remembered_keys,
        engine=request.engine,
    )


def checked_geometry(geometry: pb.Geometry) -> Geometry:
    """The geometry as it would be granted. Raises: Refusal, BAD_GEOMETRY."""
    try:
        return geometry_from_wire(geometry).checked()
    except BadGeometryError as error:
        raise _bad_geometry(error) from error


def checked_schema(key: pb.KeySchema) -> KeySchema:
    """Raises: Refusal, BAD_GEOMETRY."""
    try:
        schema = schema_from_wire(key).checked()
    except BadGeometryError as error:
        raise _bad_geometry(error) from error
    if key.row_bytes not in (0, schema.row_bytes):
        raise _bad_geometry(
            f"key {key.name}: row_bytes is {key.row_bytes}, {schema.dtype} {schema.row_shape} has {schema.row_bytes}"
        )
    return schema


def _bad_geometry(why: object) -> Refusal:
    return Refusal(pb.REASON_BAD_GEOMETRY, f"{why}.", "Correct the sizes that the worker asks for.")


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
