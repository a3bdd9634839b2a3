"""Segments and semaphores: really there, really gone."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator
from pathlib import Path

import posix_ipc
import pytest

from stagecache_wire import shm
from stagecache_wire.names import RunPaths, SessionNames


@pytest.fixture
def name() -> Iterator[str]:
    made = f"stagecache-test.{secrets.token_hex(6)}"
    yield made
    shm.unlink_segment(made)
    shm.unlink_semaphore(made)


def test_a_segment_is_zero_private_and_has_its_memory(name: str) -> None:
    segment = shm.create_segment(name, 10_000)
    status = (shm.SHM_DIRECTORY / name).stat()
    assert (status.st_size, status.st_mode & 0o777) == (10_000, 0o600)
    assert status.st_blocks * 512 >= 10_000, "ftruncate alone would leave holes, and SIGBUS for later"
    assert bytes(segment.view) == bytes(10_000)
    segment.view[3] = 7
    assert shm.open_segment(name).view[3] == 7


def test_a_group_mode_is_not_cut_by_the_umask(name: str) -> None:
    shm.create_segment(name, 4096, 0o660)
    assert (shm.SHM_DIRECTORY / name).stat().st_mode & 0o777 == 0o660


def test_a_segment_that_does_not_fit_says_how_much_and_leaves_nothing(name: str) -> None:
    needed = shm.free_bytes() + (1 << 40)
    with pytest.raises(shm.ShmFullError) as caught:
        shm.create_segment(name, needed)
    assert caught.value.needed == needed
    assert caught.value.free > 0
    assert not (shm.SHM_DIRECTORY / name).exists()


def test_a_name_is_taken_once(name: str) -> None:
    shm.create_segment(name, 4096)
    with pytest.raises(posix_ipc.ExistentialError):
        shm.create_segment(name, 4096)
    assert (shm.SHM_DIRECTORY / name).exists(), "who was first keeps it"


def test_an_unlinked_segment_stays_where_it_is_mapped(name: str) -> None:
    segment = shm.create_segment(name, 4096)
    shm.unlink_segment(name)
    segment.view[0] = 9
    assert segment.view[0] == 9
    with pytest.raises(FileNotFoundError):
        shm.open_segment(name)
    shm.unlink_segment(name)


def test_prefault_changes_no_byte(name: str) -> None:
    segment = shm.create_segment(name, 3 * 4096)
    segment.view[5000] = 200
    shm.prefault(segment)
    assert segment.view[5000] == 200
    assert not any(segment.view[:5000])


def locked_bytes() -> int:
    return int(re.findall(r"VmLck:\s+(\d+) kB", Path("/proc/self/status").read_text())[0]) * 1024


def test_locked_memory_is_told_truly(name: str) -> None:
    segment, before = shm.create_segment(name, 1 << 20), locked_bytes()
    why = shm.lock_memory(segment)
    assert (locked_bytes() - before >= 1 << 20) is (why == "")


def test_a_semaphore_starts_silent_and_is_gone_once(name: str) -> None:
    shm.create_semaphore(name)
    bell = shm.open_semaphore(name)
    assert bell.value == 0
    other = shm.open_semaphore(name)
    other.release()
    bell.acquire(0)
    with pytest.raises(posix_ipc.BusyError):
        bell.acquire(0.01)
    bell.close()
    other.close()
    shm.unlink_semaphore(name)
    with pytest.raises(FileNotFoundError):
        shm.open_semaphore(name)
    shm.unlink_semaphore(name)


def mapped(name: str) -> int:
    return sum(name in line for line in Path("/proc/self/maps").read_text().splitlines())


def test_a_closed_semaphore_is_not_mapped_any_more(name: str) -> None:
    """A page a session would add up in a daemon that lives for months."""
    shm.create_semaphore(name)
    assert mapped(name) == 0
    bell = shm.open_semaphore(name)
    assert mapped(name) == 1
    with pytest.raises(FileNotFoundError):
        shm.open_doorbells(name, f"{name}gone")
    bell.close()
    assert mapped(name) == 0
    shm.unlink_semaphore(name)


def test_names_are_of_one_session_of_one_daemon(tmp_path: Path) -> None:
    names = SessionNames("0123456789ab", "0123456789abcdef")
    parts = [
        names.control,
        names.arena,
        names.slots,
        names.daemon_doorbell,
        names.worker_doorbell,
        names.worker_lock.name,
        *(part(key_id) for part in (names.staging, names.pool, names.table) for key_id in (0, 11)),
    ]
    assert len(set(parts)) == len(parts)
    assert all(part.startswith(f"stagecache.{names.node}.{names.session_id}.") for part in parts)


def test_two_run_directories_are_two_nodes(tmp_path: Path) -> None:
    """Also where one path is two directories, one after the other: their inodes differ."""
    nodes = set()
    for folder in ("a", "b"):
        paths = RunPaths.of(tmp_path / folder / "d.sock")
        paths.directory.mkdir(parents=True)
        nodes.add(paths.node)
        assert paths.node == RunPaths.of(tmp_path / "a" / ".." / folder / "d.sock").node
    assert len(nodes) == 2
