"""One snapshot of the daemon and its sessions, for people and for tests."""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from stagecache_wire import layout, messages
from stagecache_wire.figures import Worker
from stagecache_wire.v1 import stagecache_pb2 as pb
from stagecached.keystore import KeyStore
from stagecached.session import Session


def package_version() -> str:
    """The installed release."""
    try:
        return version("stagecache")
    except PackageNotFoundError:
        return "unknown"


def resident_bytes() -> int:
    """Resident memory of this process, mapped segments included."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def session_stats(session: Session) -> pb.SessionStats:
    """Reads whole tables: run it in a thread, with the session in use."""
    segments, manifest, words = session.segments, session.manifest, session.segments.words
    return pb.SessionStats(
        session_id=session.session_id,
        model=manifest.model,
        stage=manifest.stage,
        pid=manifest.pid,
        rank=manifest.rank,
        geometry=messages.geometry_to_wire(segments.geometry),
        keys=[_key_stats(session, store) for _, store in sorted(segments.keys.copy().items())],
        head=segments.head,
        consumed=segments.consumed,
        epoch=segments.epoch,
        steps=words[layout.W_STEPS],
        bytes=session.budget_bytes,
        state=session.state.value,
        failure=session.failure,
        hits=words[layout.D_SPANS],
        hit_rows=words[layout.D_SPAN_ROWS],
        unknown_rows=words[layout.D_UNKNOWN_ROWS],
        adopted=session.adopted,
        attached_unix_s=manifest.attached_unix_s,
        pinned_bytes=words[layout.W_FIGURES + Worker.PINNED_BYTES],
        unpinned_bytes=words[layout.W_FIGURES + Worker.UNPINNED_BYTES],
        engine=manifest.engine,
        namespace_id="" if segments.shared is None else manifest.namespace,
        generation=words[layout.D_SHARED_GENERATION],
    )


def _key_stats(session: Session, store: KeyStore) -> pb.KeyStats:
    segments = session.segments
    return pb.KeyStats(
        key=messages.schema_to_wire(store.schema),
        key_id=store.key_id,
        pool_bytes=store.pool_bytes,
        staging_bytes=store.staging_bytes,
        rows_scattered=store.rows_scattered,
        rows_gathered=store.rows_gathered,
        present_slots=store.present_slots(segments.slot_words, segments.epoch_sequence),
        locked=store.locked,
        lockable_bytes=store.total_bytes,
        locked_bytes=store.locked_bytes,
        unlocked_why=store.unlocked_why,
    )
