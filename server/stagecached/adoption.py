"""What a starting daemon does with its own leftovers, before it serves: adopt what lives, remove the rest.

A session is adopted where its worker holds its lock, its manifest can be read, it has this ABI and its segments fit.
Of a worker that lives without such a session only the names go: it finds out at its next call, and attaches anew.
Parts that no manifest lists (a kill between making and noting them) are removed, and a key of which a part is gone
(a kill between closing and un-noting it) counts as closed.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import structlog

from stagecache_wire import layout
from stagecache_wire.geometry import BadGeometryError, KeySchema
from stagecache_wire.names import SessionNames
from stagecached import sweep
from stagecached.manifest import Manifest, ManifestError, ManifestStore
from stagecached.segments import AdoptError, SessionSegments
from stagecached.sessions import SessionManager

log = structlog.get_logger()

MOST_STUCK = 2
"""Daemons that one record may bring to an end: a session is not worth those of all others."""

_BASE_PARTS = frozenset({"control", "arena", "slots", "daemon", "worker"})
_KEY_PARTS = ("staging", "pool", "table")


@dataclass(frozen=True)
class Leftovers:
    """Counts of what a start found: sessions adopted, sessions given up, files removed."""

    adopted: int
    lost: int
    removed_files: int


async def take_over(manager: SessionManager, manifests: ManifestStore) -> Leftovers:
    """Adopt or remove every session of this run directory, and sweep what dead daemons elsewhere left.

    The caller holds both locks of the run directory.
    """
    manifests.remove_drafts()
    adopted = lost = removed = 0
    found = sweep.node_groups().get(manager.node, sweep.NodeGroup(manager.node)).sessions
    noted = set(manifests.session_ids())
    for session_id in sorted({*found, *noted}):
        files = found.get(session_id, [])
        swept = sweep.sweep_session(manager.node, session_id, files=files)
        if swept is not None:
            manifests.remove(session_id)
            removed += swept
            lost += 1
        elif session_id not in noted and {sweep.part_of(path) for path in files} <= {"lock"}:
            manager.expect(session_id)  # A client that has no session yet, or none at all: a scheduler with leases.
        elif await _adopt(manager, manifests, session_id, files):
            adopted += 1
        else:
            manifests.remove(session_id)
            removed += sweep.remove_files(files)
            manager.shared.owner_gone(session_id)
            manager.expect(session_id)
            lost += 1
    removed += sweep.sweep_other_nodes(manager.node)
    return Leftovers(adopted, lost, removed)


async def _adopt(manager: SessionManager, manifests: ManifestStore, session_id: str, files: list[Path]) -> bool:
    """Adopt the session of a worker that lives. files: the session's. False where it cannot be."""
    started = time.monotonic()
    try:
        manifest = manifests.load(session_id)
        segments = await manager.background.in_thread(lambda: _map(manager, manifest, files))
        sequence, times = manifests.stuck(session_id)
        if times >= MOST_STUCK and sequence == segments.consumed + 1:
            segments.words[layout.D_FAIL_SEQUENCE] = sequence
            segments.status = layout.STATUS_FAILED
            segments.close()
            raise AdoptError(f"{times} daemons were stuck in its record {sequence}")
    except (ManifestError, AdoptError, BadGeometryError) as error:
        log.warning("session cannot be adopted", session=session_id, why=str(error))
        return False
    if len(segments.keys) != len(manifest.keys):
        manifest.keys = [key for key in manifest.keys if key.key_id in segments.keys]
        manifests.save(manifest)
    manager.adopt(manifest, segments)
    log.info(
        "session adopted",
        session=session_id,
        model=manifest.model,
        stage=manifest.stage,
        backlog=segments.head - segments.consumed,
        took_s=round(time.monotonic() - started, 3),
    )
    return True


def _map(manager: SessionManager, manifest: Manifest, files: list[Path]) -> SessionSegments:
    """The session's segments, mapped and checked.

    Raises:
        AdoptError: another ABI, a session that had ended, or segments that do not fit.
        BadGeometryError: the manifest has numbers that were never granted.
    """
    if manifest.abi != layout.ABI:
        raise AdoptError(f"its shared-memory ABI is {manifest.abi}, this daemon's is {layout.ABI}")
    names = SessionNames(manager.node, manifest.session_id)
    parts = frozenset(sweep.part_of(path) for path in files)
    keys: dict[int, KeySchema] = {}
    listed = set(_BASE_PARTS)
    for key in manifest.keys:
        own = {f"{part}{key.key_id}" for part in _KEY_PARTS}
        if own <= parts:
            keys[key.key_id] = key.to_schema().checked()
            listed |= own
    sweep.remove_files(files, keep=frozenset(listed))
    segments = SessionSegments.adopt(names, manifest.geometry.to_geometry().checked(), keys, manager.boot_id)
    if segments.status == layout.STATUS_ENDED:
        segments.close()
        raise AdoptError("it had ended")
    return segments
