"""Workers of a soak: many at once, forked from one process that has imported torch and the client.

    python -m tests.soak.hands    # stdin: JSON lines of orders; stdout: JSON lines of what the workers tell

Orders: {"start": NAME, "kind": KIND, "socket": PATH, "seed": N, ...}, {"stop": NAME}; end of file stops all. A worker
tells {"name", "pid"} when it is there, {"name", "steps", "rows", ...} twice a second, {"name", "wrong"} when a row is
not as it must be, and {"name", "code"} when it is dead.

    steady    one session for as long as it runs
    churn     attaches, does some steps, closes, and again, in one process
    victim    as steady, and killed after ``after_s`` seconds by SIGKILL
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch

from stagecache.errors import AttachError, StageCacheError
from tests.crash.load import Load, WrongError
from tests.crash.workload import Workload

_LIBC = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG = 1
TELL_EVERY_S = 0.5


def tell(**facts: Any) -> None:
    os.write(1, json.dumps(facts).encode() + b"\n")


class Worker:
    """Runs in the fork. Its steps are paced, so that a machine can hold several."""

    def __init__(self, order: dict[str, Any]) -> None:
        self.order = order
        self.rng = Random(order["seed"])
        self.ended = False
        self.totals = {"steps": 0, "rows": 0, "hit_rows": 0, "rounds": 0, "flushes": 0}
        self._told_at = 0.0
        self._leaked: list[Any] = []
        signal.signal(signal.SIGTERM, self._end)

    def _end(self, *_: object) -> None:
        self.ended = True

    def attach(self, seed: int, *, passing_keys: bool) -> Load | None:
        """A load; None where it was told to end while no daemon answered."""
        while not self.ended:
            try:
                return Load(
                    Path(self.order["socket"]),
                    seed,
                    workload=Workload(seed, passing_keys=passing_keys),
                    stage=self.order["kind"],
                    arena_bytes=self.order.get("arena_bytes", 1 << 20),
                    wait_s=60.0,
                )
            except AttachError:  # it is being started again
                time.sleep(0.02)
        return None

    def steps(self, load: Load, count: int | None) -> None:
        while not self.ended and load.steps != count:
            load.run_step()
            self.told(load)
            time.sleep(self.rng.uniform(0.0, 2 * self.order.get("pause_s", 0.005)))

    def told(self, load: Load) -> None:
        now = time.monotonic()
        if now - self._told_at >= TELL_EVERY_S:
            self._told_at = now
            tell(name=self.order["name"], **self.sums(load))

    def sums(self, load: Load) -> dict[str, int]:
        """Totals of the sessions before and of this one."""
        mine = {
            "steps": load.steps,
            "rows": load.checked_rows,
            "hit_rows": load.cache.counters.hit_rows,
            "flushes": load.cache._saver.deferred.flushes,
            "rounds": 1,
        }
        return {name: value + mine[name] for name, value in self.totals.items()}

    def steady(self) -> None:
        """One session; also what a victim does until it is killed."""
        load = self.attach(self.order["seed"], passing_keys=False)
        if load is not None:
            self.steps(load, None)
            self.finish(load)

    victim = steady

    def churn(self) -> None:
        """One session after another; with ``leak``, each leaves its arena mapped: the control of the soak."""
        seed = self.order["seed"] * 1000
        while not self.ended:
            seed += 1
            load = self.attach(seed, passing_keys=True)
            if load is None:
                return
            self.steps(load, self.rng.randint(1, 12))
            self.finish(load)
            if self.order.get("leak"):
                self._leaked.append((load.cache, [os.dup(0) for _ in range(8)]))

    def finish(self, load: Load) -> None:
        load.finish()
        self.totals = self.sums(load)
        load._held.clear()
        load.cache.close()
        tell(name=self.order["name"], **self.totals)


def become(order: dict[str, Any]) -> None:
    """Runs in the fork, and ends it."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    status = 1
    try:
        getattr(Worker(order), order["kind"])()
        status = 0
    except (StageCacheError, WrongError, AssertionError) as error:
        tell(name=order["name"], wrong=f"{type(error).__name__}: {error}")
    except BaseException as error:
        tell(name=order["name"], wrong=f"{type(error).__name__}: {error}")
        raise
    finally:
        os._exit(status)


@dataclass
class Child:
    name: str
    pid: int
    pidfd: int
    kill_at: float | None


class Hands:
    """Forks workers, kills those whose time has come, and buries the dead."""

    def __init__(self) -> None:
        self.children: dict[int, Child] = {}
        self._line = b""

    def run(self) -> None:
        ordered = True
        while ordered or self.children:
            times = [child.kill_at for child in self.children.values() if child.kill_at is not None]
            left = max(0.0, min(times) - time.monotonic()) if times else None
            ready, _, _ = select.select([*self.children, *([0] if ordered else [])], [], [], left)
            if 0 in ready and not self._orders():
                ordered = False
                for child in self.children.values():
                    os.kill(child.pid, signal.SIGTERM)
            for child in list(self.children.values()):
                if child.pidfd in ready:
                    self._bury(child)
                elif child.kill_at is not None and time.monotonic() >= child.kill_at:
                    os.kill(child.pid, signal.SIGKILL)
                    child.kill_at = None

    def _orders(self) -> bool:
        """Do what stdin says; False at its end."""
        chunk = os.read(0, 1 << 16)
        *lines, self._line = (self._line + chunk).split(b"\n")
        for line in lines:
            order = json.loads(line)
            if "start" in order:
                self._start({**order, "name": order["start"]})
            else:
                for child in self.children.values():
                    if child.name == order["stop"]:
                        os.kill(child.pid, signal.SIGTERM)
        return bool(chunk)

    def _start(self, order: dict[str, Any]) -> None:
        pid = os.fork()
        if pid == 0:
            become(order)
        after_s = order.get("after_s")
        pidfd = os.pidfd_open(pid)
        self.children[pidfd] = Child(order["name"], pid, pidfd, None if after_s is None else time.monotonic() + after_s)
        tell(name=order["name"], pid=pid)

    def _bury(self, child: Child) -> None:
        _, status = os.waitpid(child.pid, 0)
        os.close(child.pidfd)
        del self.children[child.pidfd]
        tell(name=child.name, code=os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.modules["tests.soak.hands"] = sys.modules["__main__"]
    tell(name="hands", ready=True)
    Hands().run()
