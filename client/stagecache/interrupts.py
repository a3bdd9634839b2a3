"""What Ctrl-C must not cut in two: calls that take Python's own locks, and waits.

A KeyboardInterrupt may be raised on the main thread behind any call, also inside ``threading.Condition.__enter__``,
where the lock is taken and the ``with`` block has not begun: then nobody gives it back. So a condition is nothing that
the main thread may enter, neither one of ours nor gRPC's, which has one a channel. A lock itself is: between its
``__enter__`` and the block no interrupt is raised.
"""

from __future__ import annotations

import _thread
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TypeVar

Answer = TypeVar("Answer")


def uninterrupted(call: Callable[[], Answer]) -> Answer:
    """``call()``; from the main thread on a thread of its own, which no interrupt reaches. One that comes meanwhile
    ends the wait alone: the call goes on, and its answer is nobody's.
    """
    if threading.get_ident() != threading.main_thread().ident:
        return call()
    answers: list[Answer] = []
    errors: list[BaseException] = []
    done = threading.Lock()

    def run() -> None:
        try:
            answers.append(call())
        except BaseException as error:
            errors.append(error)
        finally:
            done.release()

    done.acquire()
    _thread.start_new_thread(run, ())  # threading.Thread.start enters a condition.
    done.acquire()
    if errors:
        raise errors.pop()
    return answers.pop()


class Wakeups:
    """What ``threading.Condition`` is for, without a lock that somebody holds: threads sleep until another one wakes
    all that sleep. A sleeper is made before its thread looks whether there is anything to wait for, so that none
    oversleeps.
    """

    __slots__ = ("sleepers",)

    def __init__(self) -> None:
        self.sleepers: deque[threading.Lock] = deque()
        """Where there is none, a ``wake`` would do nothing."""

    def sleeper(self) -> Callable[[float], bool]:
        """``sleeper()(timeout_s)`` sleeps until the next ``wake`` after this call: whether there was one in time."""
        bed = threading.Lock()
        bed.acquire()
        self.sleepers.append(bed)
        return partial(self._sleep, bed)

    def wake(self) -> None:
        """Any thread. A sleeper that is not there any more is none the worse."""
        while self.sleepers:
            with suppress(IndexError):
                self.sleepers.popleft().release()

    def _sleep(self, bed: threading.Lock, timeout_s: float) -> bool:
        if bed.acquire(timeout=timeout_s):
            return True
        with suppress(ValueError, IndexError):  # Woken just now; or others come and go: the next wake takes it out.
            self.sleepers.remove(bed)
        return False


class Latch:
    """``threading.Event``, of what happens once."""

    __slots__ = ("_set", "_wakeups")

    def __init__(self) -> None:
        self._set = False
        self._wakeups = Wakeups()

    def set(self) -> None:
        """It has happened."""
        self._set = True
        self._wakeups.wake()

    def is_set(self) -> bool:
        """Whether it has happened."""
        return self._set

    def wait(self, timeout_s: float) -> bool:
        """Wait until it has happened, for ``timeout_s`` seconds at most; whether it has."""
        if self.is_set():
            return True
        sleep = self._wakeups.sleeper()
        return self.is_set() or sleep(timeout_s) or self.is_set()
