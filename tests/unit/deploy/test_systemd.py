"""The systemd unit: it loads, it is hardened, it hands sessions over, and the daemon lives under it."""

from __future__ import annotations

import grp
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from stagecached.config import Settings, load
from tests.daemon_process import DaemonProcess, poll_until
from tests.unit.deploy.files import DEPLOY, METRICS_PORT, ROOT, SOCKET, unit

DAEMON_GRACE_S = 2.0
"""How long workers wait for a daemon to come back (``Session.attach``)."""

needs_systemd = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")


def analyze(*arguments: str) -> str:
    done = subprocess.run(["systemd-analyze", *arguments], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@needs_systemd
def test_unit_has_no_mistakes(tmp_path: Path) -> None:
    path = tmp_path / "stagecached.service"
    text = (DEPLOY / "systemd/stagecached.service").read_text()
    path.write_text(text.replace("/opt/stagecache/bin/stagecached", sys.executable))
    assert analyze("verify", "--man=no", str(path)).strip() == ""


@needs_systemd
def test_exposure_is_low() -> None:
    text = analyze("security", "--offline=true", "--no-pager", str(DEPLOY / "systemd/stagecached.service"))
    found = re.search(r"Overall exposure level for stagecached.service: ([\d.]+)", text)
    assert found is not None
    assert float(found[1]) < 3


def test_restart_hands_sessions_over_and_stop_ends_them() -> None:
    settings = unit()
    assert settings["RestartKillSignal"] == ["SIGUSR1"]
    assert settings["KillSignal"] == ["SIGTERM"]
    assert settings["RuntimeDirectoryPreserve"] == ["restart"], "or the manifests are gone before they are adopted"
    assert settings["RemoveIPC"] == ["no"], "or the segments are"
    assert settings["PrivateDevices"] == ["yes"]
    assert "PrivateUsers" not in settings, "or all workers look like nobody"
    assert "DynamicUser" not in settings, "it implies RemoveIPC=yes"


def test_times_fit() -> None:
    settings = unit()
    assert float(settings["RestartSec"][0].removesuffix("ms")) / 1000 < DAEMON_GRACE_S / 2
    assert float(settings["TimeoutStopSec"][0]) > Settings.model_fields["drain_timeout_s"].default + 5


def test_limits() -> None:
    settings = unit()
    assert settings["LimitMEMLOCK"] == ["infinity"]
    assert int(settings["LimitNOFILE"][0]) >= 4096


def test_command_line_and_file_are_settings(tmp_path: Path) -> None:
    """What ExecStart= gives and what stagecached.toml says, read by the daemon's own reader."""
    (command,) = unit()["ExecStart"]
    text = (DEPLOY / "systemd/stagecached.toml").read_text()
    group = grp.getgrgid(os.getgid()).gr_name
    (tmp_path / "stagecached.toml").write_text(text.replace('group = "stagecache"', f'group = "{group}"'))
    arguments = [str(tmp_path / "stagecached.toml") if part.endswith(".toml") else part for part in command.split()[1:]]
    settings = load(arguments)
    assert settings.socket == Path(SOCKET)
    assert (settings.metrics_port, settings.metrics_address) == (METRICS_PORT, "127.0.0.1")
    assert settings.access.gid == os.getgid()
    assert all(value.endswith(f"tcp:{METRICS_PORT}") for value in unit()["SocketBindAllow"])


def test_socket_lies_in_the_units_directory() -> None:
    assert Path(SOCKET).parent == Path("/run") / unit()["RuntimeDirectory"][0]


class ConfinedDaemon(DaemonProcess):
    """A daemon started as the unit would confine it."""

    command = (sys.executable, "-m", "tests.unit.deploy.confine", sys.executable, "-m", "stagecached")

    def start(self) -> None:
        with self.log_file.open("ab") as log:
            self._process = subprocess.Popen(
                [*self.command, "--socket", str(self.socket), *self.arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=ROOT,
            )
        poll_until(self._serves, "the daemon to serve", 30.0)
        self._node = self.paths.node


@needs_systemd
@pytest.mark.slow
@pytest.mark.skipif(not list(Path("/usr/lib").rglob("libseccomp.so.2")), reason="needs libseccomp")
def test_daemon_works_and_hands_over_under_the_units_confinement(tmp_path: Path) -> None:
    """No capability, no writable code, only the system calls that are allowed; a worker goes on through a restart."""
    daemon = ConfinedDaemon(tmp_path, "--group", str(os.getgid()), "--metrics-port", "0")
    daemon.start()
    try:
        status = Path(f"/proc/{daemon.pid}/status").read_text()
        assert re.search(r"CapEff:\s+0+$", status, re.MULTILINE)
        assert re.search(r"Seccomp:\s+2$", status, re.MULTILINE)
        worker = subprocess.Popen(
            [sys.executable, DEPLOY / "compose/demo_worker.py", "--socket", daemon.socket, "--steps=150", "--rate=100"],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert worker.stdout is not None
        assert worker.stdout.readline().startswith("attached")
        subprocess.run(
            [sys.executable, "-m", "stagecache.cli", "drain", "--keep-sessions", "--socket", str(daemon.socket)],
            check=True,
            timeout=30,
        )
        assert daemon.stop() == 0
        daemon.start()
        rest = worker.communicate(timeout=60)[0]
        assert worker.returncode == 0, rest
        assert "every one right" in rest
        assert "adopted=1" in daemon.log
    finally:
        daemon.close()
