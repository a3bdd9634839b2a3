"""Only what has no living owner, only our own prefix and form."""

from __future__ import annotations

from pathlib import Path

import pytest

from stagecache_wire.locks import LifeLock
from stagecached import sweep

NODE, OTHER = "0123456789ab", "ba9876543210"
ONE, TWO = "1" * 16, "2" * 16


@pytest.fixture
def shm(tmp_path: Path) -> Path:
    """Stands for /dev/shm."""
    return tmp_path


def leave(shm: Path, node: str, session_id: str) -> None:
    """What a session leaves: segments, semaphores, lock files."""
    for part in ("control", "arena", "slots", "staging0", "pool0", "table12", "lock"):
        (shm / f"stagecache.{node}.{session_id}.{part}").touch()
    for part in ("daemon", "worker"):
        (shm / f"sem.stagecache.{node}.{session_id}.{part}").touch()
    (shm / f"stagecache.{node}.lock").touch()


def names(shm: Path) -> set[str]:
    return {path.name for path in shm.iterdir()}


def test_dead_group_is_removed_whole(shm: Path) -> None:
    leave(shm, OTHER, ONE)
    leave(shm, OTHER, TWO)
    assert sweep.sweep_other_nodes(NODE, shm) == 19
    assert names(shm) == set()


def test_group_of_a_live_daemon_is_not_touched(shm: Path) -> None:
    leave(shm, OTHER, ONE)
    before = names(shm)
    lock = LifeLock(shm / f"stagecache.{OTHER}.lock")
    assert sweep.sweep_other_nodes(NODE, shm) == 0
    assert names(shm) == before
    lock.release()


def test_session_of_a_live_worker_is_kept_and_its_nodes_lock_with_it(shm: Path) -> None:
    leave(shm, OTHER, ONE)
    leave(shm, OTHER, TWO)
    lock = LifeLock(shm / f"stagecache.{OTHER}.{ONE}.lock")
    assert sweep.sweep_other_nodes(NODE, shm) == 9
    assert all(ONE in name or name == f"stagecache.{OTHER}.lock" for name in names(shm))
    assert len(names(shm)) == 10
    lock.release()
    sweep.sweep_other_nodes(NODE, shm)
    assert names(shm) == set()


def test_shared_blocks_go_with_their_daemon_unless_a_worker_of_it_lives(shm: Path) -> None:
    """A daemon may come back for both; without either, nobody would ever unlink them."""
    leave(shm, OTHER, ONE)
    shared = [shm / f"stagecache.{node}.shared.{ONE}" for node in (OTHER, NODE)]
    for path in shared:
        path.touch()
    worker = LifeLock(shm / f"stagecache.{OTHER}.{ONE}.lock")
    assert sweep.sweep_other_nodes(NODE, shm) == 0
    worker.release()
    daemon = LifeLock(shm / f"stagecache.{OTHER}.lock")
    assert sweep.sweep_other_nodes(NODE, shm) == 0
    daemon.release()
    assert sweep.sweep_other_nodes(NODE, shm) == 11
    assert names(shm) == {shared[1].name}
    assert sweep.remove_shared_files(NODE, shm, keep={shared[1].name}) == 0
    assert sweep.remove_shared_files(NODE, shm) == 1


def test_own_group_is_left_to_adoption(shm: Path) -> None:
    leave(shm, NODE, ONE)
    before = names(shm)
    assert sweep.sweep_other_nodes(NODE, shm) == 0
    assert names(shm) == before


@pytest.mark.parametrize(
    "name",
    [
        "stagecache",
        "stagecache.notes.txt",
        f"stagecache.{OTHER}x.lock",
        f"stagecache.{OTHER}.{ONE}",
        f"stagecache.{OTHER}.{ONE}.control.bak",
        f"stagecache.{OTHER[:-1]}.{ONE}.control",
        f"mystagecache.{OTHER}.{ONE}.control",
        f"sem.other.{OTHER}.{ONE}.daemon",
        "psm_12345678",
    ],
)
def test_name_of_another_form_is_never_touched(shm: Path, name: str) -> None:
    (shm / name).touch()
    sweep.sweep_other_nodes(NODE, shm)
    assert names(shm) == {name}


def test_file_of_another_user_is_never_touched(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leave(shm, OTHER, ONE)
    monkeypatch.setattr(sweep.os, "geteuid", lambda: 424242)
    assert sweep.node_groups(shm) == {}


def test_files_of_a_session_may_be_removed_but_its_lock_and_what_is_listed(shm: Path) -> None:
    leave(shm, NODE, ONE)
    leave(shm, NODE, TWO)
    sweep.remove_files(sweep.session_files(NODE, ONE, shm), keep=frozenset({"control", "daemon"}))
    left = {name for name in names(shm) if ONE in name}
    stem = f"stagecache.{NODE}.{ONE}"
    assert left == {f"{stem}.control", f"sem.{stem}.daemon", f"{stem}.lock"}
    assert sum(TWO in name for name in names(shm)) == 9


def test_parts_are_named_without_their_session(shm: Path) -> None:
    leave(shm, NODE, ONE)
    parts = {sweep.part_of(path) for path in sweep.session_files(NODE, ONE, shm)}
    assert parts == {"control", "arena", "slots", "staging0", "pool0", "table12", "lock", "daemon", "worker"}


def test_of_one_session_no_other_file_is_looked_at(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A start with many sessions would else look at each file once a session."""
    leave(shm, NODE, ONE)
    leave(shm, NODE, TWO)
    looked: list[str] = []
    inner = sweep._is_own
    monkeypatch.setattr(sweep, "_is_own", lambda path: looked.append(path.name) or inner(path))
    assert len(sweep.session_files(NODE, ONE, shm)) == 9
    assert all(ONE in name for name in looked)
    assert len(looked) == 9
