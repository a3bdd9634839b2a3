"""Managers to compare. Importing vLLM-Omni takes seconds, so every test here counts as one of the engine."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs the engine: make venv")

from tests.daemon_process import DaemonProcess
from tests.omni.settings import quiet

quiet()

from tests.omni.managers import KINDS, ManagerCache  # noqa: E402  the environment comes first
from tests.rules.builder import Stage  # noqa: E402

MakeStage = Callable[..., Stage]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker("engine")


@pytest.fixture(params=KINDS)
def make_stage(request: pytest.FixtureRequest, daemon: DaemonProcess) -> Iterator[MakeStage]:
    """Makes a Stage over the manager of ``request.param``; settings of the manager go in ``settings``."""
    opened: list[ManagerCache] = []

    def make(settings: dict[str, Any] | None = None, **rules: Any) -> Stage:
        def make_cache(rules: Any) -> ManagerCache:
            cache = ManagerCache(request.param, rules, str(daemon.socket), **(settings or {}))
            opened.append(cache)
            return cache

        return Stage(make_cache, **rules)

    yield make
    for cache in opened:
        assert cache.held_unchanged(), "S3: rows that were handed out changed"
        cache.close()


@pytest.fixture
def stage(make_stage: MakeStage) -> Stage:
    """block_size 4, hidden rows, every other key discovered."""
    return make_stage()


@pytest.fixture
def peer(stage: Stage) -> bool:
    """Whether the manager under test is vLLM-Omni's own."""
    return stage.cache.kind == "peer"  # type: ignore[attr-defined]


@pytest.fixture
def shim_log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the shim warns of, whatever the engine did to its loggers."""
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("vllm.stagecache")
    monkeypatch.setattr(logger, "handlers", [*logger.handlers, handler])
    monkeypatch.setattr(logger, "level", logging.WARNING)
    monkeypatch.setattr(logger.manager, "disable", 0)
    logger.manager._clear_cache()  # type: ignore[attr-defined]
    return lines
