"""One daemon for all random sequences of a run."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from tests.model.daemon import running_daemon


@pytest.fixture(scope="session")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    with running_daemon(tmp_path_factory.mktemp("daemon")) as running:
        yield running
