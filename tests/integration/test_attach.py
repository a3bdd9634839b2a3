"""Attach and OpenKey: what is granted, what is refused, and with which arithmetic."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from stagecache import errors
from stagecache.control import connect_observer
from stagecache.rpc import Rpc, handshake
from stagecache_wire import shm
from stagecache_wire.geometry import Geometry
from stagecache_wire.layout import ControlLayout
from stagecache_wire.locks import LifeLock
from stagecache_wire.names import SessionNames
from stagecache_wire.v1 import stagecache_pb2 as pb
from tests.daemon_process import DaemonProcess
from tests.integration.helpers import MIB, own_daemon, session_ids, worker
from tests.integration.worker_process import attach_request, key


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
    with (
        own_daemon(tmp_path, "--memory-budget", str(2 * needed - 1)) as daemon,
        worker(daemon.socket) as first,
        worker(daemon.socket) as second,
    ):
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
    limit = expected_bytes(1024, 64) + MIB
    with own_daemon(tmp_path, "--memory-budget", str(limit)) as daemon, worker(daemon.socket) as rpc:
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
