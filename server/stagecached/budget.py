"""Admission: what a session costs in shared memory, and whether the node has it, before anything is allocated.

Three limits hold at once: the daemon's own budget, what /dev/shm has free, and what the control group's memory limit
leaves. A reservation counts against all from the moment it is made; once its segments exist, /dev/shm and the control
group show them themselves, and ``settled`` says so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from stagecache_wire import shm
from stagecache_wire.geometry import Geometry, KeySchema, pool_bytes, staging_bytes, table_bytes
from stagecache_wire.layout import PAGE, ControlLayout
from stagecache_wire.v1 import stagecache_pb2 as pb
from stagecached.memory_limits import CGROUP_REMEDY, CgroupRoom, cgroup_room
from stagecached.refusal import Refusal

MIB: Final = 1 << 20

BUDGET_REMEDY: Final = (
    "Raise --memory-budget, lower num_blocks or the number and width of the keys, or stop a session that is listed."
)
SHM_REMEDY: Final = (
    f"Give {shm.SHM_DIRECTORY} more room (mount -o remount,size=..., docker --shm-size, a larger emptyDir of medium "
    "Memory), or remove what fills it."
)


@dataclass(frozen=True)
class Cost:
    """Bytes of shared memory by purpose, each segment rounded up to whole pages as tmpfs does."""

    pools: int = 0
    staging: int = 0
    tables: int = 0
    arena: int = 0
    control: int = 0

    @property
    def total(self) -> int:
        return self.pools + self.staging + self.tables + self.arena + self.control

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.pools + other.pools,
            self.staging + other.staging,
            self.tables + other.tables,
            self.arena + other.arena,
            self.control + other.control,
        )

    def __str__(self) -> str:
        return (
            f"{mib(self.total)} MiB (pools {mib(self.pools)} + staging {mib(self.staging)} + tables "
            f"{mib(self.tables)} + arena {mib(self.arena)} + control {mib(self.control)})"
        )


def mib(size: int) -> str:
    """Bytes as MiB for people."""
    return f"{size / MIB:,.1f}"


def session_cost(geometry: Geometry) -> Cost:
    """What a session costs without keys. geometry: as granted (``checked``)."""
    return Cost(
        tables=_pages(table_bytes(geometry)),
        arena=_pages(geometry.arena_bytes),
        control=_pages(ControlLayout.of(geometry).total_bytes),
    )


def key_cost(geometry: Geometry, schema: KeySchema) -> Cost:
    """What one key costs."""
    return Cost(
        pools=_pages(pool_bytes(geometry, schema.row_bytes)),
        staging=_pages(staging_bytes(geometry, schema.row_bytes)),
        tables=_pages(table_bytes(geometry)),
    )


class Reservation:
    """A part of the budget, held until ``release``."""

    def __init__(self, budget: Budget, owner: str, cost: Cost) -> None:
        self.owner = owner
        self.cost = cost
        self.is_settled = False
        self._budget = budget

    def settled(self) -> None:
        """Its segments exist: what /dev/shm shows as free no longer includes it."""
        self.is_settled = True

    def release(self) -> None:
        """Give it back. No error where that was done already."""
        self._budget._held.discard(self)


class Budget:
    """The node-wide account. On the event loop only."""

    def __init__(
        self,
        limit_bytes: int,
        free_bytes: Callable[[], int] = shm.free_bytes,
        cgroup: Callable[[], CgroupRoom | None] = cgroup_room,
    ) -> None:
        self.limit_bytes = limit_bytes
        self._free_bytes = free_bytes
        self._cgroup = cgroup
        self._held: set[Reservation] = set()

    @property
    def used_bytes(self) -> int:
        return sum(held.cost.total for held in self._held)

    def reserve(self, owner: str, what: str, costs: Sequence[Cost]) -> list[Reservation]:
        """Set parts aside for ``owner`` (a label for people), all or none; ``what`` names them in a refusal.

        Raises:
            Refusal: BUDGET_EXCEEDED or SHM_FULL, with the arithmetic and which limit it is; nothing was set aside.
        """
        cost = sum(costs, Cost())
        room = max(self.limit_bytes - self.used_bytes, 0)
        if cost.total > room:
            raise Refusal(
                pb.REASON_BUDGET_EXCEEDED,
                f"{what} needs {cost}; of the budget of {mib(self.limit_bytes)} MiB {mib(room)} are free "
                f"({self._users()}).",
                BUDGET_REMEDY,
                self._facts(cost) | {"budget_bytes": self.limit_bytes, "budget_free_bytes": room},
            )
        unsettled = sum(held.cost.total for held in self._held if not held.is_settled)
        if cost.total > self._free_bytes() - unsettled:
            raise self.shm_full(what, cost)
        group = self._cgroup()
        if group is not None and cost.total > group.free_bytes - unsettled:
            free = max(group.free_bytes - unsettled, 0)
            raise Refusal(
                pb.REASON_SHM_FULL,
                f"{what} needs {cost}; the daemon's control group has a memory limit of {mib(group.limit_bytes)} MiB, "
                f"of which {mib(free)} are free: the kernel would kill the daemon.",
                CGROUP_REMEDY,
                self._facts(cost) | {"cgroup_limit_bytes": group.limit_bytes, "cgroup_free_bytes": free},
            )
        return [self._hold(owner, part) for part in costs]

    def shm_full(self, what: str, cost: Cost) -> Refusal:
        """The refusal where /dev/shm has no room, by the check before the allocation or by the allocation itself."""
        unsettled = sum(held.cost.total for held in self._held if not held.is_settled)
        free = max(self._free_bytes() - unsettled, 0)
        return Refusal(
            pb.REASON_SHM_FULL,
            f"{what} needs {cost}; {shm.SHM_DIRECTORY} has {mib(free)} MiB free.",
            SHM_REMEDY,
            self._facts(cost) | {"shm_free_bytes": free},
        )

    def adopt(self, owner: str, cost: Cost) -> Reservation:
        """Count what exists already, whatever the limit: it is not asked for, it is there."""
        reservation = self._hold(owner, cost)
        reservation.settled()
        return reservation

    def _hold(self, owner: str, cost: Cost) -> Reservation:
        reservation = Reservation(self, owner, cost)
        self._held.add(reservation)
        return reservation

    def _users(self) -> str:
        by_owner: dict[str, int] = {}
        for held in self._held:
            by_owner[held.owner] = by_owner.get(held.owner, 0) + held.cost.total
        if not by_owner:
            return "no session uses any"
        largest = sorted(by_owner.items(), key=lambda item: -item[1])
        shown = ", ".join(f"{owner} uses {mib(size)}" for owner, size in largest[:8])
        return shown if len(largest) <= 8 else f"{shown}, and {len(largest) - 8} more"

    @staticmethod
    def _facts(cost: Cost) -> dict[str, object]:
        return {
            "needed_bytes": cost.total,
            "pools_bytes": cost.pools,
            "staging_bytes": cost.staging,
            "tables_bytes": cost.tables,
            "arena_bytes": cost.arena,
            "control_bytes": cost.control,
        }


def _pages(size: int) -> int:
    return (size + PAGE - 1) // PAGE * PAGE
