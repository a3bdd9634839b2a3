"""Whether the daemon gets on with its work: health says no where it does not, and past a limit the process ends.

    consumers    looked at on the event loop: a log with records whose ``consumed`` does not move
    event loop   asked from a thread, on the path that every caller takes: ``grpc.health.v1`` over its own socket

A stuck consumer turns health to NOT_SERVING after ``STALL_S``; a stuck loop answers nobody, which callers take for the
same. After ``limit_s`` the process ends with ``EXIT_STUCK``: its locks go with it, a supervisor starts the next daemon,
and that adopts every session. Nothing is drained, since what is stuck cannot be.

Time counts only while this process runs: one that was stopped and continued is not stuck, nor is a paused machine.
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NoReturn

import grpc
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc

from stagecached.session import Session, State

STALL_S: Final = 5.0
"""Time without progress after which health says NOT_SERVING; less where ``limit_s`` is."""
LOOK_S: Final = 1.0
EXIT_STUCK: Final = 4
_UNANSWERED: Final = frozenset({grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE})

log = structlog.get_logger()


class Stalls:
    """For how long each of some things has not moved.

    A look counts for ``2 * look_s`` at most: of a longer pause between two looks nobody knows whether this process ran.
    """

    def __init__(self, look_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._most_s = 2 * look_s
        self._clock = clock
        self._looked_at = clock()
        self._seen: dict[str, tuple[object, float]] = {}

    def look(self, marks: Mapping[str, object]) -> dict[str, float]:
        """marks: by name, what changes as the thing gets on, of all that have work. Returns seconds without change."""
        now = self._clock()
        step_s = min(now - self._looked_at, self._most_s)
        self._looked_at = now
        seen = {}
        for name, mark in marks.items():
            before = self._seen.get(name)
            seen[name] = (mark, before[1] + step_s if before is not None and before[0] == mark else 0.0)
        self._seen = seen
        return {name: stalled_s for name, (_, stalled_s) in seen.items()}


def end_process(why: str) -> NoReturn:
    """End at once, every thread's stack in the log: locks go with the process, and the next daemon adopts."""
    log.error("ending: the daemon is stuck", why=why, status=EXIT_STUCK)
    sys.stdout.flush()
    faulthandler.dump_traceback(all_threads=True)
    os._exit(EXIT_STUCK)


class Watchdog:
    """Made, started and stopped on the event loop.

    Args:
        socket: the daemon's own.
        sessions: all sessions of now.
        on_change: called on the loop with why the daemon does not serve, or with nothing once it does again.
        limit_s: time without progress after which the process ends; 0: never.
        end: what ends it; called with why, on the loop or on the probe's thread.
        note_stuck: called before the end with a session and the sequence of the record that its consumer is stuck in.
    """

    def __init__(
        self,
        socket: Path,
        sessions: Callable[[], Sequence[Session]],
        on_change: Callable[[str], None],
        *,
        limit_s: float,
        end: Callable[[str], None] = end_process,
        note_stuck: Callable[[str, int], None] = lambda session_id, sequence: None,
    ) -> None:
        self._socket = socket
        self._sessions = sessions
        self._on_change = on_change
        self._limit_s = limit_s
        self._stall_s = min(STALL_S, limit_s / 2) if limit_s else STALL_S
        self._look_s = min(LOOK_S, self._stall_s / 4)
        self._end = end
        self._note_stuck = note_stuck
        self._why = ""
        self._stopped = threading.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._watch_consumers())
        threading.Thread(target=self._watch_loop, name="watchdog", daemon=True).start()

    def stop(self) -> None:
        """No verdict from here on: a daemon that drains may take its time."""
        self._stopped.set()
        if self._task is not None:
            self._task.cancel()

    # ---------------------------------------------------------------- consumers

    async def _watch_consumers(self) -> None:
        stalls = Stalls(self._look_s)
        while True:
            await asyncio.sleep(self._look_s)
            try:
                self._judge(stalls.look(_backlogs(self._sessions())))
            except Exception:
                log.exception("consumers could not be looked at")

    def _judge(self, stalled: Mapping[str, float]) -> None:
        stuck = {session_id: for_s for session_id, for_s in stalled.items() if for_s >= self._stall_s}
        why = ""
        if stuck:
            worst = max(stuck, key=lambda session_id: stuck[session_id])
            why = f"the consumer of session {worst} has not moved for {stuck[worst]:.1f} s"
            if self._limit_s and stuck[worst] >= self._limit_s:
                self._note_all(stuck)
                self._end(why)
        if bool(why) != bool(self._why):
            if why:
                log.error("not serving", why=why, sessions=sorted(stuck))
            else:
                log.warning("serving again")
            self._on_change(why)
        self._why = why

    def _note_all(self, stuck: Mapping[str, float]) -> None:
        for session in self._sessions():
            if session.session_id in stuck and session.state is not State.ENDED:
                try:
                    self._note_stuck(session.session_id, session.segments.consumed + 1)
                except OSError as error:  # The next daemon does not know then; this one ends all the same.
                    log.error("a stuck record cannot be noted", session=session.session_id, error=str(error))

    # --------------------------------------------------------------- event loop

    def _watch_loop(self) -> None:
        """On a thread: one health call a look."""
        # The authority of a Unix socket would be its path, percent-encoded, which servers refuse.
        options = [("grpc.default_authority", "localhost"), ("grpc.use_local_subchannel_pool", 1)]
        stalls = Stalls(self._look_s)
        answers, told = 0, False
        with grpc.insecure_channel(f"unix:{self._socket}", options=options) as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            while not self._stopped.wait(self._look_s):
                answers += self._answered(stub)
                stalled_s = stalls.look({"loop": answers})["loop"]
                if self._stopped.is_set():
                    return
                why = f"the event loop has answered no health call for {stalled_s:.1f} s"
                if stalled_s >= self._stall_s and not told:
                    log.error("not serving", why=why)
                told = stalled_s >= self._stall_s
                if self._limit_s and stalled_s >= self._limit_s:
                    self._end(why)

    def _answered(self, stub: Any) -> bool:
        """Whether the daemon's own health call came back; any answer counts, also a refusal."""
        try:
            stub.Check(health_pb2.HealthCheckRequest(), timeout=self._look_s, wait_for_ready=True)
        except grpc.RpcError as failure:
            state: Any = failure  # one object that is error and call; the type stubs know only the error
            return state.code() not in _UNANSWERED
        return True


def _backlogs(sessions: Sequence[Session]) -> dict[str, int]:
    """``consumed`` of every live session that has records to do."""
    return {
        session.session_id: session.segments.consumed
        for session in sessions
        if session.state is State.LIVE and session.segments.head > session.segments.consumed
    }
