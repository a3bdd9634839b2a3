"""What a node may be like: /dev/shm small or full, everybody pid 1, several daemons, a directory of another user."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from stagecache_wire.locks import is_held
from tests.daemon_process import DaemonProcess, poll_until
from tests.integration.helpers import own_daemon, session_ids
from tests.integration.worker_process import WorkerProcess

UNSHARE = shutil.which("unshare") or ""


def may(*namespace: str) -> bool:
    """Whether a process may have such a namespace here."""
    if os.geteuid() != 0 or not UNSHARE:
        return False
    return subprocess.run([UNSHARE, *namespace, "true"], capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(not may("-m"), reason="needs a mount namespace")
def test_small_shared_memory_that_others_fill_refuses_and_never_faults(tmp_path: Path) -> None:
    """Refused with needed, free and remedy; what was granted goes on, through a restart of the daemon too."""
    inside = f'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "{sys.executable}" -m tests.integration.small_shm "$0"'
    done = subprocess.run(
        [UNSHARE, "-m", "sh", "-c", inside, str(tmp_path)], capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{(tmp_path / 'daemon.log').read_text()}"
    *refusals, last = done.stdout.splitlines()
    assert last == "done"
    assert [text.split(" needs ")[0] for text in refusals] == [
        "attach of test/model/large",
        "key wide of m/s",
        "attach of test/model/late",
    ]


AS_PID_1 = """
import ctypes, os, signal, sys
libc, CLONE_NEWPID, PR_SET_PDEATHSIG = ctypes.CDLL(None), 0x20000000, 1
assert libc.unshare(CLONE_NEWPID) == 0
child = os.fork()
if child == 0:
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    os.execv(sys.argv[1], sys.argv[1:])
for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, lambda number, _: os.kill(child, number))
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.skipif(not may("-p", "-f"), reason="needs a pid namespace")
def test_processes_that_are_all_pid_1_are_told_apart(tmp_path: Path) -> None:
    """Life is told by locks and pidfds: a number says nothing."""
    alone = (sys.executable, "-c", AS_PID_1, sys.executable)
    daemon = DaemonProcess(tmp_path, program=(*alone, "-m", "stagecached"))
    daemon.start()
    try:
        holder = json.loads(daemon.paths.lock.read_text())
        assert holder["pid"] == 1
        with (
            WorkerProcess(daemon.socket, prefix=alone[:-1]) as one,
            WorkerProcess(daemon.socket, prefix=alone[:-1]) as two,
        ):
            assert sorted(session_ids(daemon.socket)) == sorted([one.session_id, two.session_id])
            one.kill()
            poll_until(lambda: session_ids(daemon.socket) == [two.session_id], "the dead one to go, and no other")
            daemon.kill()
            poll_until(lambda: not is_held(daemon.paths.lock), "the daemon to be gone")
            daemon.start()
            assert session_ids(daemon.socket) == [two.session_id], "its worker is pid 1, and lives"
            two.kill()
            poll_until(lambda: session_ids(daemon.socket) == [], "the dead one to go")
    finally:
        daemon.close()


@pytest.mark.soak
def test_two_daemons_on_one_shared_memory_leave_each_other_alone(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    with (
        own_daemon(tmp_path / "one") as one,
        own_daemon(tmp_path / "two") as two,
        WorkerProcess(one.socket) as mine,
        WorkerProcess(two.socket) as other,
    ):
        before = two.shm_files()
        assert not set(one.shm_files()) & set(before)
        one.restart()
        assert session_ids(one.socket) == [mine.session_id]
        two.kill()
        one.restart()
        left = two.shm_files()
        assert left == before, "its worker lives"
        two.start()
        assert session_ids(two.socket) == [other.session_id]


AS_NOBODY = """
import os, sys
import stagecached.daemon, stagecached.logs  # whose files that user may not read
from stagecached.main import main
os.setgroups([])
os.setresgid(54322, 54322, 54322)
os.setresuid(54321, 54321, 54321)
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")
def test_run_directory_without_the_right_to_write_is_refused_with_uid_and_remedy() -> None:
    folder = Path(f"/tmp/stagecache-node-{os.getpid()}")
    folder.mkdir(mode=0o755)
    try:
        done = subprocess.run(
            [sys.executable, "-c", AS_NOBODY, "--socket", str(folder / "d.sock")],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    finally:
        shutil.rmtree(folder)
    assert done.returncode == 3, done.stderr
    assert f"the run directory {folder}/d.sock.d cannot be used: Permission denied" in done.stderr
    assert "Choose a --socket in a directory that uid 54321 may write to" in done.stderr
