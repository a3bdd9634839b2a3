"""One soak: workers of all kinds under a daemon, faults one after another, and everybody's figures over time.

The first part (``KILLING``) is full of deaths of the daemon; in the rest one daemon lives through all other faults, so
that its own figures have a life long enough to be judged.
"""

from __future__ import annotations

import os
import signal
import socket as sockets
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from stagecache.control import connect_observer
from stagecache.errors import StageCacheError
from tests.daemon_process import DaemonProcess, poll_until
from tests.soak.crew import Crew
from tests.soak.flat import Trend
from tests.soak.samples import Samples, node_figures, process_figures

KILLING = 0.25
ENOUGH_SAMPLES = 40
ENOUGH_SESSIONS = 8
LEFT_S = 2.0
STEADY = ("steady one", "steady two")
CHURN = "churn"

FAULTS: dict[str, int] = {
    "worker killed": 8,
    "worker stopped": 3,
    "daemon stopped": 2,
    "scraped": 3,
    "stranger": 2,
    "reset": 1,
}
"""How often each, in relation to the others. ``stranger``: a handshake, and away."""
DEATHS: dict[str, int] = {"daemon killed": 16, "daemon replaced": 3}
"""Only in the first part; ``replaced``: by SIGUSR1, as for an upgrade."""


@dataclass
class Outcome:
    """What a soak came to. growing: figures that are not flat, by whose they are."""

    faults: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    steps: int = 0
    rows: int = 0
    rounds: int = 0
    back_s: list[float] = field(default_factory=list)
    """From each SIGKILL of the daemon until the next one served, in seconds."""
    left: list[str] = field(default_factory=list)
    samples: Samples = field(default_factory=Samples)

    def growing(self, slack: float = 1.0, *, starts: bool = True) -> dict[str, dict[str, Trend]]:
        """Figures that are not flat, by whose they are. slack: factor on the allowances. starts: whether there were
        daemons enough to compare each with the one before: what a run directory gathers shows there.
        """
        judged = ["daemon", "node", *STEADY, CHURN, *(["starts"] if starts else [])]
        found = {who: self.samples.growing(who, slack) for who in judged}
        return {who: figures for who, figures in found.items() if figures}


class Soak:
    """Runs faults on a schedule of its own seed: each kind once, then as often as the tables say."""

    def __init__(
        self,
        daemon: DaemonProcess,
        crew: Crew,
        *,
        seed: int,
        seconds: float,
        fault_every_s: float,
        sample_every_s: float,
    ) -> None:
        self.daemon = daemon
        self.crew = crew
        self.rng = Random(seed)
        self.outcome = Outcome()
        self._seconds = seconds
        self._fault_every_s = fault_every_s
        self._sample_every_s = sample_every_s
        self._sample_at = 0.0
        self._victims = 0
        self._deaths = True
        self._started_at = time.monotonic()
        self._fresh = False
        self._rounds_before = 0

    def run(self, *, leak: bool = False) -> Outcome:
        """leak: the workers that attach again and again keep what they have mapped."""
        for index, name in enumerate(STEADY):
            self._start(name, "steady", seed=index + 1)
        self._start(CHURN, "churn", seed=7, leak=leak)
        for name in (*STEADY, CHURN):
            poll_until(lambda name=name: self.crew.steps(name), f"{name} to step", 60.0)
        begun = time.monotonic()
        end = begun + self._seconds
        while (time.monotonic() < end or self._too_early()) and not self.crew.wrong:
            self._deaths = time.monotonic() - begun < KILLING * self._seconds
            self._one_fault()
            self._wait(self.rng.uniform(0.0, 2 * self._fault_every_s))
        poll_until(lambda: not self._victims_left() or self.crew.wrong, "the last victims", 60.0)
        self.crew.stop()
        self._sum_up()
        return self.outcome

    def _too_early(self) -> bool:
        """The last daemon's life is too short to be judged: on a busy machine a short run takes longer."""
        samples = len(self.outcome.samples.series["daemon", "resident"].times)
        return samples < ENOUGH_SAMPLES or self._rounds() - self._rounds_before < ENOUGH_SESSIONS

    def _rounds(self) -> int:
        return self.crew.told.get(CHURN, {}).get("rounds", 0)

    def _start(self, name: str, kind: str, **order: Any) -> None:
        self.crew.start(self.daemon.socket, name, kind, **order)

    # ---- faults

    def _one_fault(self) -> None:
        table = {**FAULTS, **(DEATHS if self._deaths else {})}
        first = [name for name in (*DEATHS, *FAULTS) if name in table and name not in self.outcome.faults]
        name = first[0] if first else self.rng.choices(list(table), list(table.values()))[0]
        doing: dict[str, Callable[[], None]] = {
            "worker killed": self._kill_worker,
            "worker stopped": self._stop_worker,
            "daemon stopped": self._stop_daemon,
            "scraped": self._scrape,
            "stranger": self._stranger,
            "reset": self._reset,
            "daemon killed": self._kill_daemon,
            "daemon replaced": self._replace_daemon,
        }
        doing[name]()
        self.outcome.faults[name] += 1

    def _kill_worker(self) -> None:
        if len(self._victims_left()) < 3:
            self._victims += 1
            after_s = self.rng.uniform(0.0, 0.8)
            self._start(f"victim {self._victims}", "victim", seed=100 + self._victims, after_s=after_s)

    def _victims_left(self) -> list[str]:
        return [name for name in list(self.crew.pids) if name.startswith("victim")]

    def _stop_worker(self) -> None:
        """SIGSTOP, and on: nothing of it may expire."""
        pid = self.crew.pids[self.rng.choice(STEADY)]
        os.kill(pid, signal.SIGSTOP)
        self._wait(self.rng.uniform(0.05, min(2.0, 4 * self._fault_every_s)))
        os.kill(pid, signal.SIGCONT)

    def _stop_daemon(self) -> None:
        os.kill(self.daemon.pid, signal.SIGSTOP)
        time.sleep(self.rng.uniform(0.02, 0.4))  # the fault itself, not a wait
        os.kill(self.daemon.pid, signal.SIGCONT)

    def _scrape(self) -> None:
        for path in ("/metrics", "/api/state", "/api/history", "/"):
            with sockets.socket(sockets.AF_UNIX) as page:
                page.settimeout(20.0)
                page.connect(os.fspath(self.daemon.paths.http_socket))
                page.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
                answer = b""
                while chunk := page.recv(1 << 16):
                    answer += chunk
            if not answer.startswith(b"HTTP/1.1 200"):
                self.outcome.wrong.append(f"{path}: {answer[:60]!r}")
        with connect_observer(self.daemon.socket, timeout_s=20.0) as observer:
            observer.stats()

    def _stranger(self) -> None:
        with sockets.socket(sockets.AF_UNIX) as peer:
            peer.settimeout(20.0)
            peer.connect(os.fspath(self.daemon.paths.peer_socket))
            peer.sendall(self.rng.choice((b"", b"{", b'{"abi": 1, "role": "observer"}\n', b"\xff" * 5000)))

    def _reset(self) -> None:
        """Refused: no scheduler-side shim watches."""
        try:
            with connect_observer(self.daemon.socket, timeout_s=20.0) as observer:
                observer.reset("steady", force=False, cause="soak")
        except StageCacheError:
            return
        self.outcome.wrong.append("a reset without a scheduler-side shim was not refused")

    def _kill_daemon(self) -> None:
        self.daemon.kill()
        killed_at = time.monotonic()
        self.daemon.start()
        self.outcome.back_s.append(time.monotonic() - killed_at)
        self._new_daemon()

    def _replace_daemon(self) -> None:
        self.daemon.stop(signal.SIGUSR1)
        self.daemon.start()
        self._new_daemon()

    def _new_daemon(self) -> None:
        """Its life begins: figures of the one before say nothing of it."""
        for key in [key for key in self.outcome.samples.series if key[0] == "daemon"]:
            del self.outcome.samples.series[key]
        self._started_at, self._fresh = time.monotonic(), True
        self._rounds_before = self._rounds()

    # ---- figures

    def _wait(self, seconds: float) -> None:
        """Let time pass, and look at everybody meanwhile."""
        until = time.monotonic() + seconds
        while (now := time.monotonic()) < until:
            if now >= self._sample_at:
                self._sample_at = now + self._sample_every_s
                self._sample()
            time.sleep(max(0.0, min(until, self._sample_at) - time.monotonic()))

    def _sample(self) -> None:
        samples, figures = self.outcome.samples, process_figures(self.daemon.pid)
        samples.note("daemon", figures)
        samples.note("node", node_figures(self.daemon.paths))
        for name in (*STEADY, CHURN):
            samples.note(name, process_figures(self.crew.pids.get(name, 0)))
        if self._fresh and time.monotonic() - self._started_at > self._fault_every_s:
            self._fresh = False
            samples.note("starts", {name: figures[name] for name in ("anonymous", "descriptors", "threads")})

    def _sum_up(self) -> None:
        outcome, crew = self.outcome, self.crew
        outcome.wrong += crew.wrong
        for name in (*STEADY, CHURN):
            if crew.codes.get(name) != 0:
                outcome.wrong.append(f"{name} ended with {crew.codes.get(name)}")
            told = crew.told.get(name, {})
            for figure in ("steps", "rows", "hit_rows", "flushes"):
                if not told.get(figure):
                    outcome.wrong.append(f"{name} has no {figure}")
            outcome.steps += told.get("steps", 0)
            outcome.rows += told.get("rows", 0)
        outcome.rounds = self._rounds()
        for code in {code for name, code in crew.codes.items() if name.startswith("victim")}:
            if code not in (0, -signal.SIGKILL):
                outcome.wrong.append(f"a victim ended with {code}")
        try:
            poll_until(lambda: not self._left(), "the files of dead workers to go", LEFT_S)
        except AssertionError:
            outcome.left = self._left()

    def _left(self) -> list[str]:
        """Files of sessions: nobody is attached any more."""
        return [name for name in self.daemon.shm_files() if not name.endswith(f"{self.daemon.paths.node}.lock")]
