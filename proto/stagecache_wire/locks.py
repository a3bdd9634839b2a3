"""Who lives: file locks that the kernel gives back when their holder dies.

Each daemon and each worker holds a lock on a small file for life. A lock that is free says that its owner is dead;
nothing else does, no clock and no lost connection. The descriptor is close-on-exec and closed in forked children, which
would otherwise keep the lock of a dead parent.

The locks are Linux's open-file-description locks. They live and die like ``flock``'s, but whether one is held can be
asked without taking it: a look by flock takes a shared lock for a moment, and a daemon that starts in that moment
would believe that another one lives.
"""

from __future__ import annotations

import fcntl
import os
import struct
import time
import weakref
from pathlib import Path
from typing import Final

_FLOCK: Final = struct.Struct("hhqqi4x")
"""struct flock: type, whence, start, length, pid (0 for these locks)."""
_WRITE_LOCK: Final = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0)

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
                fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _WRITE_LOCK)
            except (BlockingIOError, PermissionError):  # EAGAIN or EACCES: both mean that it is held
                os.close(fd)
                raise LockHeldError(f"{path.name} is locked by a live process") from None
            # The file may have been unlinked between open and lock: then this lock guards nothing.
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

    @classmethod
    def wait(cls, path: Path, timeout_s: float, *, create: bool = True) -> LifeLock:
        """Take the lock, which somebody may hold for a moment (a sweep that looks whether its owner lives).

        Raises:
            LockHeldError: still held after ``timeout_s`` seconds.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                return cls(path, create=create)
            except LockHeldError:
                if time.monotonic() >= deadline:
                    raise
                time.sleep(0.01)

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
    """Whether a live process holds the lock at ``path``. A missing file is not held; asking needs no right to write."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        found = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _WRITE_LOCK)
    finally:
        os.close(fd)
    return bool(_FLOCK.unpack(found)[0] != fcntl.F_UNLCK)


def _after_fork_in_child() -> None:
    for lock in list(_held):
        lock._close_in_child()


os.register_at_fork(after_in_child=_after_fork_in_child)
