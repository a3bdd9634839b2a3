"""Starting and stopping, with real processes."""

from __future__ import annotations

import signal
import stat
from contextlib import suppress
from pathlib import Path
from threading import Thread

import grpc
import pytest

from stagecache import errors
from stagecache.control import connect_observer
from stagecache.rpc import handshake
from stagecache_wire import layout, shm
from stagecache_wire.v1 import stagecache_pb2 as pb
from tests.daemon_process import DaemonProcess, poll_until
from tests.integration.helpers import MIB, run_daemon, session_ids, status_of, worker
from tests.integration.worker_process import attach_request, key


def test_starts_within_a_second_in_80_mib_without_torch(fresh_daemon: DaemonProcess) -> None:
    """The quickest of a few starts: others may use this machine meanwhile."""
    starts = [fresh_daemon.start_s]
    while min(starts) >= 1.0 and len(starts) < 5:
        fresh_daemon.restart()
        starts.append(fresh_daemon.start_s)
    assert min(starts) < 1.0, f"starts took {starts} s"
    assert status_of(fresh_daemon.pid, "VmRSS") < 80 * MIB
    assert "torch" not in Path(f"/proc/{fresh_daemon.pid}/maps").read_text()


def test_health_and_reflection_need_no_token(daemon: DaemonProcess) -> None:
    from grpc_health.v1 import health_pb2, health_pb2_grpc
    from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

    options = [("grpc.default_authority", "localhost")]
    with grpc.insecure_channel(f"unix:{daemon.socket}", options=options) as channel:
        for service in ("", "stagecache.v1.StageCache"):
            answer = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(service=service), timeout=5.0
            )
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        services = ProtoReflectionDescriptorDatabase(channel).get_services()
    assert {"stagecache.v1.StageCache", "grpc.health.v1.Health"} <= set(services)


def test_second_daemon_is_refused_and_told_who_serves(daemon: DaemonProcess) -> None:
    second = run_daemon("--socket", str(daemon.socket))
    assert second.returncode == 3
    assert f"pid {daemon.pid}" in second.stderr
    assert "choose another --socket" in second.stderr
    with connect_observer(daemon.socket) as observer:
        observer.stats()  # the first one still has its socket


def test_socket_of_a_dead_daemon_is_replaced(fresh_daemon: DaemonProcess) -> None:
    fresh_daemon.kill()
    assert fresh_daemon.socket.exists()
    with pytest.raises(errors.DaemonUnavailableError):
        handshake(fresh_daemon.socket, "observer")
    fresh_daemon.start()
    assert session_ids(fresh_daemon.socket) == []


def test_file_that_is_no_socket_is_never_removed(tmp_path: Path) -> None:
    target = tmp_path / "precious"
    target.write_text("data")
    run = run_daemon("--socket", str(target))
    assert run.returncode == 3
    assert "is no socket" in run.stderr
    assert target.read_text() == "data"


def test_bad_setting_names_itself_and_ends_with_status_2(tmp_path: Path) -> None:
    run = run_daemon("--socket", str(tmp_path / "s"), "--memory-budget", "lots")
    assert run.returncode == 2
    assert "memory_budget" in run.stderr
    assert "12GiB" in run.stderr


def test_files_are_for_this_user_only(daemon: DaemonProcess) -> None:
    with worker(daemon.socket) as rpc:
        rpc.attach(attach_request("modes", 16, key()), 20.0)
        for path, mode in (
            (daemon.paths.directory, 0o700),
            (daemon.paths.sessions, 0o700),
            (daemon.paths.secret, 0o600),
            (daemon.paths.peer_socket, 0o600),
            (daemon.socket, 0o600),
            *((shm.SHM_DIRECTORY / name, 0o600) for name in daemon.shm_files()),
        ):
            assert stat.S_IMODE(path.stat().st_mode) == mode, path


def test_graceful_stop_ends_sessions_and_tells_their_workers(fresh_daemon: DaemonProcess) -> None:
    with worker(fresh_daemon.socket) as rpc:
        answer = rpc.attach(attach_request("s", 16, key()), 20.0)
        control = shm.open_segment(answer.control_segment)
        stream = iter(rpc.watch())
        assert next(stream).kind == pb.WatchEvent.KIND_HELLO
        assert fresh_daemon.stop() == 0
        assert [event.kind for event in stream] == [pb.WatchEvent.KIND_SHUTDOWN]
        assert control.view.cast("Q")[layout.D_STATUS] == layout.STATUS_ENDED
    assert fresh_daemon.shm_files() == []
    assert list(fresh_daemon.paths.sessions.iterdir()) == []


def test_handover_keeps_sessions_for_the_next_daemon(fresh_daemon: DaemonProcess) -> None:
    with worker(fresh_daemon.socket) as rpc:
        answer = rpc.attach(attach_request("s", 16, key()), 20.0)
        assert fresh_daemon.stop(signal.SIGUSR1) == 0
        assert len(fresh_daemon.shm_files()) == 10
        fresh_daemon.start()
        again = rpc.attach(attach_request("s", 16, key()), 20.0)
        assert again.boot_id != answer.boot_id
        again.boot_id = answer.boot_id
        assert again == answer


def test_run_directory_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    missing = run_daemon("--socket", str(tmp_path / "no" / "such" / "s.sock"))
    assert missing.returncode == 3
    assert "Choose a --socket" in missing.stderr
    (tmp_path / "s.sock.d").write_text("a file")
    taken = run_daemon("--socket", str(tmp_path / "s.sock"))
    assert taken.returncode == 3
    assert "no directory of uid" in taken.stderr


def test_what_cannot_be_noted_is_refused_and_nothing_of_it_is_left(fresh_daemon: DaemonProcess) -> None:
    """Else the next daemon would not adopt it. A full disk and a directory that is gone look alike from here."""
    sessions = fresh_daemon.paths.sessions
    away = sessions.with_name("away")
    with worker(fresh_daemon.socket) as rpc, worker(fresh_daemon.socket) as late:
        rpc.attach(attach_request("s", 16, key()), 20.0)
        files = fresh_daemon.shm_files()
        sessions.rename(away)
        for what, call in (
            ("key mm of test/model/s", lambda: rpc.open_key(pb.OpenKeyRequest(key=key("mm")), 20.0)),
            ("attach of test/model/late", lambda: late.attach(attach_request("late", 16, key()), 20.0)),
        ):
            with pytest.raises(errors.StageCacheError, match=f"{what} cannot be noted") as caught:
                call()
            assert "No such file or directory" in str(caught.value)
            assert "df" in caught.value.remedy
        assert fresh_daemon.shm_files() == files
        away.rename(sessions)
        rpc.open_key(pb.OpenKeyRequest(key=key("mm")), 20.0)
        late.attach(attach_request("late", 16, key()), 20.0)


def test_stop_in_the_middle_of_an_attach_leaves_nothing(fresh_daemon: DaemonProcess) -> None:
    """The fixture sees that no file is left."""
    with worker(fresh_daemon.socket) as rpc:

        def attach() -> None:
            with suppress(errors.StageCacheError):
                rpc.attach(attach_request("big", 200_000, key(width=256)), 60.0)

        thread = Thread(target=attach)
        thread.start()
        poll_until(lambda: any("pool0" in name for name in fresh_daemon.shm_files()), "the pool to be made")
        assert fresh_daemon.stop() == 0
        thread.join()
    assert fresh_daemon.shm_files() == []
