"""Limits of memory beside /dev/shm's size, which the kernel enforces by killing or by refusing: control group, mlock.

Shared memory is charged to the control group of who allocates it, the daemon; past its limit the kernel kills. So its
room is looked at before anything is allocated. What mlock may take is only told: an unlocked pool is slower where there
is swap, and nothing worse.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path("/")
_UNLIMITED: Final = 1 << 60
"""Version 1 writes "no limit" as the largest number of whole pages."""

CGROUP_REMEDY: Final = (
    "Raise the memory limit of the daemon's container or unit (docker --memory, resources.limits.memory, MemoryMax=); "
    "`stagecache plan` computes it. Or lower num_blocks, keys or replicas."
)
MEMLOCK_REMEDY: Final = (
    "LimitMEMLOCK=infinity (systemd), --ulimit memlock=-1:-1 (docker), `ulimit -l`; without swap it may stay."
)


@dataclass(frozen=True)
class CgroupRoom:
    """The tightest memory limit from this process' control group up. free_bytes: what caches hold counts as free."""

    limit_bytes: int
    free_bytes: int


def cgroup_room(root: Path = ROOT) -> CgroupRoom | None:
    """Room in the control group, version 2 or 1; None where there is no limit or it cannot be seen."""
    rooms = [room for folder, version in _folders(root) if (room := _room(folder, version)) is not None]
    return min(rooms, key=lambda room: room.free_bytes, default=None)


def _folders(root: Path) -> Iterator[tuple[Path, int]]:
    """Folders of the process' memory control group and those above it."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        hierarchy, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if hierarchy == "0" and not controllers:
            base, version = root / "sys/fs/cgroup", 2
        elif "memory" in controllers.split(","):
            base, version = root / "sys/fs/cgroup/memory", 1
        else:
            continue
        own = base / path.lstrip("/")
        if ".." in own.parts or not own.is_dir():
            own = base  # a container sees its own group at the top
        while True:
            yield own, version
            if own == base:
                break
            own = own.parent


def _room(folder: Path, version: int) -> CgroupRoom | None:
    limit_name, used_name, cache_name = (
        ("memory.max", "memory.current", "inactive_file")
        if version == 2
        else ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    )
    limit, used = _number(folder / limit_name), _number(folder / used_name)
    if limit is None or limit >= _UNLIMITED or used is None:
        return None
    found = re.search(rf"^{cache_name} (\d+)$", _read(folder / "memory.stat"), re.MULTILINE)
    return CgroupRoom(limit, max(limit - used + (int(found[1]) if found else 0), 0))


@dataclass(frozen=True)
class MemlockRoom:
    """RLIMIT_MEMLOCK of this process and what it has locked, in bytes. swap: the machine could swap at all."""

    limit_bytes: int
    locked_bytes: int
    swap: bool


def memlock_room(root: Path = ROOT) -> MemlockRoom:
    """What mlock may still take, for people: a number that cannot be seen is 0."""
    limit = re.search(r"^Max locked memory\s+(\d+)", _read(root / "proc/self/limits"), re.MULTILINE)
    locked = re.search(r"^VmLck:\s+(\d+) kB", _read(root / "proc/self/status"), re.MULTILINE)
    swap = re.search(r"^SwapTotal:\s+(\d+) kB", _read(root / "proc/meminfo"), re.MULTILINE)
    return MemlockRoom(
        int(limit[1]) if limit else 0, int(locked[1]) * 1024 if locked else 0, bool(swap and int(swap[1]))
    )


def _number(path: Path) -> int | None:
    text = _read(path).strip()
    return int(text) if text.isdigit() else None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
