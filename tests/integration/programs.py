"""Programs that some tests need and a machine may lack: there the test is skipped, but never where CI runs."""

from __future__ import annotations

import os
import shutil

import pytest


def need(*names: str, package: str) -> str:
    """Path of the first program of ``names`` that is installed; else skips, or fails where CI is set."""
    for name in names:
        path = shutil.which(name)
        if path is not None:
            return path
    text = f"{names[0]} is not installed; on Debian and Ubuntu: apt-get install {package}"
    if os.environ.get("CI"):
        pytest.fail(text)
    pytest.skip(text)
