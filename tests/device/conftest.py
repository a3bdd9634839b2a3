"""Stages on a fake device, each with a session of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from tests.daemon_process import DaemonProcess
from tests.rules.builder import Stage

if TYPE_CHECKING:
    from tests.device.scenarios import Make

pytest.register_assert_rewrite("tests.device.scenarios")


@pytest.fixture
def make_on(daemon: DaemonProcess) -> Iterator[Callable[[str], Make]]:
    """make_on(order): a Make whose streams run in that order."""
    from tests.device.cache import DeviceCache

    opened: list[DeviceCache] = []

    def on(order: str) -> Make:
        def make(settings: dict[str, Any] | None = None, **rules: Any) -> Stage:
            given = {
                "order": order,
                "num_blocks": 64,
                "arena_bytes": 1 << 20,
                "slab_bytes": 1 << 16,
                **(settings or {}),
            }
            stage = Stage(lambda made: DeviceCache(made, str(daemon.socket), **given), **rules)
            assert isinstance(stage.cache, DeviceCache)
            opened.append(stage.cache)
            return stage

        return make

    yield on
    for cache in opened:
        cache.close()
