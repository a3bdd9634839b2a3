"""Asking again: how long between tries, what is logged, and who gets a session that nobody took."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from stagecache.errors import AbiMismatchError, DaemonUnavailableError
from stagecache.reattach import PAUSES_S, REFUSED_PAUSES_S, Attacher


class Tries:
    """An attach that fails as it is told, and then gives a session that notes whether it was closed."""

    def __init__(self, *failures: Exception) -> None:
        self.failures = list(failures)
        self.closed: list[float] = []
        self.session: Any = SimpleNamespace(close=self.closed.append)

    def __call__(self) -> Any:
        if self.failures:
            raise self.failures.pop(0)
        return self.session


def pauses_of(attacher: Attacher, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Run it in this thread, without waiting; the pauses that it made."""
    pauses: list[float] = []

    def wait(seconds: float) -> bool:
        pauses.append(seconds)
        return False

    monkeypatch.setattr(attacher._stopped, "wait", wait)
    attacher._run()
    return pauses


def test_pauses_grow_are_jittered_and_longer_where_a_daemon_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    gone, refused = DaemonUnavailableError("nobody."), AbiMismatchError("ABI 1, the daemon 2.")
    tries = Tries(*[gone] * 7, *[refused] * 8, OSError("no descriptors"))
    attacher = Attacher(tries, "stage s")
    first, *pauses = pauses_of(attacher, monkeypatch)
    expected = [*PAUSES_S, PAUSES_S[-1], PAUSES_S[-1], *REFUSED_PAUSES_S, *[REFUSED_PAUSES_S[-1]] * 3]
    assert first == 0.0
    assert len(pauses) == len(expected)
    ratios = [pause / base for pause, base in zip(pauses, expected, strict=True)]
    assert all(0.5 <= ratio <= 1.5 for ratio in ratios)
    assert len(set(ratios)) > 1, "workers of a node must not ask in step"
    assert attacher.session is tries.session


def test_each_reason_is_logged_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    gone, refused = DaemonUnavailableError("nobody."), AbiMismatchError("ABI 1, the daemon 2.")
    attacher = Attacher(Tries(gone, gone, refused, refused), "stage s", known=gone)
    with caplog.at_level(logging.WARNING, "stagecache"):
        pauses_of(attacher, monkeypatch)
    assert [record.getMessage() for record in caplog.records] == [
        "stagecache: stage s is not attached, and goes on asking: AbiMismatchError: ABI 1, the daemon 2."
    ]


def test_a_session_that_nobody_takes_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    tries = Tries()
    attacher = Attacher(tries, "stage s")
    pauses_of(attacher, monkeypatch)
    attacher.stop()
    assert tries.closed == [0.0]
    late = Tries()
    attacher = Attacher(late, "stage s")
    attacher._stopped.set()
    attacher._hand_over(late.session)
    assert late.closed == [0.0]
    assert attacher.session is None
