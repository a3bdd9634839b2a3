"""Many small objects that live as long as their namespace: out of the collector's sight, and on huge pages.

    with lasting():
        pool = BlockPool(1_000_000)

- A full collection looks at every object, for 0.6 s at 1,000,000 blocks, and stops all threads meanwhile; making them
  sets off several. What was made inside is never looked at again: it goes by its references, so whoever drops it must
  break its cycles (``BlockPool.close``).
- Looking up, caching and evicting a block touch tables of many MiB at random places. On pages of 4 KiB each touch also
  misses the processor's table of address translations, which costs as much as the memory, more in a virtual machine.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

MADV_HUGEPAGE: Final = 14
MADV_COLLAPSE: Final = 25
"""Linux 6.1: now, not when khugepaged comes by."""
HUGE: Final = 2 << 20
"""Bytes of a huge page."""
SMALL: Final = mmap.PAGESIZE
"""Bytes of any other."""
LEAST_BYTES: Final = 4 * HUGE
"""Smaller mappings stay as they are."""
MAPS: Final = Path("/proc/self/maps")

_ANONYMOUS: Final = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) rw-p 00000000 00:00 0 *(\[heap\])?$", re.MULTILINE)

_LOWEST_BIT: Final = bytes(value & 1 for value in range(256))
"""A translation of mincore's bytes: of each only this bit has a meaning."""

_libc = ctypes.CDLL(None, use_errno=True)
_one_at_a_time = threading.Lock()


@contextmanager
def lasting() -> Iterator[None]:
    """Any thread. Cyclic garbage of other threads that was not collected before stays as well: there is little."""
    with _one_at_a_time:
        gc.collect()
        was_on = gc.isenabled()
        gc.disable()
        try:
            yield
            gc.freeze()
        finally:
            if was_on:
                gc.enable()
    use_huge_pages()


def use_huge_pages() -> int:
    """Ask for huge pages wherever a private mapping of ``LEAST_BYTES`` or more is mostly in memory already; how many
    bytes were asked for. What was reserved and not touched, such as stacks of threads, stays as small as it is.

    A hint: where the kernel has none to give, or knows no such advice, nothing changes.
    """
    asked = 0
    for found in _ANONYMOUS.finditer(MAPS.read_text()):
        start, end = int(found[1], 16), int(found[2], 16)
        first, last = -(-start // HUGE) * HUGE, end // HUGE * HUGE
        if end - start >= LEAST_BYTES and last > first:
            for at, size in _resident(first, last):
                address, length = ctypes.c_void_p(at), ctypes.c_size_t(size)
                if _libc.madvise(address, length, MADV_HUGEPAGE) == 0:
                    _libc.madvise(address, length, MADV_COLLAPSE)
                    asked += size
    return asked


def _resident(first: int, last: int) -> Iterator[tuple[int, int]]:
    """(address, bytes) of parts of which every huge page's worth is at least half in memory."""
    pages = (ctypes.c_ubyte * ((last - first) // SMALL))()
    if _libc.mincore(ctypes.c_void_p(first), ctypes.c_size_t(last - first), pages) != 0:
        return
    bits = bytes(pages).translate(_LOWEST_BIT)
    size, each = 0, HUGE // SMALL
    for at in range(first, last + HUGE, HUGE):
        index = (at - first) // SMALL
        if at < last and bits.count(1, index, index + each) * 2 >= each:
            size += HUGE
        elif size:
            yield at - size, size
            size = 0
