"""Several engines at one daemon at once, each a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from stagecache.bench.measure import process_cpu_ns
from stagecache.errors import StageCacheError


@dataclass(frozen=True)
class SessionsResult:
    """Nanoseconds of every step of every session, and the daemon's CPU meanwhile."""

    sessions: int
    totals: list[int]
    daemon_cpu: int


def measure_sessions(
    socket: Path, daemon_pid: int, sessions: int, *, requests: int, hidden: int, forward_ms: float, seconds: float
) -> SessionsResult:
    """Run ``sessions`` workers for ``seconds``, started together."""
    command = [sys.executable, "-m", "stagecache.bench.session_worker", str(socket), str(requests), str(hidden)]
    command += [str(forward_ms), str(seconds)]
    workers = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(sessions)
    ]
    try:
        for worker in workers:
            assert worker.stdout is not None
            if worker.stdout.readline() != "ready\n":
                raise StageCacheError("a session of the bench did not attach; its error is above")
        daemon = process_cpu_ns(daemon_pid)
        for worker in workers:
            assert worker.stdin is not None
            worker.stdin.write("go\n")
            worker.stdin.flush()
        answers = [worker.communicate(timeout=seconds + 120)[0] for worker in workers]
        spent = process_cpu_ns(daemon_pid) - daemon
    finally:
        for worker in workers:
            if worker.poll() is None:
                worker.kill()
            worker.wait()
    return SessionsResult(sessions, [total for answer in answers for total in json.loads(answer)], spent)
