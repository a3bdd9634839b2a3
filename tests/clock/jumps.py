"""What runs under ``shifted.c``, in a process of its own: ``python -m tests.clock.jumps WHAT ARGUMENTS``.

wait NAME            a wait of 0.3 s on a semaphore, while the clock is set back by an hour; plain: posix_ipc's own
plain NAME
load SOCKET SECONDS  random steps of a worker, every row checked, while the clock jumps to and fro
outage SOCKET PID    a hit is waited for, the daemon is killed and the clock is set back
"""

from __future__ import annotations

import json
import mmap
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

import posix_ipc

from stagecache_wire import shm

HOUR_S = 3600


class Clock:
    """The wall clock of every process that has this shift file."""

    def __init__(self) -> None:
        self.fd = os.open(os.environ["SHIFT_FILE"], os.O_RDWR)
        self.shift = memoryview(mmap.mmap(self.fd, 8)).cast("q")

    def jump(self, seconds: int) -> None:
        before = time.time()
        self.shift[0] += seconds
        assert abs(time.time() - before - seconds) < 60, "this process does not run under the shifted clock"


def wait(name: str, plain: bool) -> dict[str, float]:
    clock = Clock()
    bell = posix_ipc.Semaphore(f"/{name}") if plain else shm.open_semaphore(name)
    threading.Timer(0.1, clock.jump, (-HOUR_S,)).start()
    rescue = threading.Timer(3.0, bell.release)  # what no clock ends
    rescue.start()
    begun = time.monotonic()
    try:
        bell.acquire(0.3)
        busy = False
    except posix_ipc.BusyError:
        busy = True
    rescue.cancel()
    return {"took_s": time.monotonic() - begun, "busy": busy}


def load(socket: str, seconds: str) -> dict[str, float]:
    from tests.crash.load import Load

    clock, chance = Clock(), random.Random(3)
    done = threading.Event()

    def jump() -> None:
        while not done.wait(0.03):
            clock.jump(chance.choice((-HOUR_S, HOUR_S, -86400, 86400, -1, 1)))

    jumper = threading.Thread(target=jump)
    worker = Load(Path(socket), 11, daemon_grace_s=2.0, stage="jumps")
    jumper.start()
    slowest, until = 0.0, time.monotonic() + float(seconds)
    while time.monotonic() < until:
        begun = time.monotonic()
        worker.run_step()
        slowest = max(slowest, time.monotonic() - begun)
    worker.finish()
    done.set()
    jumper.join()
    worker.close()
    return {"steps": worker.steps, "rows": worker.checked_rows, "slowest_s": slowest}


def outage(socket: str, pid: str) -> dict[str, object]:
    import torch

    from stagecache import StageCache
    from stagecache.errors import DaemonLostError
    from stagecache.step import NewRequest, SchedulerStep
    from tests.integration.test_session_ends import prefill
    from tests.integration.test_worked_example import GEOMETRY, OneRequest

    clock, view = Clock(), OneRequest()
    cache = StageCache.attach(
        socket=socket, model="m", stage="outage", geometry=GEOMETRY, view=view, daemon_grace_s=0.5
    )
    cache.discard_step(prefill(cache, view, "a", 0, [0]))
    cache.session.wait_consumed(cache.session.log.head, 10.0, "the log")
    os.kill(int(pid), signal.SIGSTOP)
    cache.new_step_starts(SchedulerStep({"b": 4}, [NewRequest("b", 4, [0, 1])]))
    view.set("b", 4, [0, 1])
    step = cache.save_outputs(torch.zeros(4, 2), {}, num_tokens_unpadded=4, num_tokens_padded=4)
    os.kill(int(pid), signal.SIGKILL)
    jumper = threading.Timer(0.1, clock.jump, (-HOUR_S,))
    jumper.start()
    begun = time.monotonic()
    try:
        cache.materialize(step, ["b"])
        error = ""
    except DaemonLostError as lost:
        error = str(lost)
    took_s = time.monotonic() - begun
    jumper.join()
    os._exit(print(json.dumps({"took_s": took_s, "error": error}), flush=True) or 0)


def main(what: str, *arguments: str) -> None:
    if what in ("wait", "plain"):
        print(json.dumps(wait(arguments[0], what == "plain")))
    else:
        print(json.dumps({"load": load, "outage": outage}[what](*arguments)))


if __name__ == "__main__":
    main(*sys.argv[1:])
