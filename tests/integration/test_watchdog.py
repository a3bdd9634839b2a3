"""A daemon that is stuck says so, and ends where it stays stuck: real processes, really stuck."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from stagecache import errors
from stagecache.control import ping
from stagecached.watchdog import EXIT_STUCK
from tests.crash.load import Load
from tests.daemon_process import DaemonProcess, poll_until
from tests.integration.helpers import session_ids
from tests.integration.metrics_kit import get_unix

HOOKED = (sys.executable, "-m", "tests.integration.hooked_daemon")


@contextmanager
def hooked(folder: Path, limit_s: float, point: str = "", *more: str) -> Iterator[tuple[DaemonProcess, Path]]:
    """A daemon that may be stuck, and the file while which it is."""
    stuck = folder / "stuck"
    daemon = DaemonProcess(
        folder,
        "--watchdog-s",
        str(limit_s),
        *more,
        environment={"STUCK_AT": point, "STUCK_WHILE": str(stuck)},
        program=HOOKED,
    )
    daemon.start()
    try:
        yield daemon, stuck
    finally:
        stuck.unlink(missing_ok=True)
        daemon.close()


def says(socket: Path) -> str:
    """What a health check over the socket comes to."""
    try:
        ping(socket, timeout_s=0.2)
    except errors.DaemonUnavailableError as error:
        return str(error)
    return "serving"


def log_steps(load: Load, count: int) -> None:
    """Run steps until ``count`` more records are in the log; the daemon need not do them."""
    target = load.cache.session.log.head + count
    while load.cache.session.log.head < target:
        load._begin_and_save(load.workload.next())


def load_of(daemon: DaemonProcess, seed: int) -> Load:
    return Load(daemon.socket, seed, daemon_grace_s=60.0, staging_depth=8, stage=f"stage{seed}")


def test_stuck_consumer_turns_health_and_the_daemon_serves_again_without_it(tmp_path: Path) -> None:
    with hooked(tmp_path, 2.0, "after_claim") as (daemon, stuck):
        load = load_of(daemon, 5)
        stuck.touch()
        log_steps(load, 2)
        poll_until(lambda: "NOT_SERVING" in says(daemon.socket), "health to turn", 4.0)
        status, body = get_unix(daemon.paths.http_socket, "/healthz")
        assert status == 503
        assert f"session {load.cache.session.session_id} has not moved" in body
        stuck.unlink()
        poll_until(lambda: says(daemon.socket) == "serving", "health to turn back", 4.0)
        assert get_unix(daemon.paths.http_socket, "/healthz") == (200, "ok\n")
        load.finish()
        load.close()


def test_consumer_that_stays_stuck_ends_the_daemon_and_the_next_one_loses_nothing(tmp_path: Path) -> None:
    """Status 4 for the supervisor, every stack in the log."""
    with hooked(tmp_path, 1.0, "after_claim") as (daemon, stuck):
        load = load_of(daemon, 6)
        stuck.touch()
        log_steps(load, 2)
        assert daemon.ended() == EXIT_STUCK
        assert "has not moved" in daemon.log
        assert "wait_while" in daemon.log, "the log has the stack of who is stuck"
        stuck.unlink()
        daemon.start()
        load.run_step()
        load.finish()
        load.close()


def test_a_stuck_daemon_whose_run_directory_is_gone_ends_all_the_same(tmp_path: Path) -> None:
    """It cannot note for the next daemon where it was stuck."""
    with hooked(tmp_path, 1.0, "after_claim") as (daemon, stuck):
        load = load_of(daemon, 6)
        sessions = daemon.paths.sessions
        sessions.rename(sessions.with_name("away"))
        stuck.touch()
        log_steps(load, 2)
        assert daemon.ended() == EXIT_STUCK
        assert "cannot be noted" in daemon.log
        sessions.with_name("away").rename(sessions)
        stuck.unlink()
        daemon.start()
        load.finish()
        load.close()


@pytest.mark.soak
def test_record_that_two_daemons_were_stuck_in_costs_its_session_alone(tmp_path: Path) -> None:
    with hooked(tmp_path, 1.0, "after_claim") as (daemon, stuck):
        load, other = load_of(daemon, 6), load_of(daemon, 7)
        for _ in range(5):
            other.run_step()
        other.finish()
        stuck.touch()
        log_steps(load, 2)
        for _ in range(2):
            assert daemon.ended() == EXIT_STUCK
            daemon.start()
        poll_until(lambda: bool(load.cache.session.failure()), "the worker to know")
        assert session_ids(daemon.socket) == [other.cache.session.session_id]
        assert "2 daemons were stuck in its record" in daemon.log
        stuck.unlink()
        other.run_step()
        other.finish()
        other.close()
        load.close()


def test_stuck_event_loop_answers_nobody_and_ends_the_daemon(tmp_path: Path) -> None:
    with hooked(tmp_path, 1.0) as (daemon, stuck):
        load = load_of(daemon, 8)
        log_steps(load, 2)
        stuck.touch()
        os.kill(daemon.pid, signal.SIGRTMIN)
        poll_until(lambda: "no answer in time" in says(daemon.socket), "the loop to stand still")
        assert daemon.ended() == EXIT_STUCK
        assert "the event loop has answered no health call" in daemon.log
        stuck.unlink()
        daemon.start()
        load.run_step()
        load.finish()
        load.close()


def test_stop_with_a_stuck_consumer_ends_by_its_deadline(tmp_path: Path) -> None:
    """SIGTERM drains, for ``drain_timeout_s`` at most; the memory is given back all the same."""
    with hooked(tmp_path, 60.0, "after_claim", "--drain-timeout-s", "0.2") as (daemon, stuck):
        load = load_of(daemon, 12)
        stuck.touch()
        log_steps(load, 2)
        started = time.monotonic()
        assert daemon.stop(signal.SIGTERM) == 0
        assert time.monotonic() - started < 10.0
        assert daemon.shm_files() == []
        load.close()


def test_stopped_and_continued_daemon_is_not_stuck(tmp_path: Path) -> None:
    """It stands still for longer than the limit, with records to do: the test above says that this would end it."""
    with hooked(tmp_path, 1.0) as (daemon, _):
        load = load_of(daemon, 9)
        pid = daemon.pid
        os.kill(pid, signal.SIGSTOP)
        log_steps(load, 2)
        stopped = time.monotonic()
        poll_until(lambda: time.monotonic() - stopped > 1.8, "more time than the limit")
        os.kill(pid, signal.SIGCONT)
        load.finish()
        poll_until(lambda: says(daemon.socket) == "serving", "the daemon to answer")
        answered = time.monotonic()
        poll_until(lambda: time.monotonic() - answered > 0.7, "a verdict, were there one")
        assert says(daemon.socket) == "serving"
        load.close()
