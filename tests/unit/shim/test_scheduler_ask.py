"""Rows that a worker lost make its engine forget their blocks (W8)."""

from __future__ import annotations

import pytest

from stagecache import Geometry
from stagecache.session import Session
from stagecache.shim.scheduler import install, shim_of
from stagecache.shim.scheduler_ask import ResetAsker
from stagecache.shim.scheduler_watch import SchedulerWatch
from tests.daemon_process import DaemonProcess, poll_until
from tests.unit.shim.test_scheduler import Scheduler


def test_a_scheduler_in_the_same_process_is_told_before_the_call_returns() -> None:
    """So that the very next schedule() resets, and no hit on lost rows fails."""
    scheduler = Scheduler()
    install(scheduler, stage="asked here")
    ask = ResetAsker("none.sock", "asked here")
    ask("rows were lost")
    assert shim_of(scheduler).pending == ("rows were lost",)  # type: ignore[union-attr]
    ask.stop()


def test_losses_in_quick_succession_are_answered_by_one_more_reset() -> None:
    scheduler = Scheduler()
    shim = install(scheduler, stage="asked often")
    ask = ResetAsker("none.sock", "asked often", min_interval_s=0.2)
    for number in range(50):
        ask(f"step {number % 3}")
    assert shim.pending == ("step 0",)
    poll_until(lambda: len(shim.pending) == 2, "the next reset")
    assert shim.pending[1] == "step 1, step 2, step 0"
    ask.stop()


def test_a_scheduler_elsewhere_is_told_by_the_daemon(daemon: DaemonProcess) -> None:
    """Also one that connects later than the worker asks."""
    stage = "asked elsewhere"
    session = Session.attach(daemon.socket, model="m", stage=stage, geometry=Geometry(8, 4, 16))
    ask, causes = ResetAsker(str(daemon.socket), stage), []  # type: ignore[var-annotated]
    watch = SchedulerWatch(str(daemon.socket), stage, causes.append)
    try:
        ask("the daemon was away")
        watch.start()
        poll_until(lambda: causes == ["the daemon was away"], "the reset to arrive")
    finally:
        ask.stop()
        watch.stop()
        session.close()


def test_where_nobody_can_be_told_it_says_so(caplog: pytest.LogCaptureFixture) -> None:
    ask = ResetAsker("none.sock", "nowhere", give_up_s=0.0, min_interval_s=0.0)
    with caplog.at_level("WARNING", logger="vllm.stagecache"):
        ask("rows were lost")
        poll_until(lambda: "fail until they are evicted" in caplog.text, "the warning")
    ask.stop()
