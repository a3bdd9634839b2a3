"""The shim's share of a real step: a verdict only where two runs without it say the same."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

SOURCE = Path(__file__).parents[3] / "bench" / "engine" / "shim_share.py"


@pytest.fixture(scope="module")
def tool() -> Any:
    spec = importlib.util.spec_from_file_location("shim_share", SOURCE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def found(plain_ms: float, again_ms: float, with_ms: float, shim_ms: float) -> dict[str, dict[str, list[float]]]:
    def steps(milliseconds: float) -> dict[str, list[float]]:
        return {"cpu": [milliseconds / 1e3] * 5, "wall": [milliseconds / 2e3] * 5}

    return {
        "without": steps(plain_ms),
        "without again": steps(again_ms),
        "with": {**steps(with_ms), "shim": [shim_ms / 1e3] * 5},
    }


@pytest.mark.parametrize(
    ("values", "verdict", "text"),
    [
        ((40.0, 40.1, 40.2, 0.2), True, "at most 1 %"),
        ((40.0, 40.1, 41.0, 0.9), False, "more than 1 %"),
        ((40.0, 42.0, 40.2, 0.2), None, "no verdict"),
    ],
)
def test_a_verdict_needs_two_equal_runs(tool: Any, values: tuple[float, ...], verdict: bool | None, text: str) -> None:
    result = tool.summary(found(*values), requests=16)
    assert result["verdict"] is verdict
    assert text in tool.show(result)
    assert result["tokens_per_s"]["without"] == pytest.approx(16 / (values[0] / 2e3))
    assert result["shim_share"] == pytest.approx(values[3] / ((values[0] + values[1]) / 2), rel=0.05)
