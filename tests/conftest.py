"""Daemons for tests: real processes on private sockets."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.daemon_process import DaemonProcess


@pytest.fixture(scope="session")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    """One daemon for all tests that do not stop it; ends with a check that it left nothing."""
    process = DaemonProcess(tmp_path_factory.mktemp("daemon"))
    process.start()
    yield process
    process.close()


@pytest.fixture
def fresh_daemon(tmp_path: Path) -> Iterator[DaemonProcess]:
    """A daemon of the test's own, to be killed and started again; ends with a check that it left nothing."""
    process = DaemonProcess(tmp_path)
    process.start()
    yield process
    process.close()
