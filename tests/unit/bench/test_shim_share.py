"""The shim's share of a real step: a verdict only where two runs without it say the same."""

from __future__ import annotations

from typing import Any

import pytest

from bench.engine.shim_share import Found, show, summary


def found(plain_ms: float, again_ms: float, with_ms: float, shim_ms: float, threads_ms: float = 0.0) -> Found:
    """Two rounds of two turns of five steps."""

    def rounds(milliseconds: float, shim: float = 0.0, threads: float = 0.0) -> list[list[dict[str, Any]]]:
        run = {
            "cpu": [milliseconds / 1e3] * 5,
            "wall": [milliseconds / 5e2] * 5,
            "shim": [shim / 1e3] * 5,
            "shim_threads_s": 5 * threads / 1e3,
        }
        return [[run, run], [run, run]]

    return {
        "without": rounds(plain_ms),
        "without again": rounds(again_ms),
        "with": rounds(with_ms, shim_ms, threads_ms),
    }


@pytest.mark.parametrize(
    ("values", "verdict", "text"),
    [
        ((40.0, 40.1, 40.2, 0.2), True, "at most 1 %"),
        ((40.0, 40.1, 41.0, 0.9), False, "more than 1 %"),
        ((40.0, 42.0, 40.2, 0.2), None, "no verdict"),
    ],
)
def test_a_verdict_needs_two_equal_runs(values: tuple[float, ...], verdict: bool | None, text: str) -> None:
    result = summary(found(*values), requests=16)
    assert result["verdict"] is verdict
    assert text in show(result)
    assert result["tokens_per_s"]["without"] == pytest.approx(16 / (values[0] / 5e2))
    assert result["shim_share"].middle == pytest.approx(values[3] / ((values[0] + values[1]) / 2))


def test_the_shims_threads_count_too() -> None:
    result = summary(found(40.0, 40.0, 40.0, 0.2, threads_ms=0.3), requests=16)
    assert result["shim_thread_ms"].middle == pytest.approx(0.2)
    assert result["shim_ms"].middle == pytest.approx(0.5)
    assert result["shim_share"].middle == pytest.approx(0.5 / 40)
