"""What is looked at: a host, a socket path, and the daemon that may serve there."""

from __future__ import annotations

import json
import os
import socket as sockets
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from stagecache.doctor.host import Host
from stagecache.errors import StageCacheError
from stagecache_wire.locks import is_held
from stagecache_wire.names import RunPaths
from stagecache_wire.v1 import stagecache_pb2 as pb


@dataclass(frozen=True)
class DaemonFacts:
    """What could be learned of the daemon.

    locked: whether its lock is held; None where the lock cannot be looked at. pid: in this pid namespace, 0 where it
    is not known here (nobody listens, or another container). uid: of who listens, None where nobody does. stats, error:
    its answer, or why there is none.
    """

    locked: bool | None = None
    pid: int = 0
    uid: int | None = None
    stats: pb.StatsResponse | None = None
    error: StageCacheError | None = None


@dataclass(frozen=True)
class Subject:
    """Handed to every check.

    euid, egid, groups: of this process. timeout_s: for each question to the daemon.
    """

    paths: RunPaths
    host: Host
    daemon: DaemonFacts
    environ: Mapping[str, str]
    timeout_s: float = 2.0
    euid: int = field(default_factory=os.geteuid)

    @property
    def socket(self) -> Path:
        return self.paths.socket

    @property
    def daemon_pid(self) -> int | None:
        """The daemon's pid, this process' (0) where none runs, None where it runs and cannot be seen from here."""
        if self.daemon.pid:
            return self.daemon.pid
        return None if self.daemon.uid is not None else 0

    @property
    def budget_bytes(self) -> int | None:
        """Shared memory that the daemon may take, of sessions and of shared blocks; None where it did not answer."""
        stats = self.daemon.stats
        return stats.budget_bytes + stats.shared_limit_bytes if stats is not None else None


def look(socket: Path, host: Host, environ: Mapping[str, str], timeout_s: float) -> Subject:
    """Ask everything that more than one check needs, once."""
    paths = RunPaths.of(socket)
    return Subject(paths, host, _daemon_facts(paths, timeout_s), environ, timeout_s)


def _daemon_facts(paths: RunPaths, timeout_s: float) -> DaemonFacts:
    from stagecache.control import Observer

    pid, uid = listener(paths.socket, timeout_s)
    stats = error = None
    try:
        with Observer(paths.socket, timeout_s=timeout_s) as daemon:
            stats = daemon.stats()
    except StageCacheError as refused:
        error = refused
    return DaemonFacts(lock_is_held(paths.lock), pid, uid, stats, error)


def lock_is_held(path: Path) -> bool | None:
    """Whether a live process holds the lock; None where this user may not look."""
    try:
        return is_held(path)
    except OSError:
        return None


def listener(path: Path, timeout_s: float = 2.0) -> tuple[int, int | None]:
    """pid and uid of who listens at a Unix socket, as the kernel says; (0, None) where nobody does.

    The pid is 0 where it has none in this pid namespace.
    """
    try:
        with sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM) as connection:
            connection.settimeout(timeout_s)
            connection.connect(os.fspath(path))
            credentials = connection.getsockopt(sockets.SOL_SOCKET, sockets.SO_PEERCRED, 12)
    except OSError:
        return 0, None
    pid, uid, _ = struct.unpack("3i", credentials)
    return pid, uid


def holder_pid(lock: Path) -> int | None:
    """pid that the daemon wrote into its lock file, in its own pid namespace; None where it cannot be read.

    It says nothing about whether that daemon lives: ``lock_is_held`` does.
    """
    try:
        pid = json.loads(lock.read_text())["pid"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return pid if isinstance(pid, int) else None
