"""Real daemons that die as planned, one after another on one socket, each started as soon as the last is dead.

    python -m tests.crash.killdaemon    # stdin: a JSON line, a line when time begins to run, end of file to end all

The process imports the daemon once and forks: so a daemon is back in tens of milliseconds, and one run has room for
hundreds of deaths. The line holds

    socket, log    paths
    plan           what becomes of each daemon: {"point": NAME, "visit": N}, {"after_s": SECONDS} from its start, or
                   {"serving_s": SECONDS} from when it answers
    hold_s         longest pause between a death and the next start, drawn anew each time: the worker runs ahead in it
    seed, mutant   of the pauses; name of a consumer out of tests.crash.mutant_consumers, or ""

Events go to stdout, one JSON line each: ``serving`` when a daemon answers, ``killing`` (with the visits of each point
so far), ``died``, ``planned`` when the last planned death has happened and a daemon without plan was started,
``visits`` when that one was stopped.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import select
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stagecached import config, daemon, logs
from stagecached.consumer import Consumer
from tests.crash.mutant_consumers import CONSUMERS
from tests.crash.points import Plan, killing, killing_store, printer, tear_stores

_LIBC = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG = 1
STOP_S = 8.0


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
        when_it_serves(report, item.get("serving_s"))
        arguments = ["--socket", setup["socket"], "--memory-budget", "1GiB", "--shared-bytes", "1MiB"]
        settings = config.load([*arguments, "--log-level", "warning"])
        logs.configure(settings.log_format, settings.log_level)
        daemon.run(settings, killing(base, plan), killing_store(plan))
        report({"event": "visits", "visits": dict(plan.visits)})
        status = 0
    except BaseException as error:
        os.write(2, f"{type(error).__name__}: {error}\n".encode())
        raise
    finally:
        os._exit(status)


def when_it_serves(report: Callable[[dict[str, Any]], None], die_after_s: float | None) -> None:
    """``serving`` comes when the daemon answers, with the time by time.monotonic() and the seconds in which this
    process was ready to run and others had the CPU; so many seconds later it dies.
    """
    serve = daemon.Daemon._serve

    def waited_s() -> float:
        return int(Path("/proc/self/schedstat").read_text().split()[1]) / 1e9

    async def told(self: daemon.Daemon) -> None:
        await serve(self)
        report({"event": "serving", "at": time.monotonic(), "waited_s": waited_s()})
        if die_after_s is not None:
            timer = threading.Timer(die_after_s, os.kill, (os.getpid(), signal.SIGKILL))
            timer.daemon = True
            timer.start()

    daemon.Daemon._serve = told  # type: ignore[method-assign]


class Keeper:
    """Starts, kills and buries the daemons."""

    def __init__(self, setup: dict[str, Any]) -> None:
        self.setup = setup
        self.rng = random.Random(setup["seed"])
        self.report = printer(1)
        self.begun = self.stop_asked = False

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
            self.watch(pid, pidfd, item.get("after_s"))
        finally:
            os.close(pidfd)
        _, status = os.waitpid(pid, 0)
        code = os.waitstatus_to_exitcode(status)
        now = time.monotonic()
        self.report({"event": "died", "item": index, "code": code, "lived_s": round(now - started, 4), "at": now})
        if not self.stop_asked:
            self.listen([], self.rng.uniform(0, self.setup["hold_s"]))

    def watch(self, pid: int, pidfd: int, after_s: float | None) -> None:
        """Until it is dead: by itself, killed after so many seconds, or stopped when stdin ends."""
        kill_at = time.monotonic() + after_s if after_s is not None and self.begun else None
        while True:
            left = None if kill_at is None else max(0.0, kill_at - time.monotonic())
            was = (self.begun, self.stop_asked)
            if self.listen([pidfd], left):
                return
            if was != (self.begun, self.stop_asked):
                if self.stop_asked:
                    os.kill(pid, signal.SIGTERM)
                    kill_at = time.monotonic() + STOP_S
                elif after_s is not None:
                    kill_at = time.monotonic() + after_s
            elif kill_at is not None and time.monotonic() >= kill_at:
                os.kill(pid, signal.SIGKILL)
                kill_at = None

    def listen(self, fds: list[int], seconds: float | None) -> bool:
        """Wait for one of ``fds``, for stdin or for the time; True where it was one of ``fds``."""
        ready, _, _ = select.select(fds if self.stop_asked else [*fds, 0], [], [], seconds)
        if 0 in ready:
            self.begun = True
            self.stop_asked = not os.read(0, 1 << 16)
        return any(fd in ready for fd in fds)


if __name__ == "__main__":
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    line = b""
    while not line.endswith(b"\n"):
        line += os.read(0, 1)
    Keeper(json.loads(line)).run()
