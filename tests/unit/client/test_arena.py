"""Extents and leases, against a model that holds every byte's owner."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from stagecache.arena import ALIGN, Arena, Extent

SIZE = 64 * 64


class ArenaModel(RuleBasedStateMachine):
    """Allocates, frees, leases and drops in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.arena = Arena(np.zeros(SIZE, np.uint8))
        self.extents: list[Extent] = []
        self.leased: list[tuple[Extent, Any]] = []

    @rule(size=st.integers(0, SIZE))
    def allocate(self, size: int) -> None:
        extent = self.arena.allocate(size)
        if extent is None:
            assert self.longest_gap() < max(size, 1), "there was room"
            return
        assert extent.size >= size
        self.extents.append(extent)

    @precondition(lambda self: self.extents)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        self.arena.free(self.extents.pop(data.draw(st.integers(0, len(self.extents) - 1))))

    @precondition(lambda self: self.extents)
    @rule(data=st.data())
    def lease(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.extents) - 1))
        if not self.arena.may_lease(self.extents[index]):
            assert sum(extent.size for extent, _ in self.leased) + self.extents[index].size > self.arena.usable // 2
            return
        extent = self.extents.pop(index)
        tensor = torch.from_numpy(self.arena.lease(extent))[: extent.size]
        tensor.fill_(len(self.leased) + 1)
        self.leased.append((extent, tensor))

    @precondition(lambda self: self.leased)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        """What is left of a tensor may be a view of a view: it holds the extent too."""
        index = data.draw(st.integers(0, len(self.leased) - 1))
        extent, tensor = self.leased.pop(index)
        view = tensor[1:].view(-1)[:1]
        value = int(view[0])
        del tensor
        assert extent.offset in self.arena._leases
        assert int(view[0]) == value

    def owners(self) -> list[Extent]:
        return [*self.extents, *(extent for extent, _ in self.leased)]

    def longest_gap(self) -> int:
        ends = 0
        longest = 0
        for extent in sorted(self.owners(), key=lambda extent: extent.offset):
            longest = max(longest, extent.offset - ends)
            ends = extent.offset + extent.size
        return max(longest, self.arena.usable - ends)

    @invariant()
    def nobody_shares_a_byte(self) -> None:
        ends = 0
        for extent in sorted(self.owners(), key=lambda extent: extent.offset):
            assert extent.offset % ALIGN == 0
            assert extent.offset >= ends
            ends = extent.offset + extent.size
        assert ends <= self.arena.usable
        assert self.arena.bounce.offset >= self.arena.usable

    @invariant()
    def the_figures_are_true(self) -> None:
        assert self.arena.leases == len(self.leased)
        assert self.arena.leased_bytes == sum(extent.size for extent, _ in self.leased)
        assert self.arena.used_bytes == sum(extent.size for extent in self.owners())

    @invariant()
    def held_rows_do_not_change(self) -> None:
        assert all(bool((tensor == tensor[0]).all()) for _, tensor in self.leased)

    def teardown(self) -> None:
        for extent in self.extents:
            self.arena.free(extent)
        self.leased.clear()
        assert self.arena.leases == 0
        assert self.arena._free == [(0, self.arena.usable)], "gaps that touch are one gap"


TestArena = ArenaModel.TestCase
TestArena.settings = settings(max_examples=30, stateful_step_count=40, deadline=None)


@pytest.fixture
def arena() -> Arena:
    return Arena(np.zeros(SIZE, np.uint8))


def test_a_lease_ends_with_the_last_view_of_its_tensor(arena: Arena) -> None:
    extent = arena.allocate(256)
    assert extent is not None
    tensor = torch.from_numpy(arena.lease(extent)).view(torch.float32).view(8, 8)
    row = tensor[3]
    array = row.numpy()
    del tensor, row
    assert arena.leases == 1
    del array
    assert arena.leases == 0
    assert arena.used_bytes == 0


def test_leases_never_take_more_than_half(arena: Arena) -> None:
    held = []
    while (extent := arena.allocate(512)) is not None and arena.may_lease(extent):
        held.append(arena.lease(extent))
    assert 0 < arena.leased_bytes <= arena.usable // 2
    assert arena.allocate(512) is not None, "the other half is for steps"


def test_a_finalizer_may_run_inside_the_allocator(arena: Arena) -> None:
    """It takes no lock and touches no table: what it gives back is seen at the next call."""
    first, second = arena.allocate(64), arena.allocate(64)
    assert first is not None
    assert second is not None
    cycle: list[Any] = [arena.lease(first)]
    cycle.append(cycle)
    del cycle
    arena.free(second)
    gc.collect()
    assert len(arena.released) == 1
    assert arena.leases == 0


def test_the_oldest_lease_is_told_with_its_time(arena: Arena) -> None:
    assert arena.oldest_lease() == (0, 0)
    extents = [arena.allocate(64) for _ in range(2)]
    held = [arena.lease(extent) for extent in extents if extent is not None]
    count, began = arena.oldest_lease()
    assert count == 2
    del held[0]
    assert arena.leases == 1
    assert arena.oldest_lease()[1] >= began
