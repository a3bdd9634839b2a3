"""Merge, Lookup, Reset and Watch: numbers are held against the geometry, nobody waits for another session."""

from __future__ import annotations

from threading import Thread

import pytest

from stagecache import errors
from stagecache.control import connect_observer
from stagecache.rpc import Rpc, handshake
from stagecache_wire import layout, shm
from stagecache_wire.v1 import stagecache_pb2 as pb
from tests.daemon_process import DaemonProcess, poll_until
from tests.integration.helpers import worker
from tests.integration.worker_process import attach_request, key


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
    with worker(daemon.socket) as rpc, connect_observer(daemon.socket) as observer:
        attach = Thread(target=rpc.attach, args=(attach_request("big", 200_000, key(width=256)), 60.0))
        attach.start()
        answered = 0
        while attach.is_alive():
            observer.stats()
            answered += attach.is_alive()
        attach.join()
    assert answered >= 5, f"{answered} calls were answered while 800 MB were prefaulted"
