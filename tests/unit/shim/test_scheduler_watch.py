"""The scheduler's connection to a real daemon."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stagecache import Geometry
from stagecache.control import connect_observer
from stagecache.errors import ResetRefusedError
from stagecache.session import Session
from stagecache.shim.scheduler_watch import SchedulerWatch
from tests.daemon_process import DaemonProcess, poll_until

STAGE = "watched"


@pytest.fixture
def watch_stage() -> Iterator[Callable[..., SchedulerWatch]]:
    made: list[SchedulerWatch] = []

    def watch(socket: Path, causes: list[str], stage: str = STAGE) -> SchedulerWatch:
        made.append(SchedulerWatch(str(socket), stage, causes.append))
        made[-1].start()
        return made[-1]

    yield watch
    for one in made:
        one.stop()


@pytest.fixture
def session(daemon: DaemonProcess) -> Iterator[Session]:
    """A worker of the stage, without which there is nothing to reset."""
    attached = Session.attach(daemon.socket, model="m", stage=STAGE, geometry=Geometry(8, 4, 16))
    yield attached
    attached.close()


def test_a_reset_of_its_stage_arrives_with_its_cause(
    daemon: DaemonProcess, session: Session, watch_stage: Callable[..., SchedulerWatch]
) -> None:
    """The worker itself is not told: its new epoch comes in order, with the scheduler's next step (R5)."""
    mine: list[str] = []
    others: list[str] = []
    watches = [watch_stage(daemon.socket, mine), watch_stage(daemon.socket, others, "another stage")]
    poll_until(lambda: all(watch.connected for watch in watches), "both streams to open")
    with connect_observer(daemon.socket) as observer:
        answer = observer.reset(STAGE, cause="test")
    assert (answer.sessions, answer.schedulers) == (1, 1)
    poll_until(lambda: mine == ["test"], "the reset to arrive")
    assert others == []
    assert session.watcher.reset_cause is None


def test_without_it_a_reset_is_refused_unless_forced(
    daemon: DaemonProcess, session: Session, watch_stage: Callable[..., SchedulerWatch]
) -> None:
    """Its engine would keep the hashes; and so again once it has stopped."""
    watch = watch_stage(daemon.socket, [])
    with connect_observer(daemon.socket) as observer:
        poll_until(lambda: watch.connected, "the stream to open")
        watch.stop()
        assert not watch.connected

        def refused() -> bool:
            try:
                observer.reset(STAGE)
            except ResetRefusedError:
                return True
            return False

        poll_until(refused, "the daemon to see the stream end")
        assert observer.reset(STAGE, force=True).schedulers == 0


def test_it_finds_a_daemon_that_starts_later_and_one_that_comes_back(
    tmp_path: Path, watch_stage: Callable[..., SchedulerWatch]
) -> None:
    """Neither the loss of the connection nor a new daemon resets anything by itself."""
    daemon = DaemonProcess(tmp_path)
    causes: list[str] = []
    watch = watch_stage(daemon.socket, causes)
    poll_until(lambda: watch.last_error, "a first failure")
    assert "stagecached" in watch.last_error
    daemon.start()
    try:
        poll_until(lambda: watch.connections == 1, "the connection")
        daemon.restart()
        poll_until(lambda: watch.connections == 2 and watch.connected, "the connection after a restart")
    finally:
        daemon.close()
    assert causes == []


def test_it_stops_at_once_where_no_daemon_is(tmp_path: Path, watch_stage: Callable[..., SchedulerWatch]) -> None:
    watch = watch_stage(tmp_path / "none.sock", [])
    poll_until(lambda: watch.last_error, "a first failure")
    watch.stop()
    watch.stop()
    assert not any(thread.name == "stagecache-scheduler" for thread in threading.enumerate())
