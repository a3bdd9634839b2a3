"""Limits that the kernel enforces are known before it does: control groups of both versions, and mlock."""

from __future__ import annotations

from pathlib import Path

import pytest

from stagecache_wire.v1 import stagecache_pb2 as pb
from stagecached.budget import MIB, Budget, Cost
from stagecached.memory_limits import CgroupRoom, MemlockRoom, cgroup_room, memlock_room
from stagecached.refusal import Refusal

NO_LIMIT_V1 = 9223372036854771712


def write(root: Path, path: str, text: str) -> None:
    target = root / path
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text)


def group_v2(root: Path, folder: str, limit: str, used: int, cache: int = 0) -> None:
    base = f"sys/fs/cgroup/{folder}"
    write(root, f"{base}/memory.max", f"{limit}\n")
    write(root, f"{base}/memory.current", f"{used}\n")
    write(root, f"{base}/memory.stat", f"anon 5\ninactive_file {cache}\nactive_file 7\n")


def group_v1(root: Path, folder: str, limit: int, used: int, cache: int = 0) -> None:
    base = f"sys/fs/cgroup/memory/{folder}"
    write(root, f"{base}/memory.limit_in_bytes", f"{limit}\n")
    write(root, f"{base}/memory.usage_in_bytes", f"{used}\n")
    write(root, f"{base}/memory.stat", f"inactive_file 1\ntotal_inactive_file {cache}\n")


def test_version_2_the_tightest_limit_up_to_the_root_counts(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "0::/pod/daemon\n")
    group_v2(tmp_path, "pod/daemon", "max", 10)
    group_v2(tmp_path, "pod", "1000", 600, cache=50)
    assert cgroup_room(tmp_path) == CgroupRoom(1000, 450)
    group_v2(tmp_path, "pod/daemon", "500", 400)
    assert cgroup_room(tmp_path) == CgroupRoom(500, 100)


def test_version_1_and_a_hybrid_of_both(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "9:name=systemd:/\n4:cpuset,memory:/docker/x\n0::/\n")
    group_v1(tmp_path, "docker/x", 900, 300, cache=100)
    group_v1(tmp_path, "", NO_LIMIT_V1, 300)
    assert cgroup_room(tmp_path) == CgroupRoom(900, 700)


def test_a_container_sees_its_own_group_at_the_top(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "4:memory:/kubepods/pod1/abc\n")
    group_v1(tmp_path, "", 800, 100)
    assert cgroup_room(tmp_path) == CgroupRoom(800, 700)
    write(tmp_path, "proc/self/cgroup", "0::/../../elsewhere\n")
    group_v2(tmp_path, "", "700", 100)
    assert cgroup_room(tmp_path) == CgroupRoom(700, 600)


@pytest.mark.parametrize("limit", ["max", "", "nonsense"])
def test_no_limit_is_none(tmp_path: Path, limit: str) -> None:
    assert cgroup_room(tmp_path) is None
    write(tmp_path, "proc/self/cgroup", "0::/\n")
    group_v2(tmp_path, "", limit, 100)
    assert cgroup_room(tmp_path) is None


def test_refusal_names_the_control_group_with_needed_free_and_remedy() -> None:
    room = CgroupRoom(100 * MIB, 60 * MIB)
    account = Budget(1 << 40, lambda: 1 << 40, lambda: room)
    account.reserve("first", "attach of first", [Cost(pools=20 * MIB)])
    with pytest.raises(Refusal) as caught:
        account.reserve("second", "attach of second", [Cost(pools=41 * MIB)])
    refusal = caught.value
    assert refusal.reason == pb.REASON_SHM_FULL
    assert "attach of second needs 41.0 MiB" in refusal.message
    assert "memory limit of 100.0 MiB, of which 40.0 are free" in refusal.message
    for word in ("--memory", "resources.limits.memory", "MemoryMax="):
        assert word in refusal.remedy
    assert refusal.facts["cgroup_free_bytes"] == str(40 * MIB)
    account.reserve("second", "attach of second", [Cost(pools=40 * MIB)])


def test_memlock_room_is_read_of_proc(tmp_path: Path) -> None:
    assert memlock_room(tmp_path) == MemlockRoom(0, 0, False)
    write(tmp_path, "proc/self/limits", "Max locked memory         8388608              8388608              bytes\n")
    write(tmp_path, "proc/self/status", "VmPeak: 1 kB\nVmLck:\t     128 kB\n")
    write(tmp_path, "proc/meminfo", "SwapTotal:        2048 kB\n")
    assert memlock_room(tmp_path) == MemlockRoom(8 << 20, 128 << 10, True)
