"""The shared memory of one namespace: made, mapped, checked, unlinked. Every word in it has one writer, this daemon."""

from __future__ import annotations

from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from stagecache_wire import shm
from stagecache_wire.layout import PAGE
from stagecached.memlock import tell_not_locked
from stagecached.shared import layout
from stagecached.shared.layout import SharedGeometry


class SegmentMismatchError(RuntimeError):
    """A segment that an earlier daemon left is gone or not what its manifest says."""


class SharedRows:
    """Rows of one shared block, valid while the block is pinned.

    by_key: the session's key id to void [block_size], one item a row; writable while the block is being stored.
    """

    __slots__ = ("by_key",)

    def __init__(self, by_key: MappingProxyType[int, NDArray[np.void]]) -> None:
        self.by_key = by_key


class SharedSegment:
    """A mapped segment.

    Attributes:
        words: memoryview of u64, header page and block headers.
        headers: u64 [num_blocks, BLOCK_WORDS], the block headers as an array.
        regions: void [num_blocks, block_size] a key, in the order of ``geometry.keys``.
        locked: mlock succeeded.
    """

    def __init__(self, name: str, geometry: SharedGeometry, segment: shm.Segment) -> None:
        self.name = name
        self.geometry = geometry
        self.words = segment.view[: geometry.rows_offset].cast("Q")
        shape = (geometry.num_blocks, layout.BLOCK_WORDS)
        self.headers: NDArray[np.uint64] = np.frombuffer(segment.map, np.uint64, shape[0] * shape[1], PAGE).reshape(
            shape
        )
        self.regions = [
            np.frombuffer(
                segment.map, np.dtype(f"V{key.row_bytes}"), geometry.num_blocks * geometry.block_size, offset
            ).reshape(geometry.num_blocks, geometry.block_size)
            for key, offset in zip(geometry.keys, geometry.region_offsets(), strict=False)
        ]
        self.locked = False
        self._segment = segment

    @classmethod
    def create(cls, name: str, geometry: SharedGeometry, mode: int = 0o600) -> SharedSegment:
        """Make, prefault and, where the limit allows it, lock a segment without content, its header written.

        Raises:
            shm.ShmFullError: no room; nothing is left behind.
        """
        segment = shm.create_segment(name, geometry.total_bytes, mode)
        shm.prefault(segment)
        made = cls(name, geometry, segment)
        made.words[layout.S_BASE_GENERATION] = made.words[layout.S_LAST_GENERATION] = 1
        for word, value in geometry.header_words():
            made.words[word] = value
        made._lock()
        return made

    @classmethod
    def open(cls, name: str, geometry: SharedGeometry) -> SharedSegment:
        """Map what an earlier daemon made.

        Raises:
            SegmentMismatchError: it is gone, of another size, layout or namespace.
        """
        try:
            segment = shm.open_segment(name)
        except (FileNotFoundError, ValueError) as error:
            raise SegmentMismatchError(f"it cannot be mapped: {error}") from error
        if segment.size != geometry.total_bytes:
            raise SegmentMismatchError(f"it has {segment.size} bytes, expected {geometry.total_bytes}")
        found = cls(name, geometry, segment)
        for word, value in geometry.header_words():
            if found.words[word] != value:
                raise SegmentMismatchError(f"header word {word} is {found.words[word]}, expected {value}")
        return found

    def pin(self) -> None:
        """After ``open``: map every page, so that no copy faults, and lock where that is allowed. Others may work on it
        meanwhile.
        """
        shm.prefault(self._segment, live=True)
        self._lock()

    def _lock(self) -> None:
        self.locked = not shm.lock_memory(self._segment)
        if not self.locked:
            tell_not_locked("shared blocks are", self.size, segment=self.name)

    @property
    def size(self) -> int:
        return self._segment.size

    def unlink(self) -> None:
        """Remove its name; the memory goes with the last mapping."""
        shm.unlink_segment(self.name)
