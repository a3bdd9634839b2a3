"""POSIX shared memory and semaphores, mapped and named. One concept a function, no policy.

``multiprocessing.shared_memory`` is not used: on Python below 3.13 its resource tracker unlinks a live segment when a
process that only attached to it exits.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
from dataclasses import dataclass
from pathlib import Path

import posix_ipc

from stagecache_wire.doorbell import Doorbell

SHM_DIRECTORY = Path("/dev/shm")
PREFIX = "stagecache"
MADV_POPULATE_WRITE = 23
_CHUNK = 64 << 20


class ShmFullError(OSError):
    """/dev/shm has no room for a segment."""

    def __init__(self, needed: int, free: int) -> None:
        super().__init__(errno.ENOSPC, f"shared memory needs {needed} bytes, {SHM_DIRECTORY} has {free} free")
        self.needed = needed
        self.free = free


@dataclass(frozen=True)
class Segment:
    """A mapped segment. ``view`` is writable and as long as the segment."""

    name: str
    size: int
    map: mmap.mmap

    @property
    def view(self) -> memoryview:
        return memoryview(self.map)


def free_bytes() -> int:
    """Bytes that /dev/shm can still give out."""
    stat = os.statvfs(SHM_DIRECTORY)
    return stat.f_bavail * stat.f_frsize


def create_segment(name: str, size: int, mode: int = 0o600) -> Segment:
    """Create, allocate and map a segment; its bytes are zero and its memory is really there.

    Raises:
        ShmFullError: no room; nothing is left behind.
    """
    shm = posix_ipc.SharedMemory(f"/{name}", posix_ipc.O_CREX, mode=mode)
    try:
        os.fchmod(shm.fd, mode)
        os.posix_fallocate(shm.fd, 0, size)
        return Segment(name, size, mmap.mmap(shm.fd, size))
    except OSError as error:
        shm.unlink()
        if error.errno == errno.ENOSPC:
            raise ShmFullError(size, free_bytes()) from error
        raise
    finally:
        shm.close_fd()


def open_segment(name: str) -> Segment:
    """Map a segment that exists.

    Raises:
        FileNotFoundError: there is none of that name.
    """
    try:
        shm = posix_ipc.SharedMemory(f"/{name}")
    except posix_ipc.ExistentialError as error:
        raise FileNotFoundError(errno.ENOENT, "shared-memory segment is gone") from error
    try:
        size = os.fstat(shm.fd).st_size
        return Segment(name, size, mmap.mmap(shm.fd, size))
    finally:
        shm.close_fd()


def unlink_segment(name: str) -> None:
    """Remove a segment's name; who has it mapped keeps it. No error where it is gone already."""
    with contextlib.suppress(posix_ipc.ExistentialError):
        posix_ipc.unlink_shared_memory(f"/{name}")


def create_semaphore(name: str, mode: int = 0o600) -> None:
    """A new semaphore of count 0, to be opened by ``open_semaphore``."""
    posix_ipc.Semaphore(f"/{name}", posix_ipc.O_CREX, mode=mode, initial_value=0).close()


def open_semaphore(name: str) -> Doorbell:
    """Its ``close`` must be called: where an object is only dropped, its page stays mapped for the life of the process.

    Raises:
        FileNotFoundError: there is none of that name.
    """
    try:
        return Doorbell(f"/{name}")
    except posix_ipc.ExistentialError as error:
        raise FileNotFoundError(errno.ENOENT, "semaphore is gone") from error


def open_doorbells(first: str, second: str) -> tuple[posix_ipc.Semaphore, posix_ipc.Semaphore]:
    """Both semaphores of a session, or neither.

    Raises:
        FileNotFoundError: one of them is gone.
    """
    one = open_semaphore(first)
    try:
        return one, open_semaphore(second)
    except BaseException:
        one.close()
        raise


def unlink_semaphore(name: str) -> None:
    """Remove a semaphore's name. No error where it is gone already."""
    with contextlib.suppress(posix_ipc.ExistentialError):
        posix_ipc.unlink_semaphore(f"/{name}")


_libc = ctypes.CDLL(None, use_errno=True)


def prefault(segment: Segment, *, live: bool = False) -> None:
    """Map every page of the segment into this process now, so that no later access faults.

    Falls back to touching one byte a page where the kernel is older than 5.14. live: others write to it meanwhile, so
    it is only read there.
    """
    anchor = (ctypes.c_char * segment.size).from_buffer(segment.map)
    address = ctypes.addressof(anchor)
    try:
        for offset in range(0, segment.size, _CHUNK):
            length = min(_CHUNK, segment.size - offset)
            if _libc.madvise(ctypes.c_void_p(address + offset), ctypes.c_size_t(length), MADV_POPULATE_WRITE) != 0:
                for at in range(offset, offset + length, 4096):
                    byte = segment.map[at]
                    if not live:
                        segment.map[at] = byte
    finally:
        del anchor


def lock_memory(segment: Segment) -> str:
    """mlock the segment. Empty where it is locked, else the kernel's reason: as a rule, RLIMIT_MEMLOCK does not allow
    it.
    """
    anchor = (ctypes.c_char * segment.size).from_buffer(segment.map)
    try:
        done = _libc.mlock(ctypes.c_void_p(ctypes.addressof(anchor)), ctypes.c_size_t(segment.size)) == 0
        return "" if done else os.strerror(ctypes.get_errno())
    finally:
        del anchor
