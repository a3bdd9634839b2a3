"""One daemon a run directory."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from stagecache_wire import locks
from stagecache_wire.locks import LifeLock
from stagecache_wire.names import RunPaths
from stagecached import ownership
from stagecached.access import Access
from stagecached.ownership import RunDirectory, StartError


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    return RunPaths.of(tmp_path / "d.sock")


@pytest.fixture
def claimed(paths: RunPaths) -> Iterator[RunDirectory]:
    directory = RunDirectory.claim(paths, Access())
    yield directory
    directory.release(keep_sessions=False)


def test_directory_is_private(claimed: RunDirectory, paths: RunPaths) -> None:
    assert stat.S_IMODE(paths.directory.stat().st_mode) == 0o700
    assert stat.S_IMODE(paths.sessions.stat().st_mode) == 0o700


def test_second_claim_is_refused_with_its_holder(claimed: RunDirectory, paths: RunPaths) -> None:
    with pytest.raises(StartError, match=r"pid \d+, run directory .*d\.sock\.d, started"):
        RunDirectory.claim(paths, Access())


def test_released_directory_may_be_claimed_again_and_leaves_no_lock(paths: RunPaths) -> None:
    RunDirectory.claim(paths, Access()).release(keep_sessions=False)
    assert not paths.lock.exists()
    assert not paths.shm_lock.exists()
    RunDirectory.claim(paths, Access()).release(keep_sessions=True)
    assert paths.shm_lock.exists()
    RunDirectory.claim(paths, Access()).release(keep_sessions=False)


def test_lock_that_a_sweep_holds_for_a_moment_is_waited_for(paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    RunDirectory.claim(paths, Access()).release(keep_sessions=False)
    sweeper = LifeLock(paths.shm_lock)
    monkeypatch.setattr(locks.time, "sleep", lambda _: sweeper.release(unlink=True))
    RunDirectory.claim(paths, Access()).release(keep_sessions=False)


def test_lock_in_shared_memory_that_stays_held_is_a_refusal(paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    RunDirectory.claim(paths, Access()).release(keep_sessions=False)
    monkeypatch.setattr(ownership, "SHM_LOCK_TIMEOUT_S", 0.0)
    holder = LifeLock(paths.shm_lock)
    with pytest.raises(StartError, match="shared memory"):
        RunDirectory.claim(paths, Access())
    holder.release(unlink=True)
    RunDirectory.claim(paths, Access()).release(keep_sessions=False)  # the first lock was given back


def test_stale_socket_goes_and_anything_else_stays(claimed: RunDirectory, paths: RunPaths) -> None:
    import socket

    claimed.remove_stale_socket()
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(paths.socket))
    claimed.remove_stale_socket()
    assert not paths.socket.exists()
    paths.socket.write_text("precious")
    with pytest.raises(StartError, match="no socket"):
        claimed.remove_stale_socket()
