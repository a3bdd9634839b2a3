"""The runner's shim around a step: an interrupt before the cache has noted it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs the engine: make venv")

from stagecache.shim import vllm
from stagecache.shim.steps import StepConsumers

pytestmark = pytest.mark.engine


class Runner:
    """A model runner, to be referred to."""


@pytest.mark.parametrize("where", ["new_step_starts", "_join"])
def test_an_output_that_an_interrupt_keeps_from_the_cache_is_told_later(
    monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """W8, R1: the engine goes on behind it, and names its finished requests nowhere else."""

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(vllm, "_tp_rank", lambda: 0)
    missed: list[Any] = []
    cache: Any = SimpleNamespace(new_step_starts=lambda _: None, miss_step=missed.append)
    runner, late = Runner(), SimpleNamespace()
    shim = vllm.RunnerShim(runner, cache, "", StepConsumers(), late if where == "_join" else None)  # type: ignore[arg-type]
    monkeypatch.setattr(cache if where == "new_step_starts" else shim, where, interrupted)
    output = object()
    with pytest.raises(KeyboardInterrupt):
        shim.run_step(lambda: pytest.fail("no forward behind an interrupt"), output)
    assert missed == [output]
