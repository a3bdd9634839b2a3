"""Workers and daemons that die, and what must be left: everything of the living, nothing of the dead."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stagecache import errors
from stagecache.control import connect_observer
from stagecache.rpc import Rpc, handshake
from stagecache_wire import layout, shm
from stagecache_wire.names import SessionNames
from stagecache_wire.v1 import stagecache_pb2 as pb
from tests.daemon_process import DaemonProcess, poll_until
from tests.integration.helpers import MIB, own_daemon, session_ids, status_of, worker
from tests.integration.worker_process import WorkerProcess, attach_request, key


def test_detach_gives_everything_back(fresh_daemon: DaemonProcess) -> None:
    before = fresh_daemon.shm_files()
    resident = status_of(fresh_daemon.pid, "RssShmem")
    with worker(fresh_daemon.socket) as rpc:
        rpc.attach(attach_request("s", 10_000, key()), 20.0)
        assert status_of(fresh_daemon.pid, "RssShmem") > resident + 2 * MIB
    assert fresh_daemon.shm_files() == before
    assert status_of(fresh_daemon.pid, "RssShmem") < resident + MIB
    assert list(fresh_daemon.paths.sessions.iterdir()) == []


def test_memory_of_a_killed_worker_is_back_within_a_second(fresh_daemon: DaemonProcess) -> None:
    resident = status_of(fresh_daemon.pid, "RssShmem")
    with WorkerProcess(fresh_daemon.socket, num_blocks=500_000) as dead:
        assert status_of(fresh_daemon.pid, "RssShmem") > resident + 100 * MIB
        dead.kill()
        started = time.monotonic()
        poll_until(lambda: len(fresh_daemon.shm_files()) == 1, "the segments to go")
        poll_until(lambda: status_of(fresh_daemon.pid, "RssShmem") < resident + MIB, "the memory to be back")
        assert time.monotonic() - started < 1.0
    assert session_ids(fresh_daemon.socket) == []


def test_worker_that_dies_after_an_adoption_is_noticed_by_its_lock(fresh_daemon: DaemonProcess) -> None:
    with WorkerProcess(fresh_daemon.socket) as dead:
        fresh_daemon.restart()
        assert session_ids(fresh_daemon.socket) == [dead.session_id]
        dead.kill()
        poll_until(lambda: len(fresh_daemon.shm_files()) == 1, "the segments to go", 5.0)


def test_stopped_worker_keeps_its_session(fresh_daemon: DaemonProcess) -> None:
    with WorkerProcess(fresh_daemon.socket) as stopped:
        os.kill(stopped.process.pid, signal.SIGSTOP)
        fresh_daemon.restart()
        with connect_observer(fresh_daemon.socket) as observer:
            deadline = time.monotonic() + 1.2  # two polls of the lock
            while time.monotonic() < deadline:
                assert [s.session_id for s in observer.stats().sessions] == [stopped.session_id]
        os.kill(stopped.process.pid, signal.SIGCONT)


def test_lost_stream_ends_nothing(daemon: DaemonProcess) -> None:
    with worker(daemon.socket) as rpc:
        rpc.attach(attach_request("s", 16), 20.0)
        with Rpc(rpc.credentials) as other:
            watch = other.watch()
            next(iter(watch))
            watch.cancel()
        assert rpc.credentials.session_id in session_ids(daemon.socket)


def test_killed_daemon_adopts_sessions_of_live_workers(fresh_daemon: DaemonProcess) -> None:
    with worker(fresh_daemon.socket) as rpc:
        answer = rpc.attach(attach_request("s", 16, key()), 20.0)
        late = rpc.open_key(pb.OpenKeyRequest(key=key("late")), 20.0)
        fresh_daemon.restart()
        credentials = rpc.credentials
        again = handshake(fresh_daemon.socket, "worker", session_id=credentials.session_id, token=credentials.token)
        assert (again.token, again.worker_lock) == (credentials.token, credentials.worker_lock)
        assert again.boot_id != credentials.boot_id
        control = shm.open_segment(answer.control_segment).view.cast("Q")
        assert control[layout.D_BOOT_ID] == again.boot_id
        assert [opened.key_id for opened in rpc.attach(attach_request("s", 16, key()), 20.0).keys] == [0, 1]
        assert rpc.open_key(pb.OpenKeyRequest(key=key("late")), 20.0) == late
        assert rpc.open_key(pb.OpenKeyRequest(key=key("later")), 20.0).key_id == 2
        with connect_observer(fresh_daemon.socket) as observer:
            (stats,) = observer.stats().sessions
            assert stats.adopted
            assert observer.stats().budget_used_bytes == stats.bytes


def test_leftovers_of_killed_daemon_and_worker_are_swept(fresh_daemon: DaemonProcess) -> None:
    with WorkerProcess(fresh_daemon.socket) as dead, worker(fresh_daemon.socket) as rpc:
        rpc.attach(attach_request("alive", 16, key()), 20.0)
        fresh_daemon.kill()
        dead.kill()
        assert any(dead.session_id in name for name in fresh_daemon.shm_files())
        fresh_daemon.start()
        assert not any(dead.session_id in name for name in fresh_daemon.shm_files())
        assert session_ids(fresh_daemon.socket) == [rpc.credentials.session_id]


def test_daemon_sweeps_what_a_dead_daemon_elsewhere_left(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    gone = DaemonProcess(tmp_path / "one")
    gone.start()
    with WorkerProcess(gone.socket) as dead, WorkerProcess(gone.socket) as alive:
        gone.kill()
        dead.kill()
        with own_daemon(tmp_path / "two"):
            left = gone.shm_files()
            assert not any(dead.session_id in name for name in left)
            assert sum(alive.session_id in name for name in left) == 9, "a live worker's session is not touched"
            alive.kill()
        with own_daemon(tmp_path / "two"):
            assert gone.shm_files() == []


def test_orphans_of_an_adopted_session_are_removed(fresh_daemon: DaemonProcess) -> None:
    """A kill between making a key and noting it leaves parts that no manifest lists; their id is given again."""
    with worker(fresh_daemon.socket) as rpc:
        rpc.attach(attach_request("s", 16, key()), 20.0)
        fresh_daemon.kill()
        names = SessionNames(fresh_daemon.paths.node, rpc.credentials.session_id)
        shm.create_segment(names.pool(1), 4096)
        shm.create_segment(names.staging(1), 4096)
        fresh_daemon.start()
        assert not any(name.endswith("pool1") for name in fresh_daemon.shm_files())
        assert rpc.open_key(pb.OpenKeyRequest(key=key("next")), 20.0).key_id == 1


def test_key_closed_just_before_a_kill_counts_as_closed(fresh_daemon: DaemonProcess) -> None:
    """A kill between unlinking a key's parts and noting it must not cost the session."""
    with worker(fresh_daemon.socket) as rpc:
        rpc.attach(attach_request("s", 16, key(), key("second")), 20.0)
        fresh_daemon.kill()
        names = SessionNames(fresh_daemon.paths.node, rpc.credentials.session_id)
        shm.unlink_segment(names.staging(1))
        fresh_daemon.start()
        with connect_observer(fresh_daemon.socket) as observer:
            (stats,) = observer.stats().sessions
            assert [key_stats.key_id for key_stats in stats.keys] == [0]
        assert rpc.open_key(pb.OpenKeyRequest(key=key("second")), 20.0).key_id == 2


@pytest.mark.parametrize("damage", ["manifest", "manifest_gone", "control", "arena"])
def test_session_that_cannot_be_adopted_is_given_up_alone(fresh_daemon: DaemonProcess, damage: str) -> None:
    with worker(fresh_daemon.socket) as broken, WorkerProcess(fresh_daemon.socket) as fine:
        broken.attach(attach_request("s", 16, key()), 20.0)
        session_id = broken.credentials.session_id
        names = SessionNames(fresh_daemon.paths.node, session_id)
        fresh_daemon.kill()
        manifest = fresh_daemon.paths.sessions / f"{session_id}.json"
        if damage == "manifest":
            manifest.write_text(manifest.read_text()[:40])
        elif damage == "manifest_gone":
            manifest.unlink()
        elif damage == "control":
            shm.open_segment(names.control).view.cast("Q")[layout.H_NUM_BLOCKS] = 17
        else:
            os.truncate(shm.SHM_DIRECTORY / names.arena, 0)
        fresh_daemon.start()
        assert session_ids(fresh_daemon.socket) == [fine.session_id]
        assert [n for n in fresh_daemon.shm_files() if session_id in n] == [names.worker_lock.name]
        with pytest.raises(errors.UnknownSessionError):
            broken.open_key(pb.OpenKeyRequest(key=key("x")), 5.0)
        broken.attach(attach_request("s", 16, key()), 20.0)  # with the same credentials: all is made anew


def test_worker_that_dies_after_its_handshake_leaves_no_lock_file(fresh_daemon: DaemonProcess) -> None:
    script = "import sys; from stagecache.rpc import handshake; handshake(sys.argv[1], 'worker')"
    subprocess.run([sys.executable, "-c", script, str(fresh_daemon.socket)], check=True, timeout=30)
    poll_until(lambda: len(fresh_daemon.shm_files()) == 1, "the lock file to go")
