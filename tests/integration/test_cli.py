"""The ``stagecache`` command against a real daemon: its exit status, its texts, its JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from stagecache_wire.layout import ABI
from stagecache_wire.v1 import stagecache_pb2 as pb
from tests.daemon_process import DaemonProcess
from tests.integration.helpers import worker


def stagecache(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("STAGECACHE_")}
    return subprocess.run(
        [sys.executable, "-m", "stagecache.cli", *arguments],
        env=env | {"COLUMNS": "200"} | environ,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


ATTACH = pb.AttachRequest(
    abi=ABI,
    model="a-model",
    stage="cli-stage",
    geometry=pb.Geometry(num_blocks=8, block_size=4, staging_capacity_tokens=16, staging_depth=2, max_results=64),
    keys=[pb.KeySchema(name="__hidden_states__", dtype="bfloat16", row_shape=[6], row_bytes=12)],
)


def test_ping_of_a_daemon_that_serves(daemon: DaemonProcess) -> None:
    done = stagecache("ping", "--socket", str(daemon.socket))
    assert (done.returncode, done.stderr) == (0, "")
    assert f"{daemon.socket} serves" in done.stdout


@pytest.mark.parametrize("command", ["ping", "status", "reset"])
def test_no_daemon_is_status_1_and_the_remedy(command: str, tmp_path: Path) -> None:
    socket = tmp_path / "nobody.sock"
    done = stagecache(command, *(["a-stage"] if command == "reset" else []), "--socket", str(socket))
    assert (done.returncode, done.stdout) == (1, "")
    assert f"stagecached --socket {socket}" in done.stderr
    assert "Traceback" not in done.stderr


def test_without_a_socket_the_default_of_the_daemon_is_asked(daemon: DaemonProcess) -> None:
    done = stagecache("ping")
    assert "/run/stagecache/stagecached.sock" in done.stdout + done.stderr
    assert stagecache("ping", STAGECACHE_SOCKET=str(daemon.socket)).returncode == 0


def test_status_shows_sessions_and_keys(daemon: DaemonProcess) -> None:
    with worker(daemon.socket) as rpc:
        rpc.attach(ATTACH, 10.0)
        shown = stagecache("status", "--socket", str(daemon.socket)).stdout
        answer = json.loads(stagecache("status", "--json", "--socket", str(daemon.socket)).stdout)
    assert "cli-stage (a-model)" in shown
    assert "8 x 4" in shown
    assert "__hidden_states__" in shown
    assert "bfloat16" in shown
    [session] = [one for one in answer["sessions"] if one["stage"] == "cli-stage"]
    assert session["keys"][0]["key"]["row_shape"] == [6]
    assert session["hits"] == "0"  # zeros are there, and 64-bit numbers are strings, as in all protobuf JSON


def test_status_of_an_idle_daemon_says_so(fresh_daemon: DaemonProcess) -> None:
    assert "No sessions" in stagecache("status", "--socket", str(fresh_daemon.socket)).stdout


def test_reset_without_a_scheduler_to_tell_needs_force(daemon: DaemonProcess) -> None:
    """R5: an engine that is not told would go on hitting blocks whose rows are gone."""
    with worker(daemon.socket) as rpc:
        rpc.attach(ATTACH, 10.0)
        refused = stagecache("reset", "cli-stage", "--socket", str(daemon.socket))
        forced = stagecache("reset", "cli-stage", "--force", "--socket", str(daemon.socket))
    assert refused.returncode == 1
    assert "force" in refused.stderr
    assert forced.returncode == 0
    assert "1 session(s)" in forced.stdout


def test_help_and_version_are_quick_and_import_no_torch() -> None:
    code = (
        "import sys\n"
        "from typer.testing import CliRunner\n"
        "from stagecache.cli import app\n"
        "run = CliRunner().invoke\n"
        "assert all(c in run(app, ['--help']).output for c in ('demo', 'hidden-states', 'status', 'ping', 'reset'))\n"
        "assert all('Examples' in run(app, [c, '--help']).output for c in ('demo', 'hidden-states', 'status'))\n"
        "assert run(app, ['--version']).output.startswith('stagecache ')\n"
        "assert not {'torch', 'vllm', 'grpc', 'numpy'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_demo_where_there_is_no_engine_says_what_is_missing() -> None:
    code = (
        "import sys\n"
        "sys.modules['vllm'] = None\n"
        "sys.argv = ['stagecache', 'demo']\n"
        "import stagecache.cli\n"
        "stagecache.cli.main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "vllm" in done.stderr
    assert "Traceback" not in done.stderr
