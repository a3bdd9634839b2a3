"""What doctor looks at on the host: each trap is found, and each finding says how to mend it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from stagecache import errors, rpc
from stagecache.doctor import Status, access_checks, cpu_checks, limit_checks, shm_checks
from stagecache.doctor.host import UNLIMITED, parse_cpus, show_cpus
from stagecache.doctor.subject import DaemonFacts
from stagecache_wire.locks import LifeLock
from tests.unit.client.doctor_kit import (
    DAEMON,
    GIB,
    MIB,
    WORKER,
    FakeHost,
    Room,
    elsewhere,
    mountinfo,
    only,
    serving,
    worst,
)


@pytest.fixture
def fake(tmp_path: Path) -> FakeHost:
    return FakeHost(tmp_path)


# ---------------------------------------------------------------- /dev/shm


def test_healthy_shm(fake: FakeHost) -> None:
    subject = fake.subject(serving())
    assert only(list(shm_checks.check_mount(subject))).status is Status.OK
    assert only(list(shm_checks.check_size(subject))).status is Status.OK
    assert only(list(shm_checks.check_leftovers(subject))).status is Status.OK


def test_container_default_of_64_mib_is_a_problem(fake: FakeHost) -> None:
    fake.room = Room(64 * MIB, 64 * MIB)
    finding = only(list(shm_checks.check_size(fake.subject())))
    assert finding.status is Status.PROBLEM
    for word in ("--shm-size", "shm_size", "emptyDir"):
        assert word in finding.remedy


@pytest.mark.parametrize(
    ("room", "budget", "status", "word"),
    [
        (Room(4 * GIB, 4 * GIB), 8 * GIB, Status.PROBLEM, "budget"),
        (Room(512 * MIB, 512 * MIB), 256 * MIB, Status.WARNING, "1 GiB"),
        (Room(16 * GIB, 100 * MIB), 8 * GIB, Status.WARNING, "free"),
        (Room(128 * GIB, 128 * GIB), 8 * GIB, Status.WARNING, "of memory"),
    ],
)
def test_shm_of_a_wrong_size(fake: FakeHost, room: Room, budget: int, status: Status, word: str) -> None:
    fake.room = room
    findings = list(shm_checks.check_size(fake.subject(serving(budget=budget))))
    assert worst(findings) is status
    assert word in findings[-1].found


def test_shm_that_is_no_tmpfs(fake: FakeHost) -> None:
    fake.write("/proc/self/mountinfo", mountinfo("/ overlay rw"))
    assert only(list(shm_checks.check_mount(fake.subject()))).status is Status.WARNING
    fake.write("/proc/self/mountinfo", mountinfo("/ overlay rw", "/dev/shm tmpfs ro"))
    assert only(list(shm_checks.check_mount(fake.subject()))).status is Status.PROBLEM
    (fake.root / "dev/shm").rmdir()
    assert only(list(shm_checks.check_mount(fake.subject()))).status is Status.PROBLEM


def test_leftovers_of_dead_daemons_are_counted(fake: FakeHost) -> None:
    shm = fake.root / "dev/shm"
    for node in ("a" * 12, "b" * 12):
        (shm / f"stagecache.{node}.lock").touch()
        (shm / f"stagecache.{node}.{'0' * 16}.pool0").write_bytes(bytes(MIB))
    live = LifeLock(shm / f"stagecache.{'b' * 12}.lock")
    try:
        finding = only(list(shm_checks.check_leftovers(fake.subject())))
    finally:
        live.release()
    assert finding.status is Status.NOTE
    assert "1 daemons" in finding.found
    assert "1 MiB" in finding.found


@pytest.mark.parametrize(("here", "status"), [(True, Status.OK), (False, Status.PROBLEM)])
def test_daemon_with_another_shm(fake: FakeHost, monkeypatch: pytest.MonkeyPatch, here: bool, status: Status) -> None:
    """The socket is shared and /dev/shm is not: attach would fail, though the daemon answers."""
    lock = Path("/dev/shm/stagecache.x.lock")
    if here:
        fake.write(str(lock), "")
    credentials = rpc.Credentials("0" * 16, "token", 1, lock, "worker", Path("/run/d.sock"))
    monkeypatch.setattr(rpc, "handshake", lambda *_, **__: credentials)
    assert only(list(shm_checks.check_shared(fake.subject(serving())))).status is status
    assert only(list(shm_checks.check_shared(fake.subject()))).status is Status.SKIPPED


# ------------------------------------------------------------------ limits


def test_memlock(fake: FakeHost) -> None:
    assert only(list(limit_checks.check_memlock(fake.subject(serving())))).status is Status.OK
    fake.process(DAEMON, memlock="8388608")
    finding = only(list(limit_checks.check_memlock(fake.subject(serving(sessions=1, locked=False)))))
    assert (finding.status, "no swap" in finding.found) == (Status.NOTE, True)
    fake.write("/proc/meminfo", "MemTotal: 67108864 kB\nSwapTotal: 1048576 kB\n")
    finding = only(list(limit_checks.check_memlock(fake.subject(serving(sessions=1, locked=False)))))
    assert finding.status is Status.WARNING
    assert "LimitMEMLOCK=infinity" in finding.remedy
    fake.process(DAEMON, memlock="8388608", cap="4000")
    assert only(list(limit_checks.check_memlock(fake.subject(serving())))).status is Status.OK


def test_open_files(fake: FakeHost) -> None:
    assert only(list(limit_checks.check_files(fake.subject(serving())))).status is Status.OK
    fake.process(DAEMON, nofile="1024")
    assert only(list(limit_checks.check_files(fake.subject(serving())))).status is Status.WARNING
    for number in range(900):
        fake.write(f"/proc/{DAEMON}/fd/{number}", "")
    finding = only(list(limit_checks.check_files(fake.subject(serving()))))
    assert finding.status is Status.PROBLEM
    assert "LimitNOFILE" in finding.remedy


def test_process_of_another_container_is_not_judged(fake: FakeHost) -> None:
    subject = fake.subject(elsewhere())
    for check in (
        limit_checks.check_memlock,
        limit_checks.check_files,
        limit_checks.check_cgroup,
        cpu_checks.check_affinity,
    ):
        assert only(list(check(subject))).status is Status.SKIPPED


# ----------------------------------------------------------------- cgroups


def test_memory_limit_below_the_budget_is_a_problem(fake: FakeHost) -> None:
    fake.write(f"/proc/{DAEMON}/cgroup", "0::/a/b\n")
    fake.write("/sys/fs/cgroup/a/memory.max", f"{4 * GIB}\n")
    fake.write("/sys/fs/cgroup/a/b/memory.max", "max\n")
    fake.write("/sys/fs/cgroup/a/b/memory.events", "low 0\noom 3\noom_kill 2\n")
    findings = list(limit_checks.check_cgroup(fake.subject(serving(budget=8 * GIB))))
    assert [finding.status for finding in findings] == [Status.PROBLEM, Status.WARNING]
    assert "4.0 GiB" in findings[0].found
    assert "2 processes" in findings[1].found


def test_version_1_and_a_containers_own_view(fake: FakeHost) -> None:
    fake.write(f"/proc/{DAEMON}/cgroup", "12:cpu,cpuacct:/x\n4:memory:/docker/abc\n")
    fake.write("/sys/fs/cgroup/memory/memory.limit_in_bytes", f"{10 * GIB}\n")
    assert fake.host.cgroup_memory(DAEMON).limit_bytes == 10 * GIB
    fake.write("/sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n")
    assert fake.host.cgroup_memory(DAEMON).limit_bytes == UNLIMITED
    fake.write(f"/proc/{DAEMON}/cgroup", "0::/../other\n")
    assert fake.host.cgroup_memory(DAEMON) is None


def test_enough_memory(fake: FakeHost) -> None:
    fake.write(f"/proc/{DAEMON}/cgroup", "0::/\n")
    fake.write("/sys/fs/cgroup/memory.max", f"{9 * GIB}\n")
    assert only(list(limit_checks.check_cgroup(fake.subject(serving(budget=8 * GIB))))).status is Status.OK
    fake.write("/sys/fs/cgroup/memory.max", "max\n")
    assert only(list(limit_checks.check_cgroup(fake.subject(serving(budget=63 * GIB))))).status is Status.WARNING


# ---------------------------------------------------------------- the rest


def test_logind_takes_the_segments_of_login_users(fake: FakeHost) -> None:
    assert only(list(limit_checks.check_logind(fake.subject(euid=1000)))).status is Status.SKIPPED
    fake.write("/run/systemd/users/1000", "")
    assert only(list(limit_checks.check_logind(fake.subject(euid=990)))).status is Status.OK
    finding = only(list(limit_checks.check_logind(fake.subject(euid=1000))))
    assert finding.status is Status.WARNING
    assert "RemoveIPC=no" in finding.remedy
    fake.write("/etc/systemd/logind.conf", "[Login]\n#RemoveIPC=yes\n")
    fake.write("/etc/systemd/logind.conf.d/10-ipc.conf", "[Login]\nRemoveIPC=no\n")
    assert only(list(limit_checks.check_logind(fake.subject(euid=1000)))).status is Status.OK


@pytest.mark.parametrize(("release", "status"), [("6.5.0", Status.OK), ("5.10.0", Status.NOTE), ("", Status.SKIPPED)])
def test_kernel(fake: FakeHost, release: str, status: Status) -> None:
    fake.write("/proc/sys/kernel/osrelease", release)
    assert only(list(limit_checks.check_kernel(fake.subject()))).status is status


def test_daemon_on_an_engines_core(fake: FakeHost) -> None:
    fake.write(f"/proc/{WORKER}/maps", f"7f0 rw-s /dev/shm/stagecache.{'a' * 12}.{0:016x}.control\n")
    subject = fake.subject(serving(sessions=1))
    finding = only(list(cpu_checks.check_affinity(subject)))
    assert finding.status is Status.WARNING
    assert "CPUAffinity=" in finding.remedy
    fake.process(DAEMON, cpus="6-7")
    fake.process(WORKER, cpus="0-5")
    assert only(list(cpu_checks.check_affinity(subject))).status is Status.OK
    fake.write(f"/proc/{WORKER}/maps", "")
    assert only(list(cpu_checks.check_affinity(subject))).status is Status.OK
    fake.process(DAEMON)
    assert only(list(cpu_checks.check_affinity(subject))).status is Status.NOTE
    fake.write("/sys/devices/system/cpu/online", "0\n")
    assert only(list(cpu_checks.check_affinity(subject))).status is Status.WARNING


@pytest.mark.parametrize("text", ["0", "0-3", "0-3,8", "1,3,5-6"])
def test_cpu_lists(text: str) -> None:
    assert show_cpus(parse_cpus(text)) == text


# ------------------------------------------------------------------ access


def test_socket_file_mounted_instead_of_its_directory(fake: FakeHost) -> None:
    fake.write("/run/stagecache/d.sock", "")
    fake.write("/proc/self/mountinfo", mountinfo("/ overlay rw", "/run/stagecache/d.sock tmpfs rw"))
    finding = only(list(access_checks.check_path(fake.subject())))
    assert finding.status is Status.PROBLEM
    assert "Mount the directory" in finding.remedy


def test_socket_path_that_the_runtime_made_a_directory(fake: FakeHost) -> None:
    (fake.root / "run/stagecache/d.sock").mkdir()
    finding = only(list(access_checks.check_path(fake.subject())))
    assert finding.status is Status.PROBLEM
    assert "is a directory" in finding.found


@pytest.mark.parametrize(
    ("mounts", "container", "status"),
    [
        (("/ ext4 rw", "/run tmpfs rw"), False, Status.OK),
        (("/ overlay rw",), True, Status.PROBLEM),
        (("/ overlay rw",), False, Status.OK),
        (("/ overlay rw", "/run/stagecache ext4 rw"), True, Status.OK),
        (("/ ext4 rw", "/run nfs4 rw"), False, Status.PROBLEM),
    ],
)
def test_file_system_of_the_socket(fake: FakeHost, mounts: tuple[str, ...], container: bool, status: Status) -> None:
    if container:
        fake.write("/.dockerenv", "")
    fake.write("/proc/self/mountinfo", mountinfo(*mounts))
    assert only(list(access_checks.check_path(fake.subject()))).status is status


def test_long_path_is_a_problem(fake: FakeHost) -> None:
    subject = fake.subject(socket=Path("/run") / ("x" * 100) / "d.sock")
    assert only(list(access_checks.check_path(subject))).status is Status.PROBLEM


@pytest.mark.parametrize(("mode", "status"), [(0o700, Status.OK), (0o750, Status.OK), (0o755, Status.PROBLEM)])
def test_modes_of_the_run_directory(fake: FakeHost, mode: int, status: Status) -> None:
    (fake.root / "run/stagecache/d.sock.d").chmod(mode)
    assert only(list(access_checks.check_modes(fake.subject()))).status is status


def test_directory_that_anybody_may_change(fake: FakeHost) -> None:
    (fake.root / "run/stagecache").chmod(0o777)
    assert only(list(access_checks.check_modes(fake.subject()))).status is Status.WARNING
    (fake.root / "run/stagecache").chmod(0o1777)
    assert only(list(access_checks.check_modes(fake.subject()))).status is Status.OK


def test_why_no_daemon_answers(fake: FakeHost) -> None:
    gone = errors.DaemonUnavailableError("no stagecached at x.", remedy="Start one.")
    for daemon, word in (
        (DaemonFacts(locked=False, error=gone), "no daemon serves"),
        (DaemonFacts(locked=True, error=gone), "holds the lock"),
        (DaemonFacts(uid=990, pid=DAEMON, error=gone), "does not answer"),
        (DaemonFacts(uid=990, error=errors.TokenRefusedError("serves uid 990.", remedy="--group")), "serves uid 990"),
        (DaemonFacts(uid=990, error=errors.AbiMismatchError("ABI 2.", remedy="same")), "another release"),
    ):
        finding = only(list(access_checks.check_daemon(fake.subject(daemon))))
        assert finding.status is Status.PROBLEM
        assert word in finding.found
        assert finding.remedy


def test_socket_without_its_run_directory_is_a_trap(fake: FakeHost) -> None:
    (fake.root / "run/stagecache/d.sock.d").rmdir()
    error = errors.DaemonUnavailableError("no stagecached at x.", remedy="Start one.")
    finding = only(list(access_checks.check_daemon(fake.subject(DaemonFacts(uid=990, error=error)))))
    assert "Mount the directory" in finding.remedy


def test_stale_socket_is_told_from_none(tmp_path: Path, fake: FakeHost) -> None:
    import socket

    here = os.getcwd()
    os.chdir(fake.root / "run/stagecache")
    try:
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind("d.sock")
    finally:
        os.chdir(here)
    finding = only(list(access_checks.check_daemon(fake.subject(DaemonFacts(locked=False)))))
    assert "left by a daemon that is dead" in finding.found


def test_failed_session_is_a_problem(fake: FakeHost) -> None:
    daemon = serving(sessions=1)
    daemon.stats.sessions[0].failure = "record 7: slot 99 of 64"
    findings = list(access_checks.check_daemon(fake.subject(daemon)))
    assert worst(findings) is Status.PROBLEM
    assert "record 7" in findings[-1].found


@pytest.mark.parametrize(
    ("daemon", "euid", "status"),
    [
        (serving(), 990, Status.OK),
        (serving(), 991, Status.OK),
        (DaemonFacts(uid=0), 991, Status.NOTE),
        (DaemonFacts(uid=990), 991, Status.PROBLEM),
        (DaemonFacts(), 991, Status.NOTE),
    ],
)
def test_users(fake: FakeHost, daemon: DaemonFacts, euid: int, status: Status) -> None:
    assert only(list(access_checks.check_user(fake.subject(daemon, euid=euid)))).status is status
