"""Extents of the merge arena, given out by the worker, and leases that end when a tensor is collected.

An extent is taken for as long as anybody references its ``Extent``, so whatever interrupts its owner (say, a
KeyboardInterrupt between any two instructions) it comes back with the owner's objects; ``free`` only makes that sooner.
A lease references its extent, and ends when its array is collected.

What is live (``_live``, ``_leases``) changes by one dictionary operation at a time and is the truth. Gaps and sums
follow from it; ``_torn`` says that a change of them was cut short, and they are made anew.

A collected object may be noticed at any instruction of any thread, also inside this module, so nothing is done then but
an append to a deque, which the next allocation empties.
"""

from __future__ import annotations

import bisect
import time
import weakref
from collections import deque
from typing import Any

import numpy as np
from numpy.typing import NDArray

ALIGN = 64


class Extent:
    """One contiguous piece of the arena, in bytes."""

    __slots__ = ("__weakref__", "offset", "size")

    def __init__(self, offset: int, size: int) -> None:
        self.offset = offset
        self.size = size


class _Ref(weakref.ref):  # type: ignore[type-arg]
    """Of an extent, or of a lease's array: dead, it stands in ``Arena.released``."""

    __slots__ = ("offset", "size")
    offset: int
    size: int


class _LeaseRef(_Ref):
    __slots__ = ()


class Arena:
    """First-fit allocator over the arena, with a part set aside for results that fit nowhere else.

    The last eighth is the *bounce*: a hit that finds no extent is brought over in pieces through it, so that held
    tensors can never make a hit fail. Callers hold the cache's lock.
    """

    def __init__(self, data: NDArray[np.uint8]) -> None:
        """data: u8 [arena bytes], the mapped segment."""
        self.data = data
        self.address: int = data.ctypes.data
        """Of ``data``, in this process."""
        usable = len(data) // 8 * 7 // ALIGN * ALIGN
        self.bounce = Extent(usable, (len(data) - usable) // ALIGN * ALIGN)
        self.usable = usable
        self.released: deque[_Ref] = deque()
        """Of what was collected; ``collect`` takes it back."""
        self.used_bytes = 0
        self.leased_bytes = 0
        self._live: dict[int, _Ref] = {}
        self._leases: dict[int, tuple[_LeaseRef, int, Extent]] = {}
        self._free: list[tuple[int, int]] = [(0, usable)]
        self._torn = False

    def allocate(self, size: int) -> Extent | None:
        """An extent of ``size`` bytes at a multiple of 64, or None where none is free."""
        if self._torn or self.released:
            self.collect()
        need = max(ALIGN, (size + ALIGN - 1) // ALIGN * ALIGN)
        for index, (offset, length) in enumerate(self._free):
            if length >= need:
                extent = Extent(offset, need)
                ref = self._ref(_Ref, extent, extent)
                self._torn = True
                self._live[offset] = ref
                if length == need:
                    del self._free[index]
                else:
                    self._free[index] = (offset + need, length - need)
                self.used_bytes += need
                self._torn = False
                return extent
        return None

    def free(self, extent: Extent) -> None:
        """Give an extent back. Nothing happens where it is back already; a leased one comes back with its lease."""
        ref = self._live.get(extent.offset)
        if ref is not None and ref() is extent and extent.offset not in self._leases:
            self._take_back(ref)

    def may_lease(self, extent: Extent) -> bool:
        """Whether a tensor may hold the extent: held ones take half of the arena at most, the rest is for steps."""
        if self._torn or self.released:
            self.collect()
        return self.leased_bytes + extent.size <= self.usable // 2

    def lease(self, extent: Extent) -> NDArray[np.uint8]:
        """u8 [extent.size]: the bytes; the extent comes back when the array and all that share it are collected."""
        array = self.data[extent.offset : extent.offset + extent.size]
        ref = self._ref(_LeaseRef, array, extent)
        self._torn = True
        self._leases[extent.offset] = (ref, time.monotonic_ns(), extent)
        self.leased_bytes += extent.size
        self._torn = False
        return array

    @property
    def leases(self) -> int:
        """Extents held by tensors now."""
        self.collect()
        return len(self._leases)

    def oldest_lease(self) -> tuple[int, int]:
        """Number of leases, and time.monotonic_ns() at which the oldest began (0: there is none); as last collected."""
        for _, began, _ in self._leases.values():
            return len(self._leases), began
        return 0, 0

    def collect(self) -> None:
        """Take back what was collected."""
        if self._torn:
            self._make_anew()
        while self.released:
            self._drop(self.released[0])
            self.released.popleft()  # only now: what cuts this short finds it there, and dropping twice does nothing

    def _ref(self, kind: type[Any], of: object, extent: Extent) -> Any:
        ref = kind(of, self.released.append)
        ref.offset, ref.size = extent.offset, extent.size
        return ref

    def _drop(self, ref: _Ref) -> None:
        if not isinstance(ref, _LeaseRef):
            if self._live.get(ref.offset) is ref:
                self._take_back(ref)
            return
        lease = self._leases.get(ref.offset)
        if lease is None or lease[0] is not ref:
            return
        self._torn = True
        del self._leases[ref.offset]
        self.leased_bytes -= ref.size
        self._torn = False
        self.free(lease[2])

    def _take_back(self, ref: _Ref) -> None:
        offset, size = ref.offset, ref.size
        self._torn = True
        del self._live[offset]
        self.used_bytes -= size
        index = bisect.bisect(self._free, (offset, 0))
        if index < len(self._free) and offset + size == self._free[index][0]:
            size += self._free[index][1]
            del self._free[index]
        if index and self._free[index - 1][0] + self._free[index - 1][1] == offset:
            index -= 1
            offset = self._free[index][0]
            size += self._free[index][1]
            del self._free[index]
        self._free.insert(index, (offset, size))
        self._torn = False

    def _make_anew(self) -> None:
        """Gaps and sums from what is live."""
        gaps, at = [], 0
        for offset in sorted(self._live):
            if offset > at:
                gaps.append((at, offset - at))
            at = offset + self._live[offset].size
        if at < self.usable:
            gaps.append((at, self.usable - at))
        self._free = gaps
        self.used_bytes = sum(ref.size for ref in self._live.values())
        self.leased_bytes = sum(ref.size for ref, _, _ in self._leases.values())
        self._torn = False
