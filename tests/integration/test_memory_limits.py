"""Limits of memory, set for real: a control group, and what mlock may take."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from stagecache import errors
from stagecache.control import connect_observer
from stagecache_wire.v1 import stagecache_pb2 as pb
from tests.daemon_process import DaemonProcess, poll_until
from tests.integration.helpers import MIB, own_daemon, status_of, worker
from tests.integration.sharing_worker import SharingWorker
from tests.integration.worker_process import attach_request, key

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may make a control group or give up a capability")

WITHOUT_MLOCK = """
import ctypes, os, resource, sys
PR_CAPBSET_DROP, CAP_IPC_LOCK = 24, 14
assert ctypes.CDLL(None).prctl(PR_CAPBSET_DROP, CAP_IPC_LOCK, 0, 0, 0) == 0
resource.setrlimit(resource.RLIMIT_MEMLOCK, (1 << 20, 1 << 20))
os.execv(sys.executable, [sys.executable, "-m", "stagecached", *sys.argv[1:]])
"""


def keys_of(daemon: DaemonProcess) -> list[pb.KeyStats]:
    with connect_observer(daemon.socket) as observer:
        return [key for session in observer.stats().sessions for key in session.keys]


def locked(daemon: DaemonProcess) -> bool:
    """Whether all keys are, and the figures say the same."""
    keys = keys_of(daemon)
    for one in keys:
        assert one.lockable_bytes > one.pool_bytes + one.staging_bytes > 0
        assert one.locked is (one.locked_bytes == one.lockable_bytes) is (one.unlocked_why == "")
    return all(one.locked for one in keys)


def anchored(pid: int) -> int:
    """Bytes of this process' page tables: what is mapped and was faulted in has entries there."""
    return status_of(pid, "RssShmem")


@needs_root
def test_adopted_memory_is_faulted_and_locked_again(fresh_daemon: DaemonProcess) -> None:
    with worker(fresh_daemon.socket) as rpc:
        rpc.attach(attach_request("s", 50_000, key()), 20.0)
        pool = 50_000 * 4 * 64
        before = anchored(fresh_daemon.pid)
        assert status_of(fresh_daemon.pid, "VmLck") > pool
        fresh_daemon.restart()
        poll_until(lambda: locked(fresh_daemon), "the keys to be locked")
        assert status_of(fresh_daemon.pid, "VmLck") > pool
        poll_until(lambda: anchored(fresh_daemon.pid) > before - MIB, "every page to be mapped")


@needs_root
def test_shared_blocks_are_faulted_and_locked_and_are_so_again_after_a_restart(tmp_path: Path) -> None:
    size = 32 * MIB
    with own_daemon(tmp_path, "--shared-bytes", str(size)) as daemon:
        sharing = SharingWorker(daemon.socket)
        before = status_of(daemon.pid, "VmLck")
        assert sharing.join().on
        assert status_of(daemon.pid, "VmLck") - before > size * 9 // 10
        assert shared_locked(daemon) == [True]
        daemon.restart()
        poll_until(lambda: shared_locked(daemon) == [True], "the namespace to be locked")
        assert status_of(daemon.pid, "VmLck") > size * 9 // 10
        assert anchored(daemon.pid) > size * 9 // 10
        sharing.close()


def shared_locked(daemon: DaemonProcess) -> list[bool]:
    with connect_observer(daemon.socket) as observer:
        return [one.locked for one in observer.stats().namespaces]


@pytest.mark.soak
@needs_root
def test_memory_that_may_not_be_locked_is_told_with_limit_and_remedy(tmp_path: Path) -> None:
    daemon = DaemonProcess(tmp_path, program=(sys.executable, "-c", WITHOUT_MLOCK))
    daemon.start()
    try:
        with worker(daemon.socket) as rpc:
            rpc.attach(attach_request("s", 50_000, key()), 20.0)
            assert not locked(daemon)
            daemon.restart()
            said = poll_until(lambda: re.findall(r"key is not locked.*", daemon.log)[1:], "the second daemon to say so")
            assert "rlimit_memlock_mib=1.0" in said[0]
            assert re.search(r"needed_mib=1[0-9]\.\d", said[0])
            assert "LimitMEMLOCK=infinity" in said[0]
            assert not locked(daemon)
            (found,) = keys_of(daemon)
            assert "RLIMIT_MEMLOCK of the daemon is 1.0 MiB" in found.unlocked_why
            assert found.locked_bytes < found.lockable_bytes
    finally:
        daemon.close()


@pytest.fixture
def group() -> Iterator[Path]:
    """A memory control group of our own, with a limit of 160 MiB, below the one that this process is in."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        hierarchy, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            base, limit = Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"
        elif hierarchy == "0" and not controllers:
            base, limit = Path("/sys/fs/cgroup"), "memory.max"
        else:
            continue
        folder = base / path.lstrip("/") / f"stagecache-test-{os.getpid()}"
        try:
            folder.mkdir()
        except OSError:
            continue
        try:
            (folder / limit).write_text(str(160 * MIB))
        except OSError:
            folder.rmdir()
            continue
        yield folder
        members = folder / "cgroup.procs"
        poll_until(lambda members=members: not members.read_text(), "the group to be empty")
        folder.rmdir()
        return
    pytest.skip("no memory control group can be made here")


IN_GROUP = """
import os, pathlib, sys
pathlib.Path(sys.argv[1], "cgroup.procs").write_text(str(os.getpid()))
os.execv(sys.executable, [sys.executable, "-m", "stagecached", *sys.argv[2:]])
"""


@needs_root
def test_control_group_without_room_is_a_refusal_and_no_kill(group: Path, tmp_path: Path) -> None:
    daemon = DaemonProcess(tmp_path, "--shared-bytes", "512MiB", program=(sys.executable, "-c", IN_GROUP, str(group)))
    daemon.start()
    try:
        with worker(daemon.socket) as rpc:
            pid = daemon.pid
            with pytest.raises(errors.BudgetError, match=r"memory limit of 160\.0 MiB, of which") as caught:
                rpc.attach(attach_request("s", 1 << 19, key()), 20.0)  # 128 MiB of rows
            assert "MemoryMax=" in caught.value.remedy
            sharing = SharingWorker(daemon.socket)
            joined = sharing.join()  # half a GiB of shared blocks
            assert not joined.on
            assert "memory limit of 160.0 MiB, of which" in joined.why
            sharing.close()
            assert int(caught.value.facts["needed_bytes"]) > int(caught.value.facts["cgroup_free_bytes"])
            rpc.attach(attach_request("s", 1 << 16, key()), 20.0)
            assert daemon.pid == pid
    finally:
        daemon.close()
