"""The daemon's control plane, with real processes on both sides."""

from __future__ import annotations

import json
import os
import signal
import socket as sockets
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest

from stagecache import errors
from stagecache.control import connect_observer
from stagecache.rpc import Credentials, Rpc, handshake
from stagecache_wire import layout, shm
from stagecache_wire.geometry import Geometry
from stagecache_wire.layout import ABI, ControlLayout
from stagecache_wire.locks import LifeLock
from stagecache_wire.names import SessionNames
from stagecache_wire.v1 import stagecache_pb2 as pb
from tests.daemon_process import DaemonProcess, poll_until
from tests.integration.worker_process import WorkerProcess, attach_request, key

MIB = 1 << 20


@contextmanager
def worker(socket: Path) -> Iterator[Rpc]:
    """This process as a worker that holds its lock; detaches at the end."""
    credentials = handshake(socket, "worker")
    assert credentials.worker_lock is not None
    lock = LifeLock(credentials.worker_lock)
    with Rpc(credentials) as rpc:
        try:
            yield rpc
        finally:
            try:
                rpc.detach(10.0)
            except (errors.DaemonLostError, errors.TokenRefusedError):
                pass
            lock.release()


@contextmanager
def own_daemon(folder: Path, *arguments: str) -> Iterator[DaemonProcess]:
    process = DaemonProcess(folder, *arguments)
    process.start()
    try:
        yield process
    finally:
        process.close()


def status_of(pid: int, name: str) -> int:
    """A field of /proc/PID/status in bytes."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(name)


def session_ids(socket: Path) -> list[str]:
    with connect_observer(socket) as observer:
        return [session.session_id for session in observer.stats().sessions]


# -------------------------------------------------------------------- starting and stopping


def test_starts_within_a_second_in_80_mib_without_torch(fresh_daemon: DaemonProcess) -> None:
    starts = [fresh_daemon.start_s]
    for _ in range(2):  # the best of three: other tests may share this machine
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
    second = subprocess.run(
        [sys.executable, "-m", "stagecached", "--socket", str(daemon.socket)],
        capture_output=True,
        text=True,
        timeout=30,
    )
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
    run = subprocess.run(
        [sys.executable, "-m", "stagecached", "--socket", str(target)], capture_output=True, text=True, timeout=30
    )
    assert run.returncode == 3
    assert "is no socket" in run.stderr
    assert target.read_text() == "data"


def test_bad_setting_names_itself_and_ends_with_status_2(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "stagecached", "--socket", str(tmp_path / "s"), "--memory-budget", "lots"],
        capture_output=True,
        text=True,
        timeout=30,
    )
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


# -------------------------------------------------------------------- who may call


def call_with(socket: Path, credentials: Credentials, **changes: object) -> None:
    from dataclasses import replace

    with Rpc(replace(credentials, **changes)) as rpc:
        rpc.stats(5.0)


def test_wrong_token_role_or_session_is_refused(daemon: DaemonProcess) -> None:
    mine = handshake(daemon.socket, "observer")
    other = handshake(daemon.socket, "observer")
    call_with(daemon.socket, mine)
    for changes in (
        {"token": "0" * 64},
        {"token": ""},
        {"token": other.token},
        {"session_id": other.session_id},
        {"session_id": "../../etc"},
        {"role": "worker"},
        {"role": "root"},
    ):
        with pytest.raises(errors.TokenRefusedError) as caught:
            call_with(daemon.socket, mine, **changes)
        assert caught.value.reason == "UNAUTHENTICATED"


def test_role_may_only_call_what_is_its_own(daemon: DaemonProcess) -> None:
    with Rpc(handshake(daemon.socket, "observer")) as rpc:
        with pytest.raises(errors.TokenRefusedError, match="observer may not call Attach"):
            rpc.attach(attach_request("s", 16), 5.0)
        with pytest.raises(errors.TokenRefusedError, match="Watch"):
            next(iter(rpc.watch()))


def test_token_survives_a_restart(fresh_daemon: DaemonProcess) -> None:
    credentials = handshake(fresh_daemon.socket, "observer")
    fresh_daemon.restart()
    call_with(fresh_daemon.socket, credentials)


def test_unknown_session_is_told_to_attach(daemon: DaemonProcess) -> None:
    with Rpc(handshake(daemon.socket, "worker")) as rpc:
        for call in (
            lambda: rpc.open_key(pb.OpenKeyRequest(key=key()), 5.0),
            lambda: rpc.merge(pb.MergeRequest(sequence=1), 5.0),
            lambda: rpc.lookup(pb.LookupRequest(), 5.0),
            lambda: next(iter(rpc.watch())),
        ):
            with pytest.raises(errors.UnknownSessionError, match="Attach anew") as caught:
                call()
            assert caught.value.reason == "UNKNOWN_SESSION"
        rpc.detach(5.0)  # may be repeated, so it is no error


def test_abi_mismatch_names_both_numbers(daemon: DaemonProcess) -> None:
    with pytest.raises(errors.AbiMismatchError, match=rf"{ABI + 1}.*{ABI}") as caught:
        handshake(daemon.socket, "worker", abi=ABI + 1)
    assert caught.value.facts == {"daemon_abi": str(ABI), "caller_abi": str(ABI + 1)}
    with worker(daemon.socket) as rpc:
        request = attach_request("s", 16)
        request.abi = ABI + 1
        with pytest.raises(errors.AbiMismatchError):
            rpc.attach(request, 5.0)


def test_handshake_that_is_no_json_or_too_long_is_answered(daemon: DaemonProcess) -> None:
    for line in (b"hello\n", b"[]\n", b"{}\n", b"x" * 10_000, b'{"abi": 1, "role": "king"}\n', b"[" * 3000 + b"\n"):
        with sockets.socket(sockets.AF_UNIX) as peer:
            peer.settimeout(10.0)
            peer.connect(str(daemon.paths.peer_socket))
            peer.sendall(line)
            answer = json.loads(peer.makefile().readline())
        assert answer["error"]
        assert answer["reason"]


def test_request_that_does_not_decode_is_refused(daemon: DaemonProcess) -> None:
    credentials = handshake(daemon.socket, "worker")
    options = [("grpc.default_authority", "localhost")]
    with grpc.insecure_channel(f"unix:{daemon.socket}", options=options) as channel:
        call = channel.unary_unary("/stagecache.v1.StageCache/Attach")
        with pytest.raises(grpc.RpcError) as caught:
            call(b"\xff\xff\xff\xff", timeout=5.0, metadata=credentials.metadata)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


# -------------------------------------------------------------------- attach and keys


def test_attach_needs_the_workers_lock(daemon: DaemonProcess) -> None:
    credentials = handshake(daemon.socket, "worker")
    with Rpc(credentials) as rpc:
        with pytest.raises(errors.AttachError, match="does not hold the lock") as caught:
            rpc.attach(attach_request("s", 16), 5.0)
        assert caught.value.reason == "WORKER_LOCK_FREE"
        assert credentials.worker_lock is not None
        lock = LifeLock(credentials.worker_lock, create=False)
        rpc.attach(attach_request("s", 16), 20.0)
        rpc.detach(5.0)
        lock.release()


def test_attach_repeated_returns_the_same_answer(daemon: DaemonProcess) -> None:
    with worker(daemon.socket) as rpc:
        first = rpc.attach(attach_request("s", 16, key()), 20.0)
        assert rpc.attach(attach_request("s", 16, key()), 20.0) == first
        with pytest.raises(errors.GeometryError, match="num_blocks=17"):
            rpc.attach(attach_request("s", 17, key()), 20.0)


def test_attach_at_once_from_many_calls_makes_one_session(daemon: DaemonProcess) -> None:
    from concurrent.futures import ThreadPoolExecutor

    with worker(daemon.socket) as rpc, ThreadPoolExecutor(8) as threads:
        request = attach_request("s", 256, key())
        answers = list(threads.map(lambda _: rpc.attach(request, 20.0), range(8)))
        assert all(answer == answers[0] for answer in answers)
        assert session_ids(daemon.socket).count(rpc.credentials.session_id) == 1


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"num_blocks": 0}, "num_blocks is 0"),
        ({"num_blocks": 1 << 40}, "num_blocks"),
        ({"num_blocks": (1 << 64) - 1}, "num_blocks"),
        ({"block_size": 0}, "block_size is 0"),
        ({"num_blocks": 1 << 20, "block_size": 1 << 20}, "num_blocks \\* block_size"),
        ({"staging_depth": 1000}, "staging_depth"),
        ({"arena_bytes": (1 << 64) - 1}, "arena_bytes"),
        ({"max_results": 1}, "max_results"),
    ],
)
def test_bad_geometry_is_refused(daemon: DaemonProcess, change: dict[str, int], match: str) -> None:
    request = attach_request("s", 16)
    for name, value in change.items():
        setattr(request.geometry, name, value)
    with worker(daemon.socket) as rpc, pytest.raises(errors.GeometryError, match=match):
        rpc.attach(request, 5.0)


def test_open_key_keeps_dtype_and_row_shape(daemon: DaemonProcess) -> None:
    """K3"""
    with worker(daemon.socket) as rpc:
        rpc.attach(attach_request("s", 16), 20.0)
        first = rpc.open_key(pb.OpenKeyRequest(key=key("mm")), 20.0)
        assert rpc.open_key(pb.OpenKeyRequest(key=key("mm")), 20.0) == first
        for other in (key("mm", width=17), key("mm", dtype="float16")):
            with pytest.raises(errors.SchemaMismatchError, match=r"float32 and row shape \(16,\)") as caught:
                rpc.open_key(pb.OpenKeyRequest(key=other), 20.0)
            assert caught.value.reason == "SCHEMA_MISMATCH"
        with pytest.raises(errors.GeometryError, match="dtype"):
            rpc.open_key(pb.OpenKeyRequest(key=key("mm2", dtype="float99")), 20.0)
        second = rpc.open_key(pb.OpenKeyRequest(key=key("mm2")), 20.0)
        assert second.key_id != first.key_id


def test_provisional_key_becomes_confirmed(daemon: DaemonProcess) -> None:
    """K1"""
    with worker(daemon.socket) as rpc:
        rpc.attach(attach_request("s", 16), 20.0)
        first = rpc.open_key(pb.OpenKeyRequest(key=key("p", provisional=True)), 20.0)
        assert first.key.provisional
        confirmed = rpc.open_key(pb.OpenKeyRequest(key=key("p")), 20.0)
        assert (confirmed.key_id, confirmed.key.provisional) == (first.key_id, False)


def test_keys_of_model_and_stage_are_remembered(fresh_daemon: DaemonProcess) -> None:
    request = attach_request("s", 16)
    request.open_remembered_keys = True
    with worker(fresh_daemon.socket) as rpc:
        rpc.attach(request, 20.0)
        rpc.open_key(pb.OpenKeyRequest(key=key("mm")), 20.0)
        rpc.open_key(pb.OpenKeyRequest(key=key("guess", provisional=True)), 20.0)
    fresh_daemon.restart()
    with worker(fresh_daemon.socket) as rpc:
        assert [opened.key.name for opened in rpc.attach(request, 20.0).keys] == ["mm"]
    request.stage = "other"
    with worker(fresh_daemon.socket) as rpc:
        assert list(rpc.attach(request, 20.0).keys) == []


def expected_bytes(num_blocks: int, row_bytes: int) -> int:
    """What attach_request(num_blocks) with one key costs, from the layout alone."""
    geometry = Geometry(num_blocks, 4, 64, 2, 1 << 16, 64)
    slots = num_blocks * 4
    parts = (
        slots * row_bytes,
        2 * 64 * row_bytes,
        slots * 8,
        slots * 8,
        1 << 16,
        ControlLayout.of(geometry).total_bytes,
    )
    return sum((part + 4095) // 4096 * 4096 for part in parts)


def test_budget_refusal_has_the_arithmetic(tmp_path: Path) -> None:
    needed = expected_bytes(1024, 64)
    with own_daemon(tmp_path, "--memory-budget", str(2 * needed - 1)) as daemon:
        with worker(daemon.socket) as first, worker(daemon.socket) as second:
            first.attach(attach_request("one", 1024, key()), 20.0)
            with pytest.raises(errors.BudgetError) as caught:
                second.attach(attach_request("two", 1024, key()), 20.0)
            assert caught.value.reason == "BUDGET_EXCEEDED"
            facts = {name: int(value) for name, value in caught.value.facts.items()}
            assert facts["needed_bytes"] == needed
            assert facts["budget_free_bytes"] == needed - 1
            assert needed == sum(facts[f"{part}_bytes"] for part in ("pools", "staging", "tables", "arena", "control"))
            for word in ("pools", "staging", "tables", "arena", "control", "test/model/one uses", "--memory-budget"):
                assert word in str(caught.value)
            with connect_observer(daemon.socket) as observer:
                stats = observer.stats()
                assert (stats.budget_used_bytes, stats.sessions[0].bytes) == (needed, needed)
            first.detach(10.0)
            second.attach(attach_request("two", 1024, key()), 20.0)


def test_key_that_does_not_fit_leaves_the_session_as_it_was(tmp_path: Path) -> None:
    with own_daemon(tmp_path, "--memory-budget", str(expected_bytes(1024, 64) + MIB)) as daemon:
        with worker(daemon.socket) as rpc:
            rpc.attach(attach_request("s", 1024, key()), 20.0)
            files = daemon.shm_files()
            with pytest.raises(errors.BudgetError, match="key wide"):
                rpc.open_key(pb.OpenKeyRequest(key=key("wide", width=4096)), 20.0)
            assert daemon.shm_files() == files
            rpc.open_key(pb.OpenKeyRequest(key=key("narrow", width=1)), 20.0)


def test_full_shared_memory_is_refused_with_needed_and_free(tmp_path: Path) -> None:
    with own_daemon(tmp_path, "--memory-budget", "1000T") as daemon, worker(daemon.socket) as rpc:
        free = shm.free_bytes()
        files = daemon.shm_files()
        with pytest.raises(errors.BudgetError, match="/dev/shm has") as caught:
            rpc.attach(attach_request("s", free // (4 * 64) * 2, key()), 20.0)
        assert caught.value.reason == "SHM_FULL"
        assert int(caught.value.facts["needed_bytes"]) > free
        assert "remount" in caught.value.remedy
        assert daemon.shm_files() == files


def test_no_error_names_a_segment(daemon: DaemonProcess) -> None:
    with worker(daemon.socket) as rpc:
        answer = rpc.attach(attach_request("s", 16, key()), 20.0)
        texts = []
        for call in (
            lambda: rpc.open_key(pb.OpenKeyRequest(key=key(width=17)), 5.0),
            lambda: rpc.merge(pb.MergeRequest(sequence=7), 5.0),
            lambda: rpc.lookup(pb.LookupRequest(block_ids=[99], span_tokens=[1]), 5.0),
            lambda: rpc.lookup(pb.LookupRequest(block_ids=[1], span_tokens=[1], key_ids=[9]), 5.0),
            lambda: rpc.attach(attach_request("s", 17), 5.0),
        ):
            with pytest.raises(errors.StageCacheError) as caught:
                call()
            texts.append(str(caught.value))
    names = SessionNames(daemon.paths.node, rpc.credentials.session_id)
    assert names.control == answer.control_segment
    assert not any(names.stem in text or names.node in text for text in texts)


# -------------------------------------------------------------------- merge, lookup, reset


def test_merge_and_lookup_hold_numbers_against_the_geometry(daemon: DaemonProcess) -> None:
    with worker(daemon.socket) as rpc:
        opened = rpc.attach(attach_request("s", 16, key()), 20.0).keys[0]
        for request in (
            pb.MergeRequest(sequence=0),
            pb.MergeRequest(sequence=1),
            pb.MergeRequest(sequence=(1 << 64) - 1),
        ):
            with pytest.raises(errors.CallRefusedError) as caught:
                rpc.merge(request, 5.0)
            assert caught.value.reason == "OUT_OF_RANGE"
        for lookup, reason in (
            (pb.LookupRequest(block_ids=[16], span_tokens=[1]), "OUT_OF_RANGE"),
            (pb.LookupRequest(block_ids=[(1 << 64) - 1], span_tokens=[1]), "OUT_OF_RANGE"),
            (pb.LookupRequest(block_ids=[1], span_tokens=[5]), "OUT_OF_RANGE"),
            (pb.LookupRequest(block_ids=[1], span_tokens=[0xFFFFFFFF]), "OUT_OF_RANGE"),
            (pb.LookupRequest(block_ids=[1], span_tokens=[4], key_ids=[77]), "UNKNOWN_KEY"),
        ):
            with pytest.raises(errors.CallRefusedError) as caught:
                rpc.lookup(lookup, 5.0)
            assert caught.value.reason == reason
        found = rpc.lookup(pb.LookupRequest(block_ids=[3, 4], span_tokens=[6]), 5.0)
        assert (list(found.key_ids), list(found.readable), list(found.unknown)) == ([opened.key_id], [0], [6])
        assert list(found.first_missing_slot) == [12]


def test_merge_that_waits_ends_at_its_deadline_and_blocks_nobody(daemon: DaemonProcess) -> None:
    """A record is published that the stopped consumer will not see: the doorbell is rung, then the session fails."""
    with worker(daemon.socket) as rpc:
        answer = rpc.attach(attach_request("s", 16, key()), 20.0)
        control = shm.open_segment(answer.control_segment).view.cast("Q")
        control[layout.W_HEAD] = 1  # a record that was never written: broken, so it fails this session only
        shm.open_semaphore(answer.daemon_doorbell).release()
        with pytest.raises(errors.SessionFailedError, match="entry carries sequence 0"):
            rpc.merge(pb.MergeRequest(sequence=1), 10.0)
        with pytest.raises(errors.SessionFailedError):
            rpc.open_key(pb.OpenKeyRequest(key=key("other")), 5.0)
        with connect_observer(daemon.socket) as observer:
            failed = {s.session_id: s for s in observer.stats().sessions}[rpc.credentials.session_id]
            assert failed.state == "FAILED"
            assert "record 1" in failed.failure
        events = iter(rpc.watch())
        assert [next(events).kind, next(events).kind] == [pb.WatchEvent.KIND_HELLO, pb.WatchEvent.KIND_FAILED]


def test_reset_needs_a_scheduler_or_force(daemon: DaemonProcess) -> None:
    with worker(daemon.socket) as rpc, connect_observer(daemon.socket) as observer:
        rpc.attach(attach_request("resets", 16), 20.0)
        stream = iter(rpc.watch())
        next(stream)
        with pytest.raises(errors.CallRefusedError) as caught:
            observer.reset("no-such-stage")
        assert caught.value.reason == "UNKNOWN_STAGE"
        with pytest.raises(errors.ResetRefusedError, match="resets"):
            observer.reset("resets")
        assert observer.reset("resets", force=True, cause="weights") == pb.ResetResponse(sessions=1, schedulers=0)
        event = next(stream)
        assert (event.kind, event.cause) == (pb.WatchEvent.KIND_RESET, "weights")
        with Rpc(handshake(daemon.socket, "scheduler")) as scheduler:
            watch = scheduler.watch("resets")
            events = iter(watch)
            assert next(events).kind == pb.WatchEvent.KIND_HELLO
            assert observer.reset("resets", cause="again") == pb.ResetResponse(sessions=1, schedulers=1)
            event = next(events)
            assert (event.kind, event.cause) == (pb.WatchEvent.KIND_RESET, "again")
            watch.cancel()
        poll_until(lambda: observer.stats().schedulers == 0, "the scheduler's stream to end")


def test_loop_answers_while_another_session_prefaults(daemon: DaemonProcess) -> None:
    from threading import Thread

    with worker(daemon.socket) as rpc, connect_observer(daemon.socket) as observer:
        attach = Thread(target=rpc.attach, args=(attach_request("big", 200_000, key(width=256)), 60.0))
        attach.start()
        slowest = 0.0
        while attach.is_alive():
            started = time.monotonic()
            observer.stats()
            slowest = max(slowest, time.monotonic() - started)
        attach.join()
    assert slowest < 0.5, f"a call took {slowest:.2f} s while 800 MB were prefaulted"


# -------------------------------------------------------------------- deaths


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
    free = shm.free_bytes()
    with WorkerProcess(fresh_daemon.socket, num_blocks=500_000) as dead:
        assert shm.free_bytes() < free - 100 * MIB
        started = time.monotonic()
        dead.kill()
        poll_until(lambda: len(fresh_daemon.shm_files()) == 1, "the segments to go")
        poll_until(lambda: shm.free_bytes() > free - 10 * MIB, "the memory to be back")
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
