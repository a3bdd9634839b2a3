"""A host made of files, for checks to look at."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from stagecache.doctor import Finding, Status
from stagecache.doctor.host import Host, Room
from stagecache.doctor.subject import DaemonFacts, Subject
from stagecache_wire.names import RunPaths
from stagecache_wire.v1 import stagecache_pb2 as pb

GIB = 1 << 30
MIB = 1 << 20
DAEMON, WORKER, ME = 700, 800, 0
SOCKET = Path("/run/stagecache/d.sock")


class FakeHost:
    """Files below a root, and a /dev/shm of a given size. A healthy machine unless a test says otherwise."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.room = Room(16 * GIB, 15 * GIB)
        for name in ("dev/shm", "run/stagecache/d.sock.d", "tmp"):
            (root / name).mkdir(parents=True)
        (root / "run/stagecache/d.sock.d").chmod(0o700)
        self.write("/proc/self/mountinfo", mountinfo("/ ext4 rw", "/run tmpfs rw", "/dev/shm tmpfs rw"))
        self.write("/proc/meminfo", "MemTotal: 67108864 kB\nSwapTotal: 0 kB\n")
        self.write("/proc/sys/kernel/osrelease", "6.8.0-40-generic\n")
        self.write("/sys/devices/system/cpu/online", "0-7\n")
        for pid in (DAEMON, WORKER, ME):
            self.process(pid)

    def write(self, path: str, text: str) -> None:
        file = self.root / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def process(
        self, pid: int, *, cpus: str = "0-7", memlock: str = "unlimited", nofile: str = "65536", cap: str = "0"
    ) -> None:
        name = str(pid or "self")
        self.write(f"/proc/{name}/status", f"Name:\tx\nCapEff:\t{cap}\nCpus_allowed_list:\t{cpus}\n")
        self.write(
            f"/proc/{name}/limits",
            "Limit                     Soft Limit           Hard Limit           Units\n"
            f"Max open files            {nofile}              {nofile}              files\n"
            f"Max locked memory         {memlock}             {memlock}            bytes\n",
        )

    @property
    def host(self) -> Host:
        return Host(self.root, lambda _: self.room)

    def subject(
        self,
        daemon: DaemonFacts | None = None,
        *,
        environ: Mapping[str, str] | None = None,
        euid: int = 990,
        socket: Path = SOCKET,
    ) -> Subject:
        return Subject(RunPaths(socket), self.host, daemon or DaemonFacts(), environ or {}, euid=euid)


def mountinfo(*mounts: str) -> str:
    """Lines of mountinfo for ``POINT FSTYPE OPTIONS``."""
    lines = []
    for number, mount in enumerate(mounts, 20):
        point, fstype, options = mount.rsplit(" ", 2)
        lines.append(f"{number} 1 0:{number} / {point.replace(' ', chr(92) + '040')} {options} - {fstype} x {options}")
    return "\n".join(lines) + "\n"


def serving(*, budget: int = 8 * GIB, sessions: int = 0, locked: bool = True, pid: int = DAEMON) -> DaemonFacts:
    """A daemon of uid 990 that answers; each session is of pid WORKER and has one key."""
    stats = pb.StatsResponse(version="0.1.0", budget_bytes=budget, uptime_s=60.0)
    for number in range(sessions):
        stats.sessions.add(
            session_id=f"{number:016x}", stage="thinker", pid=WORKER, keys=[pb.KeyStats(key_id=0, locked=locked)]
        )
    return DaemonFacts(locked=True, pid=pid, uid=990, stats=stats)


def elsewhere() -> DaemonFacts:
    """A daemon that answers and lives in another pid namespace."""
    return replace(serving(), pid=0)


def only(findings: list[Finding]) -> Finding:
    (finding,) = findings
    return finding


def worst(findings: list[Finding]) -> Status:
    """The gravest status."""
    order = [Status.SKIPPED, Status.OK, Status.NOTE, Status.WARNING, Status.PROBLEM]
    return max((finding.status for finding in findings), key=order.index)
