"""One daemon a run directory: the directory, and the two locks that are taken before anything is bound or swept.

``<socket>.d/daemon.lock`` keeps a second daemon off this socket (gRPC would silently steal the path); the lock in
/dev/shm says to daemons of other run directories that what stands beside it has an owner. Both name their holder.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import time
from pathlib import Path
from typing import Final

from stagecache_wire.locks import LifeLock, LockHeldError
from stagecache_wire.names import RunPaths
from stagecached.access import Access

SHM_LOCK_TIMEOUT_S: Final = 5.0
"""A sweep of another daemon may hold our lock in /dev/shm for a moment."""


class StartError(RuntimeError):
    """The daemon cannot start here; the text says why and what to do."""


class RunDirectory:
    """The claimed run directory; release it last."""

    def __init__(self, paths: RunPaths, lock: LifeLock, shm_lock: LifeLock) -> None:
        self.paths = paths
        self.node = paths.node
        self._lock = lock
        self._shm_lock = shm_lock

    @classmethod
    def claim(cls, paths: RunPaths, access: Access) -> RunDirectory:
        """Make the run directory where it is missing and take both locks.

        Raises:
            StartError: another daemon lives here, or the directory is not ours to use.
        """
        try:
            _make_directory(paths.socket.parent, access, ours=False)
            _make_directory(paths.directory, access, ours=True)
            _make_directory(paths.sessions, Access(), ours=True)
            _make_directory(paths.namespaces, Access(), ours=True)
        except OSError as error:
            raise StartError(
                f"the run directory {paths.directory} cannot be used: {error.strerror}. Choose a --socket in a "
                f"directory that uid {os.geteuid()} may write to."
            ) from error
        try:
            lock = LifeLock(paths.lock)
        except LockHeldError:
            raise StartError(
                f"another stagecached serves {paths.socket}: {_holder(paths.lock)}. Stop it, or choose another "
                "--socket."
            ) from None
        try:
            shm_lock = LifeLock.wait(paths.shm_lock, SHM_LOCK_TIMEOUT_S)
        except LockHeldError:
            holder = _holder(paths.shm_lock)
            lock.release()
            raise StartError(
                f"the shared memory of {paths.directory} is in use: {holder}. Stop it, or choose another --socket."
            ) from None
        for held in (lock, shm_lock):
            _write_holder(held.path, paths)
            access.open_file(held.path)  # A worker of the group asks whether we live.
        return cls(paths, lock, shm_lock)

    def remove_stale_socket(self) -> None:
        """Remove a socket file that a dead daemon left; safe, since its lock is ours.

        Raises:
            StartError: something else stands at that path.
        """
        path = self.paths.socket
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISSOCK(path.lstat().st_mode):
                raise StartError(f"{path} exists and is no socket. Remove it, or choose another --socket.")
            path.unlink()

    def release(self, *, keep_sessions: bool) -> None:
        """Give both locks back; the one in /dev/shm is removed unless sessions stay for the next daemon."""
        self._shm_lock.release(unlink=not keep_sessions)
        self._lock.release(unlink=True)


def _make_directory(path: Path, access: Access, *, ours: bool) -> None:
    """Make a directory; one of ours that exists gets its mode again and must belong to this user."""
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        status = path.lstat()
        if not ours:
            return
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
            raise StartError(
                f"{path} is no directory of uid {os.geteuid()}. Remove it, or choose another --socket."
            ) from None
    access.open_directory(path)


def _write_holder(path: Path, paths: RunPaths) -> None:
    """For people; so a full /dev/shm does not keep a daemon from its sessions."""
    with contextlib.suppress(OSError):
        path.write_text(
            json.dumps({"pid": os.getpid(), "started_unix_s": int(time.time()), "directory": str(paths.directory)})
        )


def _holder(path: Path) -> str:
    """Who wrote himself into a lock file, for people."""
    try:
        holder = json.loads(path.read_text())
        age_s = int(time.time() - holder["started_unix_s"])
        return f"pid {holder['pid']}, run directory {holder['directory']}, started {age_s} s ago"
    except (OSError, ValueError, KeyError, TypeError):
        return "its holder did not say who it is"
