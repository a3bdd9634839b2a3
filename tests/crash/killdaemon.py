"""Real daemons that die as planned, one after another on one socket, each started as soon as the last is dead.

    python -m tests.crash.killdaemon < one JSON line, then end of file when all shall end

The process imports the daemon once and forks: so a daemon is back in tens of milliseconds, and one run has room for
hundreds of deaths. The line holds

    socket, log    paths
    plan           what becomes of each daemon: {"point": NAME, "visit": N} or {"after_s": SECONDS}
    hold_s         longest pause between a death and the next start, drawn anew each time: the worker runs ahead in it
    seed, mutant   of the pauses; name of a consumer out of tests.crash.mutant_consumers, or ""

Events go to stdout, one JSON line each: ``killing`` (with the visits of each point so far), ``died``, ``planned`` when
the last planned death has happened and a daemon without plan was started, ``visits`` when that one was stopped.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import select
import signal
import sys
import time
from typing import Any

from stagecached import config, daemon, logs
from stagecached.consumer import Consumer
from tests.crash.mutant_consumers import CONSUMERS
from tests.crash.points import Plan, killing, printer, tear_stores

_LIBC = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG = 1


def become_daemon(setup: dict[str, Any], item: dict[str, Any]) -> None:
    """Runs in the fork, and ends it."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    report = printer(os.dup(1))
    log = os.open(setup["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for fd in (1, 2):
        os.dup2(log, fd)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    status = 1
    try:
        plan = Plan(item.get("point", ""), item.get("visit", 0), report)
        base = CONSUMERS[setup["mutant"]] if setup["mutant"] else Consumer
        tear_stores(plan)
        settings = config.load(["--socket", setup["socket"], "--memory-budget", "1GiB", "--log-level", "warning"])
        logs.configure(settings.log_format, settings.log_level)
        daemon.run(settings, killing(base, plan))
        report({"event": "visits", "visits": dict(plan.visits)})
        status = 0
    except BaseException as error:
        os.write(2, f"{type(error).__name__}: {error}\n".encode())
        raise
    finally:
        os._exit(status)


class Keeper:
    """Starts, kills and buries the daemons."""

    def __init__(self, setup: dict[str, Any]) -> None:
        self.setup = setup
        self.rng = random.Random(setup["seed"])
        self.report = printer(1)
        self.stop_asked = False

    def run(self) -> None:
        for index, item in enumerate(self.setup["plan"]):
            self.live(index, item)
            if self.stop_asked:
                return
        self.report({"event": "planned"})
        self.live(len(self.setup["plan"]), {})

    def live(self, index: int, item: dict[str, Any]) -> None:
        """The life of one daemon."""
        pid = os.fork()
        if pid == 0:
            become_daemon(self.setup, item)
        started = time.monotonic()
        pidfd = os.pidfd_open(pid)
        try:
            self.watch(pid, pidfd, started + item["after_s"] if "after_s" in item else None)
        finally:
            os.close(pidfd)
        _, status = os.waitpid(pid, 0)
        code = os.waitstatus_to_exitcode(status)
        self.report({"event": "died", "item": index, "code": code, "lived_s": round(time.monotonic() - started, 4)})
        if not self.stop_asked:
            self.wait_for_stop(self.rng.uniform(0, self.setup["hold_s"]))

    def watch(self, pid: int, pidfd: int, kill_at: float | None) -> None:
        """Until it is dead: by itself, killed at the time given, or stopped when stdin ends."""
        while True:
            left = None if kill_at is None else max(0.0, kill_at - time.monotonic())
            ready, _, _ = select.select([pidfd] if self.stop_asked else [pidfd, 0], [], [], left)
            if pidfd in ready:
                return
            if 0 in ready and not self.stop_asked:
                self.stop_asked = True
                os.kill(pid, signal.SIGTERM)
                kill_at = time.monotonic() + 8.0
            elif not ready:
                os.kill(pid, signal.SIGKILL)
                kill_at = None

    def wait_for_stop(self, seconds: float) -> None:
        ready, _, _ = select.select([0], [], [], seconds)
        self.stop_asked = bool(ready)


if __name__ == "__main__":
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    line = b""
    while not line.endswith(b"\n"):
        line += os.read(0, 1 << 16)
    sys.stdout.flush()
    Keeper(json.loads(line)).run()
