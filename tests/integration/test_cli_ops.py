"""``stagecache plan``, ``doctor`` and ``drain`` against a real daemon."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from stagecache.cli import app
from stagecache.cli.drain import DrainError
from stagecache.control import connect_observer
from stagecache.errors import DaemonUnavailableError
from stagecache.plan import DOORBELL_BYTES, LOCK_BYTES, plan_deployment, stage_of
from stagecache_wire import shm
from stagecache_wire.layout import ABI
from stagecache_wire.locks import LifeLock
from stagecache_wire.messages import schema_to_wire
from stagecache_wire.names import RunPaths, SessionNames
from stagecache_wire.shm import SHM_DIRECTORY
from stagecache_wire.v1 import stagecache_pb2 as pb
from tests.daemon_process import DaemonProcess, poll_until
from tests.integration.helpers import session_ids, worker
from tests.integration.worker_process import WorkerProcess, attach_request, key

STAGES = (
    {"name": "thinker", "num_blocks": 301, "keys": ["__hidden_states__:bfloat16:512", "odd:int8:3"]},
    {
        "name": "talker",
        "num_blocks": 97,
        "block_size": 7,
        "max_num_batched_tokens": 333,
        "staging_depth": 3,
        "arena_bytes": 70_001,
        "max_results": 100,
        "keys": ["codes.audio:int64:16", "flag:bool", "deep:float32:3x5"],
    },
    {"name": "bare", "num_blocks": 1, "max_num_batched_tokens": 1, "arena_bytes": 65536},
)


def taken(pattern: str) -> int:
    """Bytes that tmpfs gave for files in /dev/shm."""
    return sum(path.stat().st_blocks * 512 for path in SHM_DIRECTORY.glob(pattern))


def test_plan_is_what_attach_then_takes(fresh_daemon: DaemonProcess) -> None:
    """To the byte: the daemon's own account, and the pages that tmpfs gave out."""
    plan = plan_deployment([stage_of(fields, "stage") for fields in STAGES])
    node = fresh_daemon.paths.node
    with worker(fresh_daemon.socket) as a, worker(fresh_daemon.socket) as b, worker(fresh_daemon.socket) as c:
        for rpc, planned in zip((a, b, c), plan.stages, strict=True):
            spec = planned.spec
            asked = pb.Geometry(
                num_blocks=spec.num_blocks,
                block_size=spec.block_size,
                staging_capacity_tokens=spec.max_num_batched_tokens,
                staging_depth=spec.staging_depth,
                arena_bytes=spec.arena_bytes,
                max_results=spec.max_results,
            )
            keys = [schema_to_wire(key) for key in spec.keys]
            rpc.attach(pb.AttachRequest(abi=ABI, model="m", stage=spec.name, geometry=asked, keys=keys), 30.0)
            stem = SessionNames(node, rpc.credentials.session_id).stem
            assert taken(f"{stem}.*") == planned.session_bytes
            assert taken(f"sem.{stem}.*") == DOORBELL_BYTES
        with connect_observer(fresh_daemon.socket) as observer:
            stats = observer.stats()
        assert {session.stage: session.bytes for session in stats.sessions} == {
            planned.spec.name: planned.session_bytes for planned in plan.stages
        }
        assert stats.budget_used_bytes == plan.total_bytes
        assert taken(f"stagecache.{node}.lock") == LOCK_BYTES
        assert taken(f"*stagecache.{node}.*") == plan.shm_bytes


def doctor(socket: Path, *arguments: str) -> tuple[int, dict[str, str]]:
    """Exit status, and by check the gravest of its findings."""
    result = CliRunner().invoke(app, ["doctor", "--socket", str(socket), "--json", *arguments])
    order = ["skipped", "ok", "note", "warning", "problem"]
    found: dict[str, str] = {}
    for finding in json.loads(result.output)["findings"]:
        found[finding["check"]] = max(found.get(finding["check"], "skipped"), finding["status"], key=order.index)
    return result.exit_code, found


@contextlib.contextmanager
def engine_here(socket: Path, cpus: set[int]) -> Iterator[None]:
    """This process as a worker that is attached, has mapped its session, and runs on some CPUs only."""
    before = os.sched_getaffinity(0)
    request = attach_request("thinker", 16, key())
    request.pid = os.getpid()
    with worker(socket) as rpc:
        segment = shm.open_segment(rpc.attach(request, 20.0).control_segment)
        os.sched_setaffinity(0, cpus)
        try:
            yield
        finally:
            os.sched_setaffinity(0, before)
            segment.map.close()


def test_doctor_finds_a_healthy_daemon_healthy(fresh_daemon: DaemonProcess) -> None:
    with WorkerProcess(fresh_daemon.socket) as attached:
        status, found = doctor(fresh_daemon.socket)
        assert status == 0, found
        for check in ("shm.mount", "shm.shared", "shm.leftovers", "socket.path", "socket.modes", "daemon"):
            assert found[check] == "ok"
        assert session_ids(fresh_daemon.socket) == [attached.session_id]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")
def test_doctor_sees_whether_cores_are_apart(fresh_daemon: DaemonProcess) -> None:
    first, second = sorted(os.sched_getaffinity(0))[:2]
    os.sched_setaffinity(fresh_daemon.pid, {first})
    with engine_here(fresh_daemon.socket, {first}):
        assert doctor(fresh_daemon.socket)[1]["cpu.affinity"] == "warning"
        assert doctor(fresh_daemon.socket, "--strict")[0] == 1
    with engine_here(fresh_daemon.socket, {second}):
        assert doctor(fresh_daemon.socket)[1]["cpu.affinity"] == "ok"


def test_doctor_after_a_crash(fresh_daemon: DaemonProcess) -> None:
    fresh_daemon.kill()
    status, found = doctor(fresh_daemon.socket)
    assert (status, found["daemon"], found["shm.leftovers"]) == (1, "problem", "note")
    fresh_daemon.start()


def drain(socket: Path, *arguments: str) -> int:
    result = CliRunner().invoke(app, ["drain", "--socket", str(socket), *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code


def test_drain_ends_daemon_and_sessions(fresh_daemon: DaemonProcess) -> None:
    with WorkerProcess(fresh_daemon.socket):
        assert drain(fresh_daemon.socket) == 0
        assert fresh_daemon.shm_files() == []
    assert fresh_daemon.stop() == 0
    with pytest.raises(DaemonUnavailableError, match="nothing to drain"):
        drain(fresh_daemon.socket)


def test_drained_sessions_can_be_kept_for_the_next_daemon(fresh_daemon: DaemonProcess) -> None:
    with WorkerProcess(fresh_daemon.socket) as attached:
        assert drain(fresh_daemon.socket, "--keep-sessions") == 0
        assert fresh_daemon.stop() == 0
        fresh_daemon.start()
        with connect_observer(fresh_daemon.socket) as observer:
            (session,) = observer.stats().sessions
        assert (session.session_id, session.adopted) == (attached.session_id, True)


def test_drain_need_not_wait(fresh_daemon: DaemonProcess) -> None:
    state = Path(f"/proc/{fresh_daemon.pid}/status")
    assert drain(fresh_daemon.socket, "--no-wait") == 0
    poll_until(lambda: "State:\tZ" in state.read_text(), "the daemon to stop")
    assert fresh_daemon.stop() == 0


def test_drain_never_signals_a_stranger(tmp_path: Path) -> None:
    """A lock whose holder wrote a pid of another container: that pid is somebody else's here."""
    paths = RunPaths.of(tmp_path / "d.sock")
    paths.directory.mkdir()
    lock = LifeLock(paths.lock)
    try:
        paths.lock.write_text(json.dumps({"pid": 1}))
        with pytest.raises(DrainError, match="cannot be seen from here"):
            drain(paths.socket)
    finally:
        lock.release(unlink=True)
