"""Real workers that die as told, one at a time.

    python -m tests.crash.killworker    # stdin: one JSON line a worker; stdout: one when it runs, one when it is dead

The process imports torch and the client once and forks. A line holds ``socket`` and ``seed``, and may hold ``place``
and ``visit``, or ``after_s``, at which the worker dies, or ``steps``, after which it ends. The answers are {"pid": PID}
and {"code": EXIT, "died_at": time.monotonic()}; with ``tell``, {"attached": SESSION} and what it did come between.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import select
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

from stagecache.device import CpuDevice
from stagecache.errors import StageCacheError
from tests.crash.load import Load
from tests.crash.workload import Workload

_LIBC = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG = 1

PLACES: dict[str, tuple[str, str, bool]] = {
    "handshake done, lock not taken": ("stagecache.session", "handshake", True),
    "about to attach": ("stagecache.rpc", "Rpc.attach", False),
    "attached, nothing mapped": ("stagecache.rpc", "Rpc.attach", True),
    "about to open a key": ("stagecache.rpc", "Rpc.open_key", False),
    "key opened, not mapped": ("stagecache.rpc", "Rpc.open_key", True),
    "hits have extents, not logged": ("stagecache.hits", "HitReader.records", False),
    "page claimed, nothing copied": ("stagecache.pages", "StepPages.try_claim", True),
    "page half copied": ("tests.crash.killworker", "HalfCopies.half", False),
    "record made, not in the ring": ("stagecache.log", "encode", True),
    "record in the ring, without its sequence": ("stagecache.log", "fence", False),
    "record published, doorbell not rung": ("tests.crash.killworker", "Bell.release", False),
    "record published": ("stagecache.log", "LogWriter.append", True),
    "hit waited for, tail not copied": ("stagecache.hits", "HitReader.read", True),
    "extent leased": ("stagecache.arena", "Arena.lease", True),
    "deferred rows logged": ("stagecache.pages", "FlushLog.logged", True),
    "epoch raised": ("stagecache.epochs", "Epochs.reset", True),
    "about to detach": ("stagecache.rpc", "Rpc.detach", False),
    "detached, lock held": ("stagecache.rpc", "Rpc.detach", True),
}
"""Where a worker may die: module, name in it, and whether after the call rather than before it."""


class HalfCopies(CpuDevice):
    """Stages rows in two halves."""

    def half(self) -> None:
        """Between the two."""

    def stage(self, page: torch.Tensor, rows: torch.Tensor) -> None:
        middle = (len(rows) + 1) // 2
        page[:middle].copy_(rows[:middle])
        self.half()
        page.copy_(rows)


class Bell:
    """A doorbell whose ringing can be cut off: the methods of a C type cannot."""

    def __init__(self, bell: Any) -> None:
        self._bell = bell

    def release(self) -> None:
        self._bell.release()


def die_at(place: str, visit: int) -> None:
    """Arrange that this process dies at the ``visit``-th time that it comes to ``place``."""
    module_name, path, after = PLACES[place]
    owner: Any = importlib.import_module(module_name)
    *parts, name = path.split(".")
    for part in parts:
        owner = getattr(owner, part)
    original = getattr(owner, name)
    left = [visit]

    def reached() -> None:
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def call(*arguments: Any, **named: Any) -> Any:
        if not after:
            reached()
        result = original(*arguments, **named)
        if after:
            reached()
        return result

    setattr(owner, name, call)


def become_worker(item: dict[str, Any]) -> None:
    """Runs in the fork, and ends it: a load of ``steps``, or without end."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    status = 1
    try:
        if "place" in item:
            die_at(item["place"], item["visit"])
        steps = Workload(item["seed"], salt=item.get("salt", 0))
        load = Load(Path(item["socket"]), item["seed"], workload=steps, device=HalfCopies())
        if item.get("tell"):
            tell({"attached": load.cache.session.session_id})
        log = load.cache.session.log
        log._daemon_doorbell = Bell(log._daemon_doorbell)
        while load.steps != item.get("steps"):
            load.run_step()
        load.finish()
        if item.get("tell"):
            tell({"rows": load.checked_rows, "hit_rows": load.cache.counters.hit_rows})
        load.close()
        status = 0
    except (StageCacheError, AssertionError) as error:
        os.write(2, f"{type(error).__name__}: {error}\n".encode())
    finally:
        os._exit(status)


def live(item: dict[str, Any]) -> None:
    """The life of one worker."""
    pid = os.fork()
    if pid == 0:
        become_worker(item)
    tell({"pid": pid})
    pidfd = os.pidfd_open(pid)
    try:
        if not select.select([pidfd], [], [], item.get("after_s", 60.0))[0]:
            os.kill(pid, signal.SIGKILL)
    finally:
        os.close(pidfd)
    _, status = os.waitpid(pid, 0)
    tell({"code": os.waitstatus_to_exitcode(status), "died_at": time.monotonic()})


def tell(answer: dict[str, Any]) -> None:
    os.write(1, json.dumps(answer).encode() + b"\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.modules["tests.crash.killworker"] = sys.modules["__main__"]
    tell({"ready": True})
    for line in sys.stdin:
        live(json.loads(line))
