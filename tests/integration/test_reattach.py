"""A worker whose session is over gets another one by itself: no restart, no row guessed, no step held up."""

from __future__ import annotations

import logging
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from stagecache import StageCache
from stagecache.errors import SessionFailedError, StageCacheError, UnreadableHitError
from stagecache.rpc import Rpc, handshake
from stagecache.step import NewRequest, SchedulerStep
from stagecache_wire import layout
from stagecache_wire.v1 import stagecache_pb2 as pb
from tests.daemon_process import DaemonProcess, poll_until
from tests.integration.helpers import session_ids
from tests.integration.test_session_ends import attach, prefill
from tests.integration.test_worked_example import OneRequest

HOOKED = (sys.executable, "-m", "tests.integration.hooked_daemon")


@contextmanager
def attached(daemon: DaemonProcess, stage: str = "renewed") -> Iterator[tuple[StageCache, OneRequest]]:
    view = OneRequest()
    cache = attach(daemon, stage, view)
    try:
        yield cache, view
    finally:
        cache.close()


def rows_of(cache: StageCache, step: int, req_id: str) -> list[float]:
    hidden = cache.materialize(step, [req_id]).hidden_states
    assert hidden is not None
    return hidden[req_id][:, 0].tolist()


def empty_step(cache: StageCache) -> None:
    """A step of no tokens: what the engine thread does at every step's beginning."""
    cache.new_step_starts(SchedulerStep({}))


def until_renewed(cache: StageCache) -> None:
    """The engine runs on; the other session has come, and the step after it has taken it."""
    renewals = cache.counters.renewals

    def look() -> bool:
        empty_step(cache)
        return cache.counters.renewals > renewals

    poll_until(look, "another session")


def check_anew(cache: StageCache, view: OneRequest) -> None:
    """Rows of before are gone, with a clear error; what is saved from now on is read."""
    with pytest.raises(UnreadableHitError):
        rows_of(cache, prefill(cache, view, "old", 4, [0, 7]), "old")
    cache.discard_step(prefill(cache, view, "a2", 0, [0]))
    assert rows_of(cache, prefill(cache, view, "b2", 4, [0, 2]), "b2") == list(range(8))


def stop(daemon: DaemonProcess, session_id: str) -> None:
    assert daemon.stop() == 0


def lose_manifest(daemon: DaemonProcess, session_id: str) -> None:
    daemon.kill()
    (daemon.paths.sessions / f"{session_id}.json").unlink()


def note_other_abi(daemon: DaemonProcess, session_id: str) -> None:
    """The session's memory is of another layout than the new daemon's."""
    daemon.kill()
    manifest = daemon.paths.sessions / f"{session_id}.json"
    text = manifest.read_text()
    assert f'"abi": {layout.ABI},' in text
    manifest.write_text(text.replace(f'"abi": {layout.ABI},', f'"abi": {layout.ABI + 1},'))


@pytest.mark.parametrize("end", [stop, pytest.param(lose_manifest, marks=pytest.mark.soak), note_other_abi])
def test_session_that_the_next_daemon_does_not_have_is_made_anew(
    fresh_daemon: DaemonProcess, end: Callable[[DaemonProcess, str], None]
) -> None:
    with attached(fresh_daemon) as (cache, view):
        first = cache.session.session_id
        cache.discard_step(prefill(cache, view, "a", 0, [0]))
        held = cache.materialize(prefill(cache, view, "b", 4, [0, 1]), ["b"]).hidden_states
        late = prefill(cache, view, "late", 4, [0, 2])
        cache.session.wait_consumed(cache.session.log.head, 10.0, "the log")
        end(fresh_daemon, first)
        fresh_daemon.start()
        until_renewed(cache)
        assert session_ids(fresh_daemon.socket) == [cache.session.session_id] != [first]
        assert not any(first in name for name in fresh_daemon.shm_files())
        assert rows_of(cache, late, "late") == list(range(8)), "gathered before, handed out after"
        check_anew(cache, view)
        assert cache.session.epoch == 1
        cache.session.wait_consumed(cache.session.log.head, 10.0, "the log")
        assert cache.session.control.words[layout.D_EPOCH] == 1
        assert held is not None
        assert held["b"][:, 0].tolist() == list(range(8)), "rows handed out before stay"


def test_bad_record_ends_one_session_and_the_worker_has_the_next(fresh_daemon: DaemonProcess) -> None:
    with attached(fresh_daemon, "bad") as (cache, view), attached(fresh_daemon, "good") as (other, other_view):
        first = cache.session.session_id
        cache.discard_step(prefill(cache, view, "a", 0, [0]))
        other.discard_step(prefill(other, other_view, "a", 0, [0]))
        log = cache.session.log
        cache.session.control.words[layout.W_HEAD] = log.head + 1  # a record that was never written
        log._daemon_doorbell.release()
        until_renewed(cache)
        assert first not in session_ids(fresh_daemon.socket), "its memory is given back"
        assert not any(first in name for name in fresh_daemon.shm_files())
        check_anew(cache, view)
        assert other.counters.renewals == 0
        assert rows_of(other, prefill(other, other_view, "b", 4, [0, 1]), "b") == list(range(8))


def test_steps_between_two_sessions_keep_their_own_rows_and_wait_for_nothing(fresh_daemon: DaemonProcess) -> None:
    with attached(fresh_daemon) as (cache, view), attached(fresh_daemon, "closed") as (closed, _):
        cache.discard_step(prefill(cache, view, "a", 0, [0]))
        fresh_daemon.stop()
        poll_until(cache.session.has_ended, "the end")
        closed.close()
        started = time.monotonic()
        for number in range(3 * cache.session.geometry.staging_depth):
            assert rows_of(cache, prefill(cache, view, f"own{number}", 0, [1]), f"own{number}") == list(range(4))
        with pytest.raises(SessionFailedError, match="attaches anew by itself"):
            rows_of(cache, prefill(cache, view, "hit", 4, [0, 1]), "hit")
        assert time.monotonic() - started < 1.0
        fresh_daemon.start()
        until_renewed(cache)
        assert session_ids(fresh_daemon.socket) == [cache.session.session_id], "who closed is not attached again"
        with pytest.raises(UnreadableHitError):  # its rows were never logged
            rows_of(cache, prefill(cache, view, "hit2", 4, [1, 2]), "hit2")


def test_upgrade_to_the_same_abi_is_an_adoption(fresh_daemon: DaemonProcess) -> None:
    """`stagecache drain --keep-sessions` sends this signal: nothing is lost, nothing is attached anew."""
    with attached(fresh_daemon) as (cache, view):
        cache.discard_step(prefill(cache, view, "a", 0, [0]))
        assert fresh_daemon.stop(signal.SIGUSR1) == 0
        cache.discard_step(prefill(cache, view, "between", 0, [1]))
        fresh_daemon.start()
        assert rows_of(cache, prefill(cache, view, "b", 4, [0, 2]), "b") == list(range(8))
        assert rows_of(cache, prefill(cache, view, "c", 4, [1, 3]), "c") == list(range(8))
        assert (cache.counters.renewals, cache.session.epoch) == (0, 0)


def test_upgrade_to_another_abi_is_refused_until_one_fits(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A worker cannot change its layout: it goes on without rows of hits, asks on, and says why once."""
    daemon = DaemonProcess(tmp_path, program=HOOKED)
    daemon.start()
    try:
        with attached(daemon) as (cache, view), caplog.at_level(logging.WARNING):
            first = cache.session.session_id
            cache.discard_step(prefill(cache, view, "a", 0, [0]))
            daemon.stop(signal.SIGUSR1)
            daemon.environment["DAEMON_ABI"] = str(layout.ABI + 7)
            daemon.start()
            assert f"its shared-memory ABI is {layout.ABI}, this daemon's is {layout.ABI + 7}" in daemon.log
            assert session_ids_of_other_abi(daemon) == []
            assert not any(first in name and not name.endswith("lock") for name in daemon.shm_files())
            poll_until(lambda: "goes on asking: AbiMismatchError" in caplog.text, "the worker to say why")
            assert f"ABI {layout.ABI}, the daemon {layout.ABI + 7}" in caplog.text
            assert rows_of(cache, prefill(cache, view, "own", 0, [1]), "own") == list(range(4))
            with pytest.raises(StageCacheError):
                rows_of(cache, prefill(cache, view, "hit", 4, [0, 1]), "hit")
            daemon.stop()
            del daemon.environment["DAEMON_ABI"]
            daemon.start()
            until_renewed(cache)
            check_anew(cache, view)
            assert cache.session.epoch == 1
            assert caplog.text.count("goes on asking: AbiMismatchError") == 1
    finally:
        daemon.close()


def session_ids_of_other_abi(daemon: DaemonProcess) -> list[str]:
    with Rpc(handshake(daemon.socket, "observer", abi=layout.ABI + 7)) as rpc:
        return [session.session_id for session in rpc.stats(5.0).sessions]


class EpochStep(SchedulerStep):
    """A scheduler output as the scheduler-side shim leaves it."""

    stagecache_epoch = 0


def test_idle_worker_is_attached_anew_and_asks_its_engine_to_forget_its_hashes(fresh_daemon: DaemonProcess) -> None:
    """Else every hit on rows of before would fail until its block is evicted."""
    heard: queue.Queue[str] = queue.Queue()
    with attached(fresh_daemon, "asks") as (cache, _):
        cache.new_step_starts(EpochStep({"a": 4}, [NewRequest("a", 0, [0])]))
        fresh_daemon.stop()
        fresh_daemon.start()
        with Rpc(handshake(fresh_daemon.socket, "scheduler")) as rpc:
            watch = rpc.watch("asks")
            events = iter(watch)
            assert next(events).kind == pb.WatchEvent.KIND_HELLO

            def listen() -> None:
                for event in events:
                    heard.put(event.cause)

            thread = threading.Thread(target=listen, daemon=True)
            thread.start()

            (found,) = poll_until(lambda: session_ids(fresh_daemon.socket), "a session, though no step asks for one")

            def look() -> bool:
                cache.new_step_starts(EpochStep({}))
                return cache.counters.renewals > 0

            poll_until(look, "another session")
            assert cache.session.session_id == found
            assert heard.get(timeout=10) == "the worker attached anew"
            watch.cancel()
            thread.join(5)
