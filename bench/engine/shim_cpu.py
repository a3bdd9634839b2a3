"""Which of the engine process' CPU is the shim's: measured in place, so that no comparison of runs is needed.

On the engine's thread the shim runs in two places: around a step (``RunnerShim.run_step``) and around the scheduler's
``schedule``. There the process' CPU clock is read at the beginning and the end, and the engine's own part in between,
and the consumers', are taken off. That counts also what other threads of the process burn meanwhile. The shim's own
threads (the connections to the daemon, Python's and gRPC's) are read from the kernel, in ns.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

#: Threads of gRPC's core, by the name that the kernel has; vLLM's CPU engine starts none of them.
_GRPC_THREADS = ("event_engine", "lifeguard", "grpc", "resolver", "timer")


class OwnCpu:
    """CPU seconds of this process inside the ``outer`` functions that were not inside ``inner`` ones.

    The engine's thread alone calls them.
    """

    def __init__(self) -> None:
        self.cpu_s = 0.0
        self._inner_s = 0.0

    def outer(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            begun, before = time.process_time(), self._inner_s
            try:
                return function(*args, **kwargs)
            finally:
                self.cpu_s += time.process_time() - begun - (self._inner_s - before)

        return timed

    def inner(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            begun = time.process_time()
            try:
                return function(*args, **kwargs)
            finally:
                self._inner_s += time.process_time() - begun

        return timed


def meter_engine_thread(own: OwnCpu) -> None:
    """Put the clocks around the shim's two places. Before the engine is made; only where the shim is loaded."""
    from vllm.v1.core.sched import scheduler

    from stagecache.shim.plugin import register
    from stagecache.shim.vllm import RunnerShim

    register()  # The engine does so too, later; the clocks belong outside of what the shim wraps then.
    run_step = own.outer(RunnerShim.run_step)

    def metered_step(self: RunnerShim, forward: Callable[[], Any], scheduler_output: Any) -> Any:
        return run_step(self, own.inner(forward), scheduler_output)

    RunnerShim.run_step = metered_step  # type: ignore[method-assign]
    # The shim wraps the instance when it is made: what it finds there is the engine's own part.
    init = scheduler.Scheduler.__init__
    scheduler.Scheduler.schedule = own.inner(scheduler.Scheduler.schedule)

    @functools.wraps(init)
    def metered(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self.schedule = own.outer(self.schedule)

    scheduler.Scheduler.__init__ = metered


def shim_threads_s() -> float:
    """CPU seconds so far of the process' threads that the shim started: Python's but the main one, and gRPC's."""
    python = {thread.native_id for thread in threading.enumerate()} - {threading.main_thread().native_id}
    total = 0
    for task in Path("/proc/self/task").iterdir():
        try:
            name = (task / "comm").read_text().strip()
            if int(task.name) in python or name.startswith(_GRPC_THREADS):
                total += int((task / "schedstat").read_text().split()[0])
        except FileNotFoundError:
            continue  # It ended since the folder was listed.
    return total / 1e9
