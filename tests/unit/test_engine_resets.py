"""Rows that a worker lost make its engine forget their blocks (W8)."""

from __future__ import annotations

from typing import Any

import pytest

from stagecache.engine_resets import EngineResets
from stagecache.errors import ResetRefusedError
from tests.daemon_process import poll_until


class FakeRpc:
    """Refuses ``refusals`` times, then passes resets on."""

    def __init__(self, refusals: int = 0) -> None:
        self.refusals = refusals
        self.closed = False
        self.causes: list[str] = []

    def reset(self, request: Any, timeout_s: float) -> None:
        if self.refusals:
            self.refusals -= 1
            raise ResetRefusedError("no scheduler-side shim watches the stage.")
        self.causes.append(request.cause)


def make(rpc: FakeRpc, **settings: float) -> EngineResets:
    return EngineResets(rpc, "thinker", **settings)  # type: ignore[arg-type]


def test_it_asks_again_until_the_scheduler_watches() -> None:
    """After an outage the scheduler's shim comes back some time after the worker."""
    rpc = FakeRpc(refusals=2)
    resets = make(rpc)
    resets.ask("the daemon was away")
    poll_until(lambda: resets.asked == 1, "the reset")
    assert rpc.causes == ["the daemon was away"]


def test_losses_in_quick_succession_are_answered_by_one_more_reset() -> None:
    rpc = FakeRpc()
    resets = make(rpc, min_interval_s=0.2)
    resets.ask("step 1")
    poll_until(lambda: resets.asked == 1, "the first reset")
    for number in range(2, 50):
        resets.ask(f"step {number}")
    poll_until(lambda: resets.asked == 2, "the next reset")
    assert rpc.causes == ["step 1", "step 49"]


def test_where_nobody_watches_it_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", logger="stagecache"):
        make(FakeRpc(refusals=1000), give_up_s=0.0).ask("rows were lost")
        poll_until(lambda: "was not asked to forget" in caplog.text, "the warning")
