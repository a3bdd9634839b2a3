"""Random sequences of steps on the reference model and on the real client with a real daemon: every result is equal.

``STAGECACHE_SEQUENCES`` sets how many; tests/model/driver.py says what a sequence is. A failure prints its calls in
the notation of docs/semantics.md and the shrunk plan; its shrunk form belongs into tests/rules/test_found.py.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, seed, settings

from tests.daemon_process import DaemonProcess
from tests.model.driver import Plan
from tests.model.sessions import Sessions
from tests.model.strategies import plans

SEQUENCES = int(os.environ.get("STAGECACHE_SEQUENCES", "0"))
DEFAULT_SEQUENCES = 2_000
SOAK_SEQUENCES = SEQUENCES or 50_000
BATCH = min(2_000, SOAK_SEQUENCES)
SWITCH_INTERVAL_S = 2e-5

# The client's threads draw their jitter from the random module, also while hypothesis draws a plan.
pytestmark = pytest.mark.filterwarnings("ignore:Do not use the `random` module")


@pytest.fixture(scope="module")
def sessions(daemon: DaemonProcess) -> Iterator[Sessions]:
    """With a short switch interval, so that the materializing thread meets the engine thread at every point."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    opened = Sessions(str(daemon.socket))
    yield opened
    opened.close()
    sys.setswitchinterval(before)


def agree(sessions: Sessions, examples: int, number: int) -> None:
    """Run ``examples`` random sequences; the same number gives the same ones."""
    served = sessions.served

    @seed(number)
    @settings(max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(plan=plans)
    def agrees(plan: Plan) -> None:
        sessions.run(plan)

    agrees()
    assert sessions.served - served >= examples


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_real_cache_follows_every_rule_in_random_sequences(sessions: Sessions) -> None:
    """S, K, H, R, W"""
    agree(sessions, SEQUENCES or DEFAULT_SEQUENCES, 0)


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("batch", range(1, 1 + -(-SOAK_SEQUENCES // BATCH)))
def test_the_real_cache_follows_every_rule_for_hours(sessions: Sessions, batch: int) -> None:
    """S, K, H, R, W"""
    agree(sessions, BATCH, batch)
