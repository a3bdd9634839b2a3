"""Engine commands run in a process apart: however it ends, the reason is told and the directory is gone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import os, signal, sys
from pathlib import Path
from stagecache.cli.apart import run_apart
from stagecache.cli.console import show_error
from stagecache.errors import StageCacheError
from stagecache.local_engine import Interrupts

def body(directory):
    (directory / "engine.log").write_text("the engine's last words\\n")
    print("in", directory, os.getpid(), flush=True)
    with Interrupts() as interrupts:
        {act}

try:
    with Interrupts():
        sys.exit(run_apart("apart-", body))
except StageCacheError as error:
    show_error(error)
    sys.exit(1)
"""
WAITING = """try:
            print("waiting", flush=True)
            while True: signal.pause()
        finally: print("unwound", flush=True)"""


def start(act: str, folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM.replace("{act}", act)],
        env={**os.environ, "TMPDIR": str(folder)},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("act", "status", "says"),
    [
        ("return 3", 3, ()),
        ("raise ZeroDivisionError", 1, ("ZeroDivisionError",)),
        ("os.kill(os.getpid(), signal.SIGILL)", 1, ("SIGILL", "this CPU lacks", "--dtype", "last words")),
        ("os.kill(os.getpid(), signal.SIGKILL)", 1, ("SIGKILL", "memory", "last words")),
    ],
)
def test_end_is_told_and_the_directory_is_gone(tmp_path: Path, act: str, status: int, says: tuple[str, ...]) -> None:
    program = start(act, tmp_path)
    _, errors = program.communicate(timeout=60)
    assert program.returncode == status, errors
    for text in says:
        assert text in errors
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_is_passed_on_and_the_child_waited_for(tmp_path: Path, number: signal.Signals) -> None:
    program = start(WAITING, tmp_path)
    assert program.stdout is not None
    child = int(program.stdout.readline().split()[-1])
    assert program.stdout.readline() == "waiting\n"
    program.send_signal(number)
    output, errors = program.communicate(timeout=60)
    assert program.returncode in (128 + number, -number), errors
    assert "unwound" in output
    assert not Path(f"/proc/{child}").exists()
    assert list(tmp_path.iterdir()) == []


def test_child_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    program = start(WAITING, tmp_path)
    assert program.stdout is not None
    while program.stdout.readline() != "waiting\n":
        pass
    program.kill()
    assert "unwound" in program.communicate(timeout=60)[0], "its end of the pipe is closed only when it has ended"
