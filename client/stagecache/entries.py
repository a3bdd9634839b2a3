"""Entries of the result table, given out by the worker: one is taken for as long as anybody references its ``Entry``.

As with extents (``stagecache.arena``), what interrupts an owner cannot keep an entry from coming back.
"""

from __future__ import annotations

import weakref
from collections import deque


class Entry:
    """One entry of the result table."""

    __slots__ = ("__weakref__", "index")

    def __init__(self, index: int) -> None:
        self.index = index


class _Ref(weakref.ref):  # type: ignore[type-arg]
    __slots__ = ("index",)
    index: int


class Entries:
    """The entries [first, end). Callers hold the cache's lock."""

    def __init__(self, first: int, end: int) -> None:
        self._range = range(first, end)
        self._live: dict[int, _Ref] = {}
        self._free = list(reversed(self._range))
        self._torn = False
        self._released: deque[_Ref] = deque()

    def take(self) -> Entry | None:
        """A free entry, or None."""
        if self._torn or self._released:
            self._collect()
        if not self._free:
            return None
        self._torn = True
        entry = Entry(self._free.pop())
        ref = _Ref(entry, self._released.append)
        ref.index = entry.index
        self._live[entry.index] = ref
        self._torn = False
        return entry

    def give_back(self, entry: Entry) -> None:
        """Now, rather than when the entry is collected. Nothing happens where it is back already."""
        ref = self._live.get(entry.index)
        if ref is not None and ref() is entry:
            self._drop(ref)

    @property
    def taken(self) -> int:
        """Entries that have an owner."""
        self._collect()
        return len(self._live)

    def _collect(self) -> None:
        if self._torn:
            self._free = [index for index in reversed(self._range) if index not in self._live]
            self._torn = False
        while self._released:
            self._drop(self._released[0])
            self._released.popleft()  # only now: dropping twice does nothing

    def _drop(self, ref: _Ref) -> None:
        if self._live.get(ref.index) is ref:
            self._torn = True
            del self._live[ref.index]
            self._free.append(ref.index)
            self._torn = False
