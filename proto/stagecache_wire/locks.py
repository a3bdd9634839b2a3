"""Who lives: file locks that the kernel gives back when their holder dies.

Each daemon and each worker holds a ``flock`` on a small file in /dev/shm for life. A lock that can be taken says that
its owner is dead; nothing else does, no clock and no lost connection. The descriptor is close-on-exec and closed in
forked children, which would otherwise keep the lock of a dead parent.
"""

from __future__ import annotations

import fcntl
import os
import weakref
from pathlib import Path

_held: weakref.WeakSet[LifeLock] = weakref.WeakSet()


class LockHeldError(RuntimeError):
    """Somebody who lives holds the lock."""


class LifeLock:
    """An exclusive lock on a file, held until ``release`` or death."""

    def __init__(self, path: Path, *, create: bool = True, mode: int = 0o600) -> None:
        """Take the lock.

        Raises:
            LockHeldError: its owner lives.
            FileNotFoundError: no such file, and ``create`` is False.
        """
        self.path = path
        self._fd = -1
        while True:
            flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0)
            fd = os.open(path, flags, mode)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(fd)
                raise LockHeldError(f"{path.name} is locked by a live process") from None
            # The file may have been unlinked between open and flock: then this lock guards nothing.
            try:
                if os.stat(path).st_ino == os.fstat(fd).st_ino:
                    break
            except FileNotFoundError:
                if not create:
                    os.close(fd)
                    raise
            os.close(fd)
        self._fd = fd
        _held.add(self)

    def release(self, *, unlink: bool = False) -> None:
        """Give the lock back; with ``unlink`` the file goes first, under the lock."""
        if self._fd < 0:
            return
        if unlink:
            self.path.unlink(missing_ok=True)
        os.close(self._fd)
        self._fd = -1

    def _close_in_child(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def is_held(path: Path) -> bool:
    """Whether a live process holds the lock at ``path``. A missing file is not held."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def _after_fork_in_child() -> None:
    for lock in list(_held):
        lock._close_in_child()


os.register_at_fork(after_in_child=_after_fork_in_child)
