"""Order of the tests: those that answer soonest run first, so a broken build is seen in seconds."""

from __future__ import annotations

import pytest

ORDER = ("slow", "crash", "engine", "soak")
"""Markers from fast to slow; a test without any of them runs before all others."""


def _rank(item: pytest.Item) -> int:
    return max((position for position, name in enumerate(ORDER, start=1) if item.get_closest_marker(name)), default=0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort by marker; the order of files and of tests in a file stays as it was."""
    items.sort(key=_rank)
