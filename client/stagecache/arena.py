"""Extents of the merge arena, given out by the worker, and leases that end when a tensor is collected.

A finalizer may run at any instruction of any thread, also inside this module, so it takes no lock: it appends to a
deque, which the next allocation empties.
"""

from __future__ import annotations

import bisect
import time
import weakref
from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

ALIGN = 64


@dataclass(slots=True)
class Extent:
    """One contiguous piece of the arena, in bytes."""

    offset: int
    size: int


class Arena:
    """First-fit allocator over the arena, with a part set aside for results that fit nowhere else.

    The last eighth is the *bounce*: a hit that finds no extent is brought over in pieces through it, so that held
    tensors can never make a hit fail. Callers hold the cache's lock for everything but ``lease``'s finalizer.
    """

    def __init__(self, data: NDArray[np.uint8]) -> None:
        """data: u8 [arena bytes], the mapped segment."""
        self.data = data
        usable = len(data) // 8 * 7 // ALIGN * ALIGN
        self.bounce = Extent(usable, (len(data) - usable) // ALIGN * ALIGN)
        self.usable = usable
        self._free: list[tuple[int, int]] = [(0, usable)]
        self.released: deque[Extent] = deque()
        """Extents whose leases ended; ``collect`` takes them back."""
        self._leases: dict[int, tuple[weakref.ref[NDArray[np.uint8]], int]] = {}
        self.used_bytes = 0
        self.leased_bytes = 0

    def allocate(self, size: int) -> Extent | None:
        """An extent of ``size`` bytes at a multiple of 64, or None where none is free."""
        self.collect()
        need = max(ALIGN, (size + ALIGN - 1) // ALIGN * ALIGN)
        for index, (offset, length) in enumerate(self._free):
            if length >= need:
                if length == need:
                    del self._free[index]
                else:
                    self._free[index] = (offset + need, length - need)
                self.used_bytes += need
                return Extent(offset, need)
        return None

    def free(self, extent: Extent) -> None:
        """Give an extent back."""
        self.used_bytes -= extent.size
        index = bisect.bisect(self._free, (extent.offset, 0))
        offset, size = extent.offset, extent.size
        if index < len(self._free) and offset + size == self._free[index][0]:
            size += self._free[index][1]
            del self._free[index]
        if index and self._free[index - 1][0] + self._free[index - 1][1] == offset:
            index -= 1
            offset = self._free[index][0]
            size += self._free[index][1]
            del self._free[index]
        self._free.insert(index, (offset, size))

    def may_lease(self, extent: Extent) -> bool:
        """Whether a tensor may hold the extent: held ones take half of the arena at most, the rest is for steps."""
        self.collect()
        return self.leased_bytes + extent.size <= self.usable // 2

    def lease(self, extent: Extent) -> NDArray[np.uint8]:
        """u8 [extent.size]: the bytes; the extent comes back when the array and all that share it are collected."""
        array = self.data[extent.offset : extent.offset + extent.size]
        released = self.released

        def on_collected(_: object) -> None:
            released.append(extent)

        self._leases[extent.offset] = (weakref.ref(array, on_collected), time.monotonic_ns())
        self.leased_bytes += extent.size
        return array

    @property
    def leases(self) -> int:
        """Extents held by tensors now."""
        self.collect()
        return len(self._leases)

    def oldest_lease(self) -> tuple[int, int]:
        """Number of leases, and time.monotonic_ns() at which the oldest began (0: there is none); as last collected."""
        for _, began in self._leases.values():
            return len(self._leases), began
        return 0, 0

    def collect(self) -> None:
        """Take back what finalizers released."""
        while self.released:
            extent = self.released.popleft()
            self._leases.pop(extent.offset, None)
            self.leased_bytes -= extent.size
            self.free(extent)
