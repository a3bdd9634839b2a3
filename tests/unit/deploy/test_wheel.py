"""The wheel: what is in it, that it is the same each time, and that it runs where nothing else is installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.daemon_process import poll_until
from tests.unit.deploy.files import ROOT

pytestmark = pytest.mark.slow

IMAGE_LIMIT_BYTES = 250 << 20
BASE_IMAGE_BYTES = 125 << 20
"""About what python:3.12-slim unpacks to; the environment is what the Dockerfile adds to it."""
EPOCH = {"SOURCE_DATE_EPOCH": "1767225600"}


def build(folder: Path, target: str) -> Path:
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "--target", target, "--directory", folder],
        cwd=ROOT,
        env=os.environ | EPOCH,
        check=True,
        capture_output=True,
        timeout=60,
    )
    (found,) = folder.iterdir()
    return found


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("wheel"), "wheel")


def test_wheel_is_the_same_each_time(wheel: Path, tmp_path: Path) -> None:
    assert build(tmp_path, "wheel").read_bytes() == wheel.read_bytes()


def test_wheel_has_what_it_needs_and_no_more(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    packages = {name.partition("/")[0] for name in names}
    assert packages == {"stagecache", "stagecached", "stagecache_wire", "stagecache-0.1.0.dist-info"}
    for package in ("stagecache", "stagecached", "stagecache_wire"):
        assert f"{package}/py.typed" in names
    assert "stagecached/web/static/index.html" in names
    assert "stagecache_wire/v1/stagecache_pb2.py" in names
    assert not any("/tests/" in name or name.endswith(".pyc") for name in names)


@pytest.fixture(scope="module")
def bare(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """bin/ of an environment that has the wheel and what that asks for, and nothing else."""
    root = tmp_path_factory.mktemp("bare")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", root], check=True, timeout=60)
    pip = [sys.executable, "-m", "pip", "--python", root / "bin/python", "install", "--quiet", "--no-input"]
    pinned = ["--only-binary", ":all:", "--constraint", ROOT / "constraints.txt"]
    subprocess.run([*pip, *pinned, wheel], env=foreign_environ(), check=True, timeout=100)
    return root / "bin"


def foreign_environ() -> dict[str, str]:
    """Variables that know nothing of this checkout and its environment."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "STAGECACHE"))}


def run(program: Path, *arguments: str, status: int = 0) -> str:
    """Output of a program, run elsewhere."""
    environ, folder = foreign_environ(), program.parent
    done = subprocess.run(
        [program, *arguments], cwd=folder, env=environ, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout


def test_wheel_runs_in_a_bare_environment(bare: Path, tmp_path: Path) -> None:
    """Daemon, ping, status, doctor, plan and drain, without torch and without an engine."""
    installed = {path.name for path in next(bare.parent.glob("lib/python*/site-packages")).iterdir()}
    assert not {"torch", "vllm", "pip", "yaml"} & installed
    assert "--memory-budget" in run(bare / "stagecached", "--help")
    assert "doctor" in run(bare / "stagecache", "--help")
    plan = json.loads(run(bare / "stagecache", "plan", "--num-blocks", "8", "--key", "a:int8", "--json"))
    assert plan["total_bytes"] > 0
    socket = str(tmp_path / "d.sock")
    with (tmp_path / "log").open("wb") as log:
        daemon = subprocess.Popen(
            [bare / "stagecached", "--socket", socket], cwd=tmp_path, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
    try:
        poll_until(lambda: Path(socket).exists() or daemon.poll() is not None, "the daemon to serve", 20.0)
        assert "serves" in run(bare / "stagecache", "ping", "--socket", socket)
        assert json.loads(run(bare / "stagecache", "status", "--socket", socket, "--json"))["version"] == "0.1.0"
        report = json.loads(run(bare / "stagecache", "doctor", "--socket", socket, "--json"))
        found = {finding["check"]: finding["status"] for finding in report["findings"]}
        assert (found["daemon"], found["shm.shared"], found["engine.vllm"]) == ("ok", "ok", "skipped")
        run(bare / "stagecache", "drain", "--socket", socket)
        assert daemon.wait(10) == 0
    finally:
        daemon.kill()
        daemon.wait()


def test_environment_is_small_enough_for_the_image(bare: Path) -> None:
    """Unpacked and compiled, before the Dockerfile leaves out what is never imported."""
    files = [path for path in bare.parent.rglob("*") if path.is_file() and not path.is_symlink()]
    size = sum(path.stat().st_size for path in files if path.suffix != ".pyc")
    left_out = sum(
        path.stat().st_size for path in files if "tests" in path.parts or path.suffix in (".pyi", ".c", ".h")
    )
    bytecode = sum(path.stat().st_size for path in files if path.suffix == ".py" and "tests" not in path.parts)
    assert BASE_IMAGE_BYTES + size - left_out + bytecode < IMAGE_LIMIT_BYTES
