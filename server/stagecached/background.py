"""Work beside the event loop: threads for what blocks, tasks whose failure is not lost."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

import structlog

from stagecached.budget import mib
from stagecached.refusal import Refusal

THREADS: Final = 32
SLOW_S: Final = 0.5
"""Prefaulting that takes longer is worth a line at level info."""

Result = TypeVar("Result")

log = structlog.get_logger()


class Background:
    """Threads for allocating, prefaulting and unmapping. Used from the event loop."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="memory")

    async def in_thread(self, work: Callable[[], Result]) -> Result:
        """Run blocking work in a thread. It is not cancelled with its caller."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    @staticmethod
    def keep(work: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
        """A task that goes on where its caller goes away; its failure is then in the log."""
        task = asyncio.get_running_loop().create_task(work)
        task.add_done_callback(_note_failure)
        return task


def call_soon(loop: asyncio.AbstractEventLoop, call: Callable[..., None], *arguments: object) -> None:
    """Call on the loop from another thread; a loop that is closed no longer needs it."""
    try:
        loop.call_soon_threadsafe(call, *arguments)
    except RuntimeError:
        log.debug("event loop is gone")


def progress_of(what: str) -> Callable[[str, int, int], None]:
    """Logs how far prefaulting is: part, bytes done and bytes in all."""
    started = time.monotonic()

    def tell(part: str, done: int, total: int) -> None:
        elapsed_s = time.monotonic() - started
        write = log.info if elapsed_s > SLOW_S else log.debug
        write("prefault", of=what, part=part, done_mib=mib(done), total_mib=mib(total), elapsed_s=round(elapsed_s, 2))

    return tell


def _note_failure(task: asyncio.Task[Any]) -> None:
    error = None if task.cancelled() else task.exception()
    if error is not None and not isinstance(error, Refusal):
        log.error("background work failed", exc_info=error)
