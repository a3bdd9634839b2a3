"""Every example runs twice: on the reference model, and on the real client with a real daemon."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.model.reference import ReferenceCache
from tests.model.steps import Cache, Rules
from tests.rules.builder import Stage


@pytest.fixture(params=["reference", "daemon"])
def make_stage(request: pytest.FixtureRequest) -> Iterator[Callable[..., Stage]]:
    """Makes a Stage from rules; settings that only the real cache has go in ``settings``."""
    opened: list[Any] = []

    def make(settings: dict[str, Any] | None = None, **rules: Any) -> Stage:
        def make_cache(rules: Rules) -> Cache:
            if request.param == "reference":
                return ReferenceCache(rules)
            from tests.model.real import RealCache

            cache = RealCache(rules, request.getfixturevalue("daemon").socket, **(settings or {}))
            opened.append(cache)
            return cache

        return Stage(make_cache, **rules)

    yield make
    for cache in opened:
        assert cache.held_unchanged(), "S3: rows that were handed out changed"
        cache.close()


@pytest.fixture
def stage(make_stage: Callable[..., Stage]) -> Stage:
    """block_size 4, hidden rows, every other key discovered."""
    return make_stage()
