"""Removes what dead daemons and dead workers left in /dev/shm: never anything whose owner lives.

A node group (all names with one ``<node>``) is touched only where its daemon's lock can be taken, a session of it
only where its worker's lock can be taken too. Names of another form, and files of another user, are never touched.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import structlog

from stagecache_wire import locks
from stagecache_wire.names import SessionNames
from stagecache_wire.shm import PREFIX, SHM_DIRECTORY

_NAME: Final = re.compile(
    rf"(?:sem\.)?{re.escape(PREFIX)}\.(?P<node>[0-9a-f]{{12}})"
    rf"(?:\.(?P<session>[0-9a-f]{{16}})\.(?P<part>[a-z]+[0-9]*)|\.lock|(?P<shared>\.shared\.[0-9a-f]{{16}}))"
)

log = structlog.get_logger()


@dataclass
class NodeGroup:
    """All files of one node: those of its sessions, by id, and the segments of its shared blocks."""

    node: str
    sessions: dict[str, list[Path]] = field(default_factory=dict)
    shared: list[Path] = field(default_factory=list)


def node_groups(directory: Path = SHM_DIRECTORY) -> dict[str, NodeGroup]:
    """This user's files in ``directory`` that have our prefix and form, by node.

    It looks at every file there: a start does it once, not once a session.
    """
    groups: dict[str, NodeGroup] = {}
    for name in os.listdir(directory):
        match = _NAME.fullmatch(name)
        if match is None or not _is_own(path := directory / name):
            continue
        group = groups.setdefault(match["node"], NodeGroup(match["node"]))
        if match["session"]:
            group.sessions.setdefault(match["session"], []).append(path)
        elif match["shared"]:
            group.shared.append(path)
    return groups


def sweep_other_nodes(own_node: str, directory: Path = SHM_DIRECTORY) -> int:
    """Remove what dead daemons of other run directories left. Returns the number of files removed.

    A session whose worker still lives is kept, and its node's shared blocks and lock file with it: a daemon may come
    back for them, and the next sweep looks again.
    """
    removed = 0
    for node, group in node_groups(directory).items():
        if node == own_node:
            continue
        lock = _taken(directory / f"{PREFIX}.{node}.lock")
        if lock is None:
            continue
        kept = False
        for session_id, files in group.sessions.items():
            count = sweep_session(node, session_id, directory, files=files)
            kept = kept or count is None
            removed += count or 0
        if not kept:
            removed += remove_shared_files(node, directory)
        lock.release(unlink=not kept)
        removed += 0 if kept else 1
    return removed


def sweep_session(
    node: str, session_id: str, directory: Path = SHM_DIRECTORY, *, files: Iterable[Path] | None = None
) -> int | None:
    """Remove all files of a session whose worker is dead; the caller holds the node's lock. files: the session's.

    Returns the number of files removed, or None where the worker lives and nothing was touched.
    """
    lock = _taken(directory / SessionNames(node, session_id).worker_lock.name)
    if lock is None:
        return None
    removed = remove_files(session_files(node, session_id, directory) if files is None else files)
    lock.release(unlink=True)
    return removed + 1


def remove_session_files(node: str, session_id: str, directory: Path = SHM_DIRECTORY) -> int:
    """``remove_files`` of all files of a session."""
    return remove_files(session_files(node, session_id, directory))


def remove_files(files: Iterable[Path], *, keep: frozenset[str] = frozenset()) -> int:
    """Unlink segments and semaphores of a session, but not its worker's lock file, nor a part named in ``keep``.

    Only for a caller who knows that the session is dead or his own. Returns the number of files removed.
    """
    removed = 0
    for path in files:
        part = part_of(path)
        if part == "lock" or part in keep:
            continue
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
            removed += 1
    return removed


def remove_shared_files(node: str, directory: Path = SHM_DIRECTORY, *, keep: Collection[str] = ()) -> int:
    """Unlink the segments of a node's shared blocks, but those named in ``keep``; the caller holds the node's lock.

    Returns the number of files removed.
    """
    removed = 0
    for path in node_groups(directory).get(node, NodeGroup(node)).shared:
        if path.name not in keep:
            path.unlink(missing_ok=True)
            removed += 1
    return removed


def remove_worker_lock(names: SessionNames) -> None:
    """Remove the lock file of a worker that is dead or has detached."""
    names.worker_lock.unlink(missing_ok=True)


def _taken(path: Path) -> locks.LifeLock | None:
    """The lock at ``path``, or None where its owner lives or is another user's."""
    try:
        return locks.LifeLock(path)
    except (locks.LockHeldError, PermissionError):
        return None


def _is_own(path: Path) -> bool:
    try:
        return path.lstat().st_uid == os.geteuid()
    except FileNotFoundError:
        return False


def session_files(node: str, session_id: str, directory: Path = SHM_DIRECTORY) -> list[Path]:
    """This user's files of one session; no other file is looked at."""
    stem = f"{PREFIX}.{node}.{session_id}."
    names = [name for name in os.listdir(directory) if name.startswith((stem, f"sem.{stem}"))]
    return [directory / name for name in names if _NAME.fullmatch(name) and _is_own(directory / name)]


def part_of(path: Path) -> str:
    """Which part of its session a file is."""
    return path.name.rpartition(".")[2]
