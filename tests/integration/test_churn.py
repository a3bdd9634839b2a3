"""Kills at random moments of attach, open and detach: whatever was half done is finished or gone."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import time
from contextlib import suppress

import pytest

from stagecache import errors
from stagecache.rpc import Credentials, Rpc, handshake
from stagecache_wire.locks import LifeLock
from stagecache_wire.v1 import stagecache_pb2 as pb
from tests.daemon_process import DaemonProcess, poll_until
from tests.integration import worker_process
from tests.integration.helpers import session_ids
from tests.integration.worker_process import attach_request, key

pytestmark = [pytest.mark.crash]

DAEMON_KILLS = 15
WORKER_KILLS = 25


class Churn(threading.Thread):
    """One worker after another: handshake, attach, three keys, detach. What a dead daemon interrupts is repeated."""

    def __init__(self, daemon: DaemonProcess) -> None:
        super().__init__()
        self._daemon = daemon
        self.stopped = threading.Event()
        self.rounds = 0
        self.wrong: list[str] = []

    def run(self) -> None:
        while not self.stopped.is_set():
            with suppress(errors.DaemonUnavailableError, errors.DaemonLostError):
                self._round(handshake(self._daemon.socket, "worker"))

    def _round(self, credentials: Credentials) -> None:
        assert credentials.worker_lock is not None
        lock = LifeLock(credentials.worker_lock)
        try:
            with Rpc(credentials) as rpc:
                first = self._insist(lambda: rpc.attach(attach_request("churn", 64, key()), 10.0))
                names = {first.keys[0].key_id: first.keys[0].staging_segment}
                for name in ("one", "two", "three"):
                    opened = self._insist(lambda n=name: rpc.open_key(pb.OpenKeyRequest(key=key(n)), 10.0))
                    names[opened.key_id] = opened.staging_segment
                again = self._insist(lambda: rpc.attach(attach_request("churn", 64, key()), 10.0))
                if {opened.key_id: opened.staging_segment for opened in again.keys} != names or len(names) != 4:
                    self.wrong.append(f"{names} became {again.keys}")
                self._insist(lambda: rpc.detach(10.0))
                self.rounds += 1
        except errors.StageCacheError as error:
            if not self.stopped.is_set():
                self.wrong.append(f"{type(error).__name__}: {error}")
        finally:
            lock.release(unlink=True)

    def _insist(self, call):  # type: ignore[no-untyped-def]
        """Repeat a call while the daemon is away: it may or may not have done it."""
        deadline = time.monotonic() + 30.0
        while True:
            try:
                return call()
            except errors.DaemonLostError:
                if time.monotonic() > deadline or self.stopped.is_set():
                    raise
                time.sleep(0.01)


@pytest.mark.soak  # tests/crash/test_daemon_killed.py has the short form
def test_daemon_killed_at_random_loses_no_session_and_leaves_no_file(fresh_daemon: DaemonProcess) -> None:
    """What the worker was told of stays true across every kill; the fixture sees that no file is left."""
    dice = random.Random(7)
    churn = Churn(fresh_daemon)
    churn.start()
    try:
        for _ in range(DAEMON_KILLS):
            before = churn.rounds
            time.sleep(dice.uniform(0.0, 0.05))  # the moment of the kill, not a wait
            fresh_daemon.restart()
            poll_until(lambda before=before: churn.rounds > before or churn.wrong, "a round after the kill", 30.0)
    finally:
        churn.stopped.set()
        churn.join()
    assert churn.wrong == []
    poll_until(lambda: not session_ids(fresh_daemon.socket), "the last session to end")


def test_workers_killed_at_random_leave_no_file(fresh_daemon: DaemonProcess) -> None:
    """Before, in or after the handshake, the attach, or while it waits."""
    dice = random.Random(8)
    for _ in range(WORKER_KILLS):
        worker = subprocess.Popen(
            [sys.executable, worker_process.__file__, str(fresh_daemon.socket), "s", "4096"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
        )
        handshakes = fresh_daemon.log.count("handshake")
        if dice.random() < 0.8:
            poll_until(lambda seen=handshakes: fresh_daemon.log.count("handshake") > seen, "the handshake")
            time.sleep(dice.uniform(0.0, 0.03))  # the moment of the kill, not a wait
        worker.kill()
        worker.communicate()
    poll_until(lambda: len(fresh_daemon.shm_files()) == 1, "the files of dead workers to go")
    assert session_ids(fresh_daemon.socket) == []
    assert list(fresh_daemon.paths.sessions.iterdir()) == []
