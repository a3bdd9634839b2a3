"""The host as checks see it: /proc, /sys, /dev/shm and modes, below a root that tests put somewhere else."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

UNLIMITED: Final = -1
"""A limit that is none."""

CAP_IPC_LOCK: Final = 14


@dataclass(frozen=True)
class Mount:
    """A line of mountinfo. source_root: the part of the file system that is mounted, ``/`` for all of it."""

    point: Path
    fstype: str
    options: frozenset[str]
    source_root: str


@dataclass(frozen=True)
class Room:
    """Size of a file system and what is free of it, in bytes."""

    size: int
    free: int


@dataclass(frozen=True)
class CgroupMemory:
    """limit_bytes: the least limit from here to the root, UNLIMITED where there is none. oom_kills: processes of this
    group that were killed for memory.
    """

    limit_bytes: int
    oom_kills: int


def room_of(path: Path) -> Room:
    """Raises: OSError."""
    stat = os.statvfs(path)
    return Room(stat.f_blocks * stat.f_frsize, stat.f_bavail * stat.f_frsize)


@dataclass(frozen=True)
class Host:
    """Reads, never writes. ``pid`` 0 means this process."""

    root: Path = Path("/")
    room: Callable[[Path], Room] = room_of

    def at(self, path: str | Path) -> Path:
        """An absolute path below the root."""
        return self.root / str(path).lstrip("/")

    def read(self, path: str | Path) -> str | None:
        """A file's text, None where it cannot be had."""
        try:
            return self.at(path).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return None

    def proc(self, pid: int, name: str) -> str | None:
        """``/proc/PID/NAME``, None where it cannot be had."""
        return self.read(f"/proc/{pid or 'self'}/{name}")

    def cpu_flags(self) -> frozenset[str]:
        """What the first CPU can do, in the kernel's words; empty where it does not say (x86 alone does)."""
        found = re.search(r"^flags\s*:(.*)$", self.read("/proc/cpuinfo") or "", re.MULTILINE)
        return frozenset(found[1].split()) if found else frozenset()

    # ---------------------------------------------------------------- mounts

    def mounts(self) -> list[Mount]:
        """In the order in which they were made: a later one hides an earlier one of the same point."""
        return list(_mounts(self.proc(0, "mountinfo") or ""))

    def mount_at(self, path: Path) -> Mount | None:
        """What is mounted at exactly this path."""
        return next((mount for mount in reversed(self.mounts()) if mount.point == path), None)

    def mount_of(self, path: Path) -> Mount | None:
        """What the path lies on."""
        over = [mount for mount in self.mounts() if mount.point == path or mount.point in path.parents]
        return max(over, key=lambda mount: len(mount.point.parts), default=None)

    # ------------------------------------------------------------- processes

    def limit(self, pid: int, name: str) -> int | None:
        """Soft limit by its name in /proc (``Max locked memory``), UNLIMITED, or None where it cannot be seen."""
        found = re.search(rf"^{re.escape(name)}\s+(\S+)", self.proc(pid, "limits") or "", re.MULTILINE)
        if found is None:
            return None
        return UNLIMITED if found[1] == "unlimited" else int(found[1])

    def status_field(self, pid: int, name: str) -> str | None:
        """A field of /proc/PID/status."""
        found = re.search(rf"^{name}:\s*(.*)$", self.proc(pid, "status") or "", re.MULTILINE)
        return found[1].strip() if found else None

    def has_capability(self, pid: int, number: int) -> bool:
        """Whether the process has a capability in its effective set."""
        return bool(int(self.status_field(pid, "CapEff") or "0", 16) >> number & 1)

    def cpus_allowed(self, pid: int) -> frozenset[int] | None:
        """CPUs on which the process' main thread may run, None where it cannot be seen."""
        text = self.status_field(pid, "Cpus_allowed_list")
        return None if text is None else parse_cpus(text)

    def cpus_online(self) -> frozenset[int]:
        return parse_cpus(self.read("/sys/devices/system/cpu/online") or "")

    def open_files(self, pid: int) -> int | None:
        """Descriptors that the process has open, None where they cannot be seen."""
        try:
            return len(list(self.at(f"/proc/{pid or 'self'}/fd").iterdir()))
        except OSError:
            return None

    # ----------------------------------------------------------------- memory

    def meminfo(self, name: str) -> int | None:
        """A field of /proc/meminfo in bytes."""
        found = re.search(rf"^{name}:\s+(\d+) kB", self.read("/proc/meminfo") or "", re.MULTILINE)
        return int(found[1]) * 1024 if found else None

    def cgroup_memory(self, pid: int) -> CgroupMemory | None:
        """Memory limit of the process' control group, version 2 or 1; None where it cannot be seen."""
        for line in (self.proc(pid, "cgroup") or "").splitlines():
            hierarchy, controllers, path = line.split(":", 2)
            if hierarchy == "0" and not controllers:
                found = self._cgroup("/sys/fs/cgroup", path, "memory.max", "memory.events")
            elif "memory" in controllers.split(","):
                found = self._cgroup("/sys/fs/cgroup/memory", path, "memory.limit_in_bytes", "memory.oom_control")
            else:
                continue
            if found is not None:
                return found
        return None

    def _cgroup(self, base: str, path: str, limit: str, events: str) -> CgroupMemory | None:
        own = Path(base) / path.lstrip("/")
        if ".." in own.parts or not self.at(own).is_dir():
            own = Path(base)  # a container sees its own group at the top
        limits, kills = [], re.search(r"^oom_kill (\d+)", self.read(own / events) or "", re.MULTILINE)
        for folder in (own, *own.parents):
            text = (self.read(folder / limit) or "").strip()
            if text:
                limits.append(UNLIMITED if text == "max" or int(text) >= 1 << 60 else int(text))
            if folder == Path(base):
                break
        if not limits and kills is None and not self.at(own / "cgroup.procs").exists():
            return None
        real = [value for value in limits if value != UNLIMITED]
        return CgroupMemory(min(real, default=UNLIMITED), int(kills[1]) if kills else 0)

    # ------------------------------------------------------------------- what

    def container(self) -> str | None:
        """What kind of container this is, None where it is none that one can tell."""
        if os.environ.get("KUBERNETES_SERVICE_HOST") and self.root == Path("/"):
            return "Kubernetes"
        if self.at("/.dockerenv").exists():
            return "Docker"
        if self.at("/run/.containerenv").exists():
            return "Podman"
        return None

    def kernel(self) -> tuple[int, int]:
        """Major and minor release of the kernel; (0, 0) where it cannot be told."""
        found = re.match(r"(\d+)\.(\d+)", self.read("/proc/sys/kernel/osrelease") or "")
        return (int(found[1]), int(found[2])) if found else (0, 0)


def _mounts(text: str) -> Iterator[Mount]:
    for line in text.splitlines():
        before, _, after = line.partition(" - ")
        fields, behind = before.split(), after.split()
        if len(fields) < 6 or len(behind) < 3:
            continue
        options = frozenset(fields[5].split(",")) | frozenset(behind[2].split(","))
        yield Mount(Path(_unescape(fields[4])), behind[0], options, _unescape(fields[3]))


def _unescape(text: str) -> str:
    r"""mountinfo writes blanks as ``\040``."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text)


def parse_cpus(text: str) -> frozenset[int]:
    """CPU numbers of a list like ``0-3,8``."""
    cpus: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.strip().partition("-")
        with contextlib.suppress(ValueError):
            cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)


def show_cpus(cpus: frozenset[int]) -> str:
    """``0-3,8`` of CPU numbers."""
    parts: list[str] = []
    for cpu in sorted(cpus):
        if parts and cpu - 1 == int(parts[-1].rpartition("-")[2]):
            parts[-1] = f"{parts[-1].partition('-')[0]}-{cpu}"
        else:
            parts.append(str(cpu))
    return ",".join(parts)
