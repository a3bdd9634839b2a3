"""Dead means: the pidfd says so, else the lock is free. No clock, no lost connection."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from stagecached.liveness import Liveness

LOCK = Path("/no/such/lock")


class World:
    """Which locks are held, and who was reported dead."""

    def __init__(self) -> None:
        self.held = True
        self.dead: list[tuple[str, str]] = []
        self.told = asyncio.Event()

    def liveness(self, poll_s: float = 0.001) -> Liveness:
        return Liveness(self._died, poll_s=poll_s, is_held=lambda _: self.held)

    def _died(self, session_id: str, why: str) -> None:
        self.dead.append((session_id, why))
        self.told.set()

    async def until_told(self) -> None:
        await asyncio.wait_for(self.told.wait(), 5.0)


def test_free_lock_of_a_worker_that_held_it_says_dead() -> None:
    world = World()

    async def main() -> None:
        liveness = world.liveness()
        liveness.watch("s", LOCK, None)
        assert liveness.holds_lock("s")
        liveness.look("s")
        assert world.dead == []
        world.held = False
        poll = asyncio.create_task(liveness.poll())
        await world.until_told()
        poll.cancel()

    asyncio.run(main())
    assert world.dead == [("s", "its lock is free")]


def test_worker_that_has_not_yet_taken_its_lock_is_not_dead() -> None:
    world = World()
    world.held = False

    async def main() -> None:
        liveness = world.liveness()
        liveness.watch("s", LOCK, None)
        assert not liveness.holds_lock("s")
        liveness.look("s")

    asyncio.run(main())
    assert world.dead == []


def test_exit_of_the_process_says_dead_at_once() -> None:
    world = World()
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)

    async def main() -> None:
        liveness = world.liveness(poll_s=1000.0)
        liveness.watch("s", LOCK, os.pidfd_open(process.pid))
        process.kill()
        await world.until_told()
        liveness.look("s")  # it is watched no more

    asyncio.run(main())
    process.communicate()
    assert world.dead == [("s", "its process ended")]


def test_new_pidfd_replaces_the_earlier_one_and_none_is_left_open() -> None:
    world = World()

    async def main() -> None:
        liveness = world.liveness()
        first, second = os.pidfd_open(os.getpid()), os.pidfd_open(os.getpid())
        liveness.watch("s", LOCK, first)
        liveness.watch("s", LOCK, second)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(first)
        liveness.forget("s")
        liveness.forget("s")
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(second)

    asyncio.run(main())
    assert world.dead == []


def test_look_at_a_stranger_does_nothing() -> None:
    world = World()
    world.liveness().look("nobody")
    assert world.dead == []
