"""``stagecache demo``: it runs, it notices a wrong row, and it leaves nothing behind however it ends."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from stagecache.demo.checkpoint import ModelShape, write_checkpoint
from stagecache.local_daemon import LocalDaemon
from stagecache_wire.shm import PREFIX, SHM_DIRECTORY
from tests.daemon_process import poll_until

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(300)]

DEMO = [sys.executable, "-m", "stagecache.cli", "demo", "--requests", "24", "--hidden", "64"]
SECONDS = 200


@pytest.fixture
def short_tmp() -> Iterator[Path]:
    """The demo's directory for temporary files: short enough for a socket, and gone also where the demo was killed."""
    directory = Path(tempfile.mkdtemp(prefix="stagecache-test-", dir="/tmp"))
    yield directory
    shutil.rmtree(directory)


def demo_environment(engine_environment: dict[str, str], directory: Path) -> dict[str, str]:
    return engine_environment | {"TMPDIR": str(directory), "COLUMNS": "120"}


def descendants_named(pid: int, text: str) -> list[int]:
    """Children of a process, and theirs, with ``text`` in their command line."""
    found = []
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        try:
            line = Path(f"/proc/{child}/cmdline").read_bytes()
            found += [int(child)] if text.encode() in line else descendants_named(int(child), text)
        except OSError:
            continue
    return found


def wait_for_attached_daemon(demo: subprocess.Popen[str], directory: Path) -> int:
    """Process id of the demo's daemon, once the engine has attached to it."""
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline and demo.poll() is None:
        logs = list(directory.glob("stagecache-demo-*/stagecached.log"))
        if logs and "session attached" in logs[0].read_text():
            [pid] = descendants_named(demo.pid, "stagecached")
            return pid
        time.sleep(0.05)
    output = demo.communicate()[0]
    raise AssertionError(f"the engine never attached; status {demo.returncode}\n{output}")


def start(environment: dict[str, str], directory: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*DEMO, "--report", str(directory / "report.html")],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def wait_gone(pid: int) -> bool:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.05)
    return False


def names_of(node: str) -> list[str]:
    return [path.name for path in SHM_DIRECTORY.iterdir() if node in path.name and PREFIX in path.name]


def node_of(pid: int) -> str:
    """The part of its names in /dev/shm by which a running daemon is known."""
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        match = re.fullmatch(rf"{SHM_DIRECTORY}/{PREFIX}\.([0-9a-f]{{12}})\.lock", str(fd.readlink()))
        if match:
            return match[1]
    raise AssertionError("the daemon holds no lock in /dev/shm")


def test_demo_shows_that_every_row_is_right_and_leaves_nothing(
    engine_environment: dict[str, str], short_tmp: Path
) -> None:
    report = short_tmp / "out" / "report.html"
    done = subprocess.run(
        [*DEMO, "--report", str(report)],
        env=demo_environment(engine_environment, short_tmp),
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "24 of 24" in done.stdout
    assert "Every row is right" in done.stdout
    assert str(report) in done.stdout.replace("\n", "")
    rows = re.findall(r"c\d\d\.t\d\s+│ (\w+)\s+│\s+(\d+) │\s+(\d+) │\s+(\d+) │\s+(\d+) │ (\w+)", done.stdout)
    assert len(rows) == 24
    assert {row[0] for row in rows} == {"own", "identical", "diverging"}
    assert all(row[5] == "yes" and row[2] == row[3] for row in rows)
    assert all(int(row[3]) + int(row[4]) == int(row[1]) for row in rows)
    assert sum(int(row[3]) for row in rows) > sum(int(row[4]) for row in rows)
    page = report.read_text()
    assert page.count("<svg") == 3
    assert not re.search(r"""(src|href)=["']|url\(|@import|https?://""", page)
    assert not list(short_tmp.glob("stagecache-demo-*"))


def test_ctrl_c_ends_the_demo_and_its_daemon(engine_environment: dict[str, str], short_tmp: Path) -> None:
    demo = start(demo_environment(engine_environment, short_tmp), short_tmp)
    daemon = wait_for_attached_daemon(demo, short_tmp)
    node = node_of(daemon)
    demo.send_signal(signal.SIGINT)
    output, _ = demo.communicate(timeout=60)
    # Where the signal met a frame that a native library started, Python ends itself with SIGINT: a shell sees 130 too.
    assert demo.returncode in (130, -signal.SIGINT), output
    assert "Traceback" not in output
    assert wait_gone(daemon)
    assert not list(short_tmp.glob("stagecache-demo-*"))
    assert names_of(node) == []


def test_sigterm_ends_hidden_states_and_its_daemon_while_the_engine_starts(
    engine_environment: dict[str, str], short_tmp: Path
) -> None:
    model, prompts = short_tmp / "model", short_tmp / "prompts.jsonl"
    write_checkpoint(model, ModelShape(hidden=64))
    prompts.write_text("[5, 6, 7]\n")
    command = [
        *DEMO[:3],
        "hidden-states",
        "--model",
        str(model),
        "--prompts",
        str(prompts),
        "--out",
        str(short_tmp / "out"),
    ]
    run = subprocess.Popen(
        command,
        env=demo_environment(engine_environment, short_tmp),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    poll_until(lambda: list(short_tmp.glob("stagecache-*/stagecached.sock")), "the daemon to serve", 60.0)
    [daemon] = descendants_named(run.pid, "stagecached")
    node = node_of(daemon)
    run.terminate()
    output, _ = run.communicate(timeout=60)
    assert run.returncode == 128 + signal.SIGTERM, output
    assert "Traceback" not in output
    assert wait_gone(daemon)
    assert sorted(path.name for path in short_tmp.iterdir()) == ["model", "prompts.jsonl"]
    assert names_of(node) == []


def test_a_killed_demo_takes_its_daemon_along(engine_environment: dict[str, str], short_tmp: Path) -> None:
    demo = start(demo_environment(engine_environment, short_tmp), short_tmp)
    daemon = wait_for_attached_daemon(demo, short_tmp)
    node = node_of(daemon)
    os.kill(demo.pid, signal.SIGKILL)
    demo.communicate()
    assert wait_gone(daemon)
    assert names_of(node) == []


@pytest.mark.soak  # Ctrl-C and the demo's own death are in the short form
def test_a_killed_daemon_fails_the_demo_and_the_next_start_sweeps(
    engine_environment: dict[str, str], short_tmp: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    demo = start(demo_environment(engine_environment, short_tmp), short_tmp)
    daemon = wait_for_attached_daemon(demo, short_tmp)
    node = node_of(daemon)
    os.kill(daemon, signal.SIGKILL)
    output, _ = demo.communicate(timeout=SECONDS)
    assert demo.returncode == 1, output
    assert "error:" in output
    with LocalDaemon(tmp_path_factory.mktemp("d")):
        assert names_of(node) == []
