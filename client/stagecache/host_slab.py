"""Pinned host memory of our own, for copies that belong to no page: leftovers, and rows that are not kept.

torch's pinned allocator is not used: it rounds each size up to a power of two, and keeps what it took.
"""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Iterable

import numpy as np
import torch

from stagecache.arena import Arena, Extent


class HostSlab:
    """Extents of one anonymous mapping. ``take`` on one thread; ``give_back`` on any, it takes no lock."""

    def __init__(self, nbytes: int) -> None:
        self.memory = mmap.mmap(-1, nbytes)
        with torch.inference_mode(False):  # Made inside it, the tensors could not be written outside of it.
            self._flat = torch.frombuffer(self.memory, dtype=torch.uint8)
        self._arena = Arena(np.frombuffer(self.memory, np.uint8))
        self._returned: deque[Extent] = deque()

    @property
    def used_bytes(self) -> int:
        """Bytes in extents, those given back already among them until the next ``take``."""
        return self._arena.used_bytes

    def take(self, like: torch.Tensor) -> tuple[torch.Tensor, Extent] | None:
        """Memory for a contiguous tensor of the shape and dtype of ``like``; None where there is no room."""
        while self._returned:
            self._arena.free(self._returned.popleft())
        size = like.numel() * like.element_size()
        extent = self._arena.allocate(size)
        if extent is None:
            return None
        return self._flat[extent.offset : extent.offset + size].view(like.dtype).view(like.shape), extent

    def give_back(self, extents: Iterable[Extent]) -> None:
        """No copy into the extents is on its way, and nobody reads them any more."""
        self._returned.extend(extents)
