"""Random sequences of steps with outputs on a fake device, against the reference model: every result is equal."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("torch")

from tests.daemon_process import DaemonProcess
from tests.device.cache import DeviceCache
from tests.device.fake import ORDERS
from tests.model.sessions import Sessions
from tests.model.strategies import plan_of

SWITCH_INTERVAL_S = 2e-5


@pytest.fixture
def sessions(daemon: DaemonProcess) -> Iterator[Sessions]:
    """Sessions whose streams run in one order after the other; a short switch interval, as the sender is a thread."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    orders, numbers = itertools.cycle(ORDERS), itertools.count()

    def make(rules: Any, socket: str, **settings: Any) -> DeviceCache:
        cache = DeviceCache(rules, socket, order=next(orders), seed=next(numbers), slab_bytes=1 << 16, **settings)
        cache.hold = False  # A save may have to wait for its own flushes, with so small a budget.
        return cache

    opened = Sessions(str(daemon.socket), make)
    yield opened
    opened.close()
    sys.setswitchinterval(before)


def run(sessions: Sessions, seeds: range) -> None:
    for seed in seeds:
        sessions.run(plan_of(seed))
    assert sessions.served == len(seeds)


def test_rows_from_a_device_follow_every_rule_in_random_sequences(sessions: Sessions) -> None:
    """S, K, H, R, W"""
    run(sessions, range(60))


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("batch", range(5))
def test_rows_from_a_device_follow_every_rule_for_long(sessions: Sessions, batch: int) -> None:
    """S, K, H, R, W"""
    run(sessions, range(1000 + 1000 * batch, 2000 + 1000 * batch))
