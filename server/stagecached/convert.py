"""Between wire messages and the daemon's own types, every number checked on the way in."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from stagecache_wire.geometry import MAX_KEYS, BadGeometryError, Geometry, KeySchema
from stagecache_wire.messages import geometry_from_wire, geometry_to_wire, schema_from_wire, schema_to_wire
from stagecache_wire.v1 import stagecache_pb2 as pb
from stagecached.index import Namespace, UnsupportedHash
from stagecached.keystore import KeyStore
from stagecached.refusal import Refusal
from stagecached.segments import SessionSegments
from stagecached.session import AttachSpec, Session
from stagecached.shared.manifest import namespace_of

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


def joined_keys(session: Session, key_ids: Sequence[int]) -> dict[int, KeySchema]:
    """The keys that a shared block is to consist of, by id; all that are open and confirmed where none is named.

    Raises:
        Refusal: a key that is not open, named twice or provisional; no key at all.
    """
    stores = session.segments.keys.copy()
    for key_id in key_ids:
        if key_id not in stores:
            raise Refusal(pb.REASON_UNKNOWN_KEY, f"key id {key_id} is not open in this session.")
    if len(set(key_ids)) != len(key_ids):
        raise Refusal(pb.REASON_UNKNOWN_KEY, "a key is named twice.", "Name each key once.")
    named = {key_id: stores[key_id].schema for key_id in key_ids or stores}
    provisional = [schema.name for schema in named.values() if schema.provisional]
    if key_ids and provisional:
        raise Refusal(
            pb.REASON_SCHEMA_MISMATCH,
            f"key {provisional[0]} is provisional: it was only seen in pure decode steps, and may yet be given up.",
            "Join again once a prefill has confirmed it.",
        )
    keys = {key_id: schema for key_id, schema in named.items() if not schema.provisional}
    if not keys:
        raise Refusal(pb.REASON_UNKNOWN_KEY, "no key is open that a block could consist of.", "Open its keys first.")
    return keys


def joined_namespace(session: Session, request: pb.JoinNamespaceRequest, keys: Iterable[KeySchema]) -> Namespace:
    """The namespace that a session asks for, every field checked. Raises: Refusal."""
    texts = (request.model_fingerprint, request.hash_algorithm, request.hash_seed, request.dtype)
    if any(len(text.encode()) > MAX_NAME_BYTES for text in texts) or not request.model_fingerprint:
        raise Refusal(
            pb.REASON_BAD_GEOMETRY,
            f"fingerprint, hash algorithm, seed and dtype have at most {MAX_NAME_BYTES} bytes each, and a fingerprint "
            "must be given.",
        )
    try:
        return namespace_of(
            tuple(keys),
            model_fingerprint=request.model_fingerprint,
            hash_algorithm=request.hash_algorithm,
            hash_seed=request.hash_seed,
            stage=session.manifest.stage,
            dtype=request.dtype,
            block_size=session.segments.geometry.block_size,
            tensor_parallel_size=request.tensor_parallel_size,
        )
    except UnsupportedHash as error:
        raise Refusal(pb.REASON_UNSUPPORTED_HASH, f"{error}.") from error
    except ValueError as error:
        raise _bad_geometry(error) from error


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
