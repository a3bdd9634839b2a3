"""Figures of the process and of /dev/shm."""

from __future__ import annotations

import os
import platform
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from stagecache_wire import layout
from stagecache_wire.shm import SHM_DIRECTORY
from stagecached.metrics.families import Snapshot
from stagecached.stats import package_version

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

_KINDS = {"RssAnon:": "anonymous", "RssFile:": "file", "RssShmem:": "shared"}


def memory_bytes() -> dict[str, int]:
    """Resident bytes of this process by kind: its own, mapped files, shared memory."""
    found = dict.fromkeys(_KINDS.values(), 0)
    for line in Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines():
        name, _, rest = line.partition("\t")
        if name in _KINDS:
            found[_KINDS[name]] = int(rest.split()[0]) * 1024
    return found


def shm_bytes() -> tuple[int, int]:
    """Size of /dev/shm, and how much of it is free."""
    stat = os.statvfs(SHM_DIRECTORY)
    return stat.f_blocks * stat.f_frsize, stat.f_bavail * stat.f_frsize


def add_process(snapshot: Snapshot, started_unix_s: float) -> None:
    """Add the families of the process."""
    snapshot.gauge("stagecache_build_info", 1, package_version(), str(layout.ABI), platform.python_version())
    snapshot.gauge("stagecache_start_time_seconds", started_unix_s)
    for kind, size in memory_bytes().items():
        snapshot.gauge("stagecache_daemon_memory_bytes", size, kind)
    size, free = shm_bytes()
    snapshot.gauge("stagecache_shm_size_bytes", size)
    snapshot.gauge("stagecache_shm_free_bytes", free)


def process_families() -> str:
    """``process_*`` of prometheus_client: CPU seconds, resident memory, descriptors, start time."""
    from prometheus_client import generate_latest

    return generate_latest(_registry()).decode()


@cache
def _registry() -> CollectorRegistry:
    from prometheus_client import CollectorRegistry, ProcessCollector

    registry = CollectorRegistry(auto_describe=False)
    ProcessCollector(registry=registry)
    return registry
