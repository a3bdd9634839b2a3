"""Order of the tests: those that answer soonest run first, so a broken build is seen in seconds.

Hypothesis judges by what is wrong alone: on a machine that does other work too, an example may take any time.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

ORDER = ("slow", "crash", "engine", "soak")
"""Markers from fast to slow; a test without any of them runs before all others."""

settings.register_profile("stagecache", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("stagecache")


def _rank(item: pytest.Item) -> int:
    return max((position for position, name in enumerate(ORDER, start=1) if item.get_closest_marker(name)), default=0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort by marker; the order of files and of tests in a file stays as it was."""
    items.sort(key=_rank)
