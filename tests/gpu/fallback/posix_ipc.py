"""What stagecache uses of posix_ipc, through ctypes: for a machine where nothing can be installed.

For tests/gpu/check.py alone, which puts this folder on the path where the real package is missing.
"""

from __future__ import annotations

import ctypes
import errno
import os
import time
from typing import Any

O_CREAT = os.O_CREAT
O_EXCL = os.O_EXCL
O_CREX = O_CREAT | O_EXCL
STAND_IN = True


class Error(Exception):
    """Base of the package's errors."""


class ExistentialError(Error):
    """The name is taken, or it is nobody's."""


class BusyError(Error):
    """A semaphore did not become free in time."""


class SignalError(Error):
    """A wait was interrupted by a signal."""


def _library() -> Any:
    for name in (None, "librt.so.1", "libpthread.so.0"):
        try:
            library = ctypes.CDLL(name, use_errno=True)
            _ = library.shm_open, library.sem_open
        except (OSError, AttributeError):
            continue
        return library
    raise ImportError("no C library with shm_open and sem_open")


_c = _library()
_c.shm_open.argtypes = (ctypes.c_char_p, ctypes.c_int, ctypes.c_uint)
_c.shm_unlink.argtypes = (ctypes.c_char_p,)
_c.sem_open.argtypes = (ctypes.c_char_p, ctypes.c_int, ctypes.c_uint, ctypes.c_uint)
_c.sem_open.restype = ctypes.c_void_p
_c.sem_unlink.argtypes = (ctypes.c_char_p,)
for _name in ("sem_post", "sem_wait", "sem_trywait", "sem_close"):
    getattr(_c, _name).argtypes = (ctypes.c_void_p,)


class _Timespec(ctypes.Structure):
    _fields_ = (("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long))


_c.sem_timedwait.argtypes = (ctypes.c_void_p, ctypes.POINTER(_Timespec))
_c.sem_getvalue.argtypes = (ctypes.c_void_p, ctypes.POINTER(ctypes.c_int))


def _fail(what: str) -> None:
    number = ctypes.get_errno()
    text = f"{what}: {os.strerror(number)}"
    if number in (errno.EEXIST, errno.ENOENT):
        raise ExistentialError(text)
    if number in (errno.EAGAIN, errno.ETIMEDOUT):
        raise BusyError(text)
    if number == errno.EINTR:
        raise SignalError(text)
    raise OSError(number, text)


class SharedMemory:
    """A shared-memory object, open as ``fd``."""

    def __init__(self, name: str, flags: int = 0, mode: int = 0o600, size: int = 0, read_only: bool = False) -> None:
        self.name = name
        access = os.O_RDONLY if read_only else os.O_RDWR
        self.fd = _c.shm_open(name.encode(), access | flags | os.O_CLOEXEC, mode)
        if self.fd < 0:
            _fail(f"shm_open {name}")
        if size:
            os.ftruncate(self.fd, size)

    def close_fd(self) -> None:
        os.close(self.fd)
        self.fd = -1

    def unlink(self) -> None:
        unlink_shared_memory(self.name)


def unlink_shared_memory(name: str) -> None:
    if _c.shm_unlink(name.encode()) != 0:
        _fail(f"shm_unlink {name}")


class Semaphore:
    """A named semaphore. ctypes gives the interpreter lock up in every call."""

    def __init__(self, name: str, flags: int = 0, mode: int = 0o600, initial_value: int = 0) -> None:
        self.name = name
        self._handle = _c.sem_open(name.encode(), flags, mode, initial_value)
        if not self._handle:
            _fail(f"sem_open {name}")

    @property
    def value(self) -> int:
        found = ctypes.c_int()
        _c.sem_getvalue(self._handle, ctypes.byref(found))
        return found.value

    def release(self) -> None:
        if _c.sem_post(self._handle) != 0:
            _fail("sem_post")

    def acquire(self, timeout: float | None = None) -> None:
        if timeout is None:
            failed = _c.sem_wait(self._handle)
        elif timeout <= 0:
            failed = _c.sem_trywait(self._handle)
        else:
            until = time.time_ns() + int(timeout * 1e9)
            failed = _c.sem_timedwait(self._handle, ctypes.byref(_Timespec(until // 10**9, until % 10**9)))
        if failed:
            _fail("sem_wait")

    def close(self) -> None:
        if self._handle:
            _c.sem_close(self._handle)
            self._handle = None

    def unlink(self) -> None:
        unlink_semaphore(self.name)


def unlink_semaphore(name: str) -> None:
    if _c.sem_unlink(name.encode()) != 0:
        _fail(f"sem_unlink {name}")
