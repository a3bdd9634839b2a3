"""The wall clock is set, to and fro, under a daemon and a worker that wait: no deadline of ours goes by it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stagecache_wire import shm
from tests.daemon_process import DaemonProcess

COMPILER = shutil.which("cc") or shutil.which("gcc")

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C compiler for a clock that can be set")


@pytest.fixture(scope="module")
def shifted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment of processes that share a clock which they may set."""
    folder = tmp_path_factory.mktemp("clock")
    library, shift = folder / "shifted.so", folder / "shift"
    source = Path(__file__).with_name("shifted.c")
    subprocess.run(
        [str(COMPILER), "-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl", "-lpthread"], check=True
    )
    shift.write_bytes(bytes(8))
    return {"LD_PRELOAD": str(library), "SHIFT_FILE": str(shift)}


@pytest.fixture
def daemon_of_that_clock(tmp_path: Path, shifted: dict[str, str]) -> Iterator[DaemonProcess]:
    process = DaemonProcess(tmp_path, environment=shifted)
    process.start()
    yield process
    process.close()


def run(shifted: dict[str, str], *arguments: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.clock.jumps", *arguments],
        env={**os.environ, **shifted},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def test_wait_on_a_doorbell_ends_in_its_time_though_the_clock_is_set_back(shifted: dict[str, str]) -> None:
    """The control: the same wait by posix_ipc does not end before somebody rings."""
    name = f"stagecache.clock{os.getpid()}"
    shm.create_semaphore(name)
    try:
        ours, plain = run(shifted, "wait", name), run(shifted, "plain", name)
    finally:
        shm.unlink_semaphore(name)
    assert ours["busy"]
    assert 0.29 < ours["took_s"] < 2.0
    assert not plain["busy"]
    assert plain["took_s"] > 2.9


@pytest.mark.soak
def test_rows_are_right_and_no_step_is_held_up_while_the_clock_jumps(
    daemon_of_that_clock: DaemonProcess, shifted: dict[str, str]
) -> None:
    found = run(shifted, "load", str(daemon_of_that_clock.socket), "2")
    assert found["steps"] > 20
    assert found["rows"] > 100
    assert found["slowest_s"] < 5.0


@pytest.mark.soak
def test_outage_is_noticed_in_its_time_though_the_clock_is_set_back(
    daemon_of_that_clock: DaemonProcess, shifted: dict[str, str]
) -> None:
    found = run(shifted, "outage", str(daemon_of_that_clock.socket), str(daemon_of_that_clock.pid))
    assert daemon_of_that_clock.ended() == -9
    assert "the daemon is gone for 0.5 s" in found["error"]
    assert found["took_s"] < 3.0
    daemon_of_that_clock.start()
