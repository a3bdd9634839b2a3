"""/dev/shm: mounted, large enough, writable, the daemon's too, and what is left in it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from stagecache.doctor.report import Finding, Status
from stagecache.doctor.subject import Subject, lock_is_held
from stagecache.doctor.text import size
from stagecache.errors import StageCacheError
from stagecache_wire.shm import PREFIX, SHM_DIRECTORY

CONTAINER_DEFAULT_BYTES: Final = 64 << 20
"""/dev/shm of a container whose runtime was not told another size."""
SMALL_BYTES: Final = 1 << 30

_GROW: Final = (
    "Give it more: docker run --shm-size=8g, shm_size: in compose, in Kubernetes an emptyDir of medium Memory mounted "
    "at /dev/shm, on a host `mount -o remount,size=50% /dev/shm`. `stagecache plan` computes how much."
)
_DAEMON_LOCK: Final = re.compile(rf"{PREFIX}\.[0-9a-f]{{12}}\.lock")


def check_mount(subject: Subject) -> Iterator[Finding]:
    """It is a tmpfs of its own, and this process may make files in it."""
    host, mount = subject.host, subject.host.mount_at(SHM_DIRECTORY)
    if not host.at(SHM_DIRECTORY).is_dir():
        yield Finding("shm.mount", Status.PROBLEM, f"{SHM_DIRECTORY} does not exist.", _GROW)
        return
    if mount is None or mount.fstype not in ("tmpfs", "ramfs"):
        what = "is no mount of its own" if mount is None else f"is a {mount.fstype}"
        yield Finding(
            "shm.mount",
            Status.WARNING,
            f"{SHM_DIRECTORY} {what}, so rows may go to a disk.",
            "Mount a tmpfs there: `mount -t tmpfs -o size=8g,mode=1777 tmpfs /dev/shm`, or a volume of medium Memory.",
        )
    elif "ro" in mount.options:
        yield Finding("shm.mount", Status.PROBLEM, f"{SHM_DIRECTORY} is mounted read-only.", "Mount it writable.")
        return
    if not os.access(host.at(SHM_DIRECTORY), os.W_OK | os.X_OK):
        yield Finding(
            "shm.mount",
            Status.PROBLEM,
            f"uid {subject.euid} may not write to {SHM_DIRECTORY}.",
            f"`chmod 1777 {SHM_DIRECTORY}`; in Kubernetes, set fsGroup to the daemon's group.",
        )
    elif mount is not None and mount.fstype in ("tmpfs", "ramfs"):
        yield Finding("shm.mount", Status.OK, f"{SHM_DIRECTORY} is a {mount.fstype}, writable for uid {subject.euid}.")


def check_size(subject: Subject) -> Iterator[Finding]:
    """It has room for rows, and is no larger than memory."""
    try:
        room = subject.host.room(subject.host.at(SHM_DIRECTORY))
    except OSError:
        return
    budget, memory = subject.budget_bytes, subject.host.meminfo("MemTotal")
    found = f"{SHM_DIRECTORY} has {size(room.size)}, {size(room.free)} of it free"
    if room.size <= CONTAINER_DEFAULT_BYTES:
        yield Finding("shm.size", Status.PROBLEM, f"{found}: that is what containers get where nobody asks.", _GROW)
        return
    if budget is not None and budget > room.size:
        yield Finding(
            "shm.size",
            Status.PROBLEM,
            f"{found}; the daemon's budget is {size(budget)}, so attach is refused long before it is used up.",
            f"Lower --memory-budget, or make {SHM_DIRECTORY} larger. {_GROW}",
        )
    elif room.size < SMALL_BYTES:
        yield Finding("shm.size", Status.WARNING, f"{found}; one stage's hidden states often take 1 GiB.", _GROW)
    elif room.free < room.size // 20:
        ours = _used(subject.host.at(SHM_DIRECTORY))
        yield Finding(
            "shm.size",
            Status.WARNING,
            f"{found}; stagecache's own files take {size(ours)}.",
            f"`ls -lS {SHM_DIRECTORY}` shows what fills it. {_GROW}",
        )
    else:
        yield Finding("shm.size", Status.OK, f"{found}.")
    if memory is not None and room.size > memory:
        yield Finding(
            "shm.size",
            Status.WARNING,
            f"{SHM_DIRECTORY} may grow to {size(room.size)}, the machine has {size(memory)} of memory.",
            "Set --memory-budget to what may really be used: a tmpfs takes memory only as it fills.",
        )


def _used(directory: Path, stem: str = PREFIX) -> int:
    """Bytes of stagecache's files, or of those with this stem, as tmpfs holds them."""
    return sum(_blocks(path) for path in directory.glob(f"*{stem}.*"))


def _blocks(path: Path) -> int:
    try:
        return path.stat().st_blocks * 512
    except OSError:
        return 0


def check_shared(subject: Subject) -> Iterator[Finding]:
    """The daemon's /dev/shm is this one: a handshake names a file in it, which must be here."""
    if subject.daemon.stats is None:
        yield Finding("shm.shared", Status.SKIPPED, "no daemon answers, so whether it shares /dev/shm is not known.")
        return
    from stagecache.rpc import handshake

    try:
        lock = handshake(subject.socket, "worker", timeout_s=subject.timeout_s).worker_lock
    except StageCacheError as error:
        yield Finding("shm.shared", Status.WARNING, f"a worker's handshake was refused: {error}")
        return
    if lock is not None and subject.host.at(lock).exists():
        yield Finding("shm.shared", Status.OK, f"the daemon and this process share one {SHM_DIRECTORY}.")
        return
    yield Finding(
        "shm.shared",
        Status.PROBLEM,
        f"the daemon answers, but its {SHM_DIRECTORY} is another one: no worker here can attach.",
        f"Mount one volume at {SHM_DIRECTORY} in both containers (docs/deploy.md), or share the IPC namespace "
        "(docker run --ipc=container:NAME).",
    )


def check_leftovers(subject: Subject) -> Iterator[Finding]:
    """What daemons left that are dead: the next start removes it, where it belongs to that user."""
    dead, taken = [], 0
    directory = subject.host.at(SHM_DIRECTORY)
    try:
        locks = [path for path in directory.iterdir() if _DAEMON_LOCK.fullmatch(path.name)]
    except OSError:
        return
    for lock in locks:
        if lock_is_held(lock) is False:
            dead.append(lock)
            taken += _used(directory, lock.name.removesuffix(".lock"))
    if not dead:
        yield Finding("shm.leftovers", Status.OK, f"no dead daemon left anything in {SHM_DIRECTORY}.")
        return
    yield Finding(
        "shm.leftovers",
        Status.NOTE if taken < SMALL_BYTES else Status.WARNING,
        f"{len(dead)} daemons that are dead hold {size(taken)} of {SHM_DIRECTORY}, maybe for workers that live.",
        "Start the daemon again on its socket: it adopts whose workers live and removes the rest.",
    )
