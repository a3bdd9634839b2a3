"""The other end of ``tests.crash.killdaemon``: starts it, and knows what became of its daemons."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from stagecache.control import ping
from stagecache.errors import StageCacheError
from tests.crash.load import WrongError, wait_until

STOP_S = 15.0


class Supervisor:
    """Daemons on one socket that die by plan. A context: they are all gone at its end.

    Attributes:
        deaths: what became of each daemon, in order. kills: how often each point killed one.
        visits: how often each point was reached, in all daemons that told.
        back_s: from each death until the next daemon answered, in seconds. back_own_s: the same, without the time in
            which that daemon was ready to run and other processes had the CPU.
        planned: the last planned death has happened, and a daemon that stays was started.
    """

    def __init__(
        self, folder: Path, plan: Sequence[dict[str, Any]], *, seed: int = 0, hold_s: float = 0.02, mutant: str = ""
    ) -> None:
        self.socket = folder / "d.sock"
        self.log = folder / "d.log"
        self.deaths: list[dict[str, Any]] = []
        self.kills: Counter[str] = Counter()
        self.visits: Counter[str] = Counter()
        self.back_s: list[float] = []
        self.back_own_s: list[float] = []
        self.planned = False
        self._plan = list(plan)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.crash.killdaemon"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        setup = {
            "socket": str(self.socket),
            "log": str(self.log),
            "plan": list(plan),
            "hold_s": hold_s,
            "seed": seed,
            "mutant": mutant,
        }
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(setup).encode() + b"\n")
        self._process.stdin.flush()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Supervisor:
        try:
            wait_until(self.serves, "a daemon that serves", 20.0)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def serves(self) -> bool:
        """Whether a daemon answers now."""
        try:
            ping(self.socket, timeout_s=0.5)
        except StageCacheError:
            return False
        return True

    def begin(self) -> None:
        """From now on the clock runs for deaths that come after a time."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"\n")
        self._process.stdin.flush()

    def next_death(self) -> object:
        """What the plan has in store for the daemon of now."""
        left = self._plan[len(self.deaths) :]
        return left[0] if left else "none"

    def check(self) -> None:
        """
        Raises:
            WrongError: a daemon ended otherwise than planned.
        """
        for death in list(self.deaths):
            if death["code"] not in (-9, 0):
                raise WrongError(f"a daemon ended with status {death['code']}: {self.log.read_text()[-2000:]}")

    def stop(self) -> None:
        """Stop the daemon that runs, and the process that starts them."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join(STOP_S)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            event = json.loads(line)
            if event["event"] == "died":
                self.deaths.append(event)
            elif event["event"] == "serving":
                if self.deaths:
                    since = event["at"] - self.deaths[-1]["at"]
                    self.back_s.append(since)
                    self.back_own_s.append(since - event["waited_s"])
            elif event["event"] == "planned":
                self.planned = True
            else:
                self.visits.update(event["visits"])
                if event["event"] == "killing":
                    self.kills[event["point"]] += 1
        self._process.stdout.close()
