"""A named semaphore whose timed wait no change of the wall clock can lengthen or shorten.

``sem_timedwait``, all that posix_ipc has, waits for a moment of CLOCK_REALTIME: where that is set back by an hour
during a wait of 20 ms, the wait takes an hour. glibc 2.30 has ``sem_clockwait``, which takes CLOCK_MONOTONIC. Elsewhere
the wait of posix_ipc stays.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import time
from typing import Any, Final

import posix_ipc


class _Timespec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


_libc: Final = ctypes.CDLL(None, use_errno=True)
_clockwait: Final = getattr(_libc, "sem_clockwait", None)
if _clockwait is not None:
    _clockwait.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.POINTER(_Timespec))
_libc.sem_open.argtypes = (ctypes.c_char_p, ctypes.c_int)
_libc.sem_open.restype = ctypes.c_void_p
_libc.sem_close.argtypes = (ctypes.c_void_p,)


class Doorbell(posix_ipc.Semaphore):  # type: ignore[misc]
    """An existing semaphore, by its name as posix_ipc writes it."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._handle: Any = _libc.sem_open(name.encode(), 0) if _clockwait is not None else None

    def acquire(self, timeout: float | None = None) -> None:
        """Take one, waiting for ``timeout`` seconds at most. A signal does not end the wait.

        Raises:
            posix_ipc.BusyError: none came.
        """
        if timeout is None or not self._handle:
            super().acquire(timeout)
            return
        with contextlib.suppress(posix_ipc.BusyError):
            super().acquire(0)  # 0.2 µs where it was rung already
            return
        until = time.monotonic() + max(timeout, 0.0)
        moment = _Timespec(int(until), int(until % 1 * 1e9))
        assert _clockwait is not None
        while _clockwait(self._handle, time.CLOCK_MONOTONIC, ctypes.byref(moment)) != 0:
            code = ctypes.get_errno()
            if code != errno.EINTR:
                raise (
                    posix_ipc.BusyError("the semaphore is busy")
                    if code == errno.ETIMEDOUT
                    else OSError(code, "sem_clockwait")
                )

    def close(self) -> None:
        """Let go of it, once."""
        handle, self._handle = self._handle, None
        if handle:
            _libc.sem_close(handle)
        super().close()
