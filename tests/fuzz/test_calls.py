"""Mutated gRPC calls, handshakes and HTTP requests against a real daemon: each answered with a reason, nothing grows.

Counts of the long forms: STAGECACHE_FUZZ_CALLS (100,000), STAGECACHE_FUZZ_SEED.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from stagecache.errors import CallRefusedError, DaemonUnavailableError, StageCacheError
from stagecache.rpc import handshake
from stagecached import auth
from stagecached.peer import ANSWER_TIMEOUT_S, MAX_CONNECTIONS
from tests.daemon_process import DAEMON, DaemonProcess, poll_until
from tests.fuzz import call_fuzz
from tests.fuzz.beside import Beside
from tests.fuzz.sockets import crowd, exchange, http_bytes, peer_line
from tests.soak.samples import Samples, process_figures, told

CALLS = int(os.environ.get("STAGECACHE_FUZZ_CALLS", "100000"))
SEED = int(os.environ.get("STAGECACHE_FUZZ_SEED", "1"))
SHORT = 2000
MIB = 1 << 20
SETTINGS = ("--memory-budget", "256MiB", "--max-sessions", "12", "--shared-bytes", "8MiB")
QUIET = {"anonymous": 8 * MIB, "descriptors": 4, "threads": 8, "mappings": 0}
"""How much a daemon may grow over a long run, once it is warm, where no session comes or goes; bytes and counts."""
GROWTH = {"anonymous": 8 * MIB, "descriptors": 40, "threads": 8, "mappings": 60}
"""Where up to 12 sessions come and go: each leaves far more in 100,000 calls if it leaves one of anything."""


@pytest.fixture(scope="module")
def one_daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    """Small: what a mutated call is granted costs little."""
    process = DaemonProcess(tmp_path_factory.mktemp("fuzz"), *SETTINGS)
    process.start()
    yield process
    process.close()


@pytest.fixture
def daemon(one_daemon: DaemonProcess) -> Iterator[DaemonProcess]:
    """One for all: what a test does to it must not show in the next. It never meets an unexpected error."""
    yield one_daemon
    assert "Traceback" not in one_daemon.log, one_daemon.log[one_daemon.log.find("Traceback") :][:3000]


def judge(result: call_fuzz.Result) -> None:
    assert call_fuzz.REACHABLE - set(result.refused) == set(), "a check that never says no is not tested"
    assert set(result.answered) == set(auth.ALLOWED), "good calls are still answered, of each method"
    assert result.slowest_s < call_fuzz.CALL_S / 2


def test_mutated_calls_are_answered_or_refused_with_a_reason(daemon: DaemonProcess) -> None:
    judge(call_fuzz.run(daemon, SEED, SHORT))


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_a_hundred_thousand_mutated_calls(daemon: DaemonProcess, capsys: pytest.CaptureFixture[str]) -> None:
    samples = Samples()
    result = call_fuzz.run(daemon, SEED, CALLS, looked=lambda: samples.note("daemon", process_figures(daemon.pid)))
    trends = samples.trends("daemon")
    with capsys.disabled():
        print(f"\n{result.told()}\n" + "; ".join(told(name, found) for name, found in sorted(trends.items())))
    judge(result)
    assert {name: trends[name] for name in GROWTH if trends[name].growth > GROWTH[name]} == {}


def test_the_fuzz_notices_a_check_that_is_taken_out(tmp_path: Path) -> None:
    """The control: a daemon that takes schemas as they come meets unexpected errors, or never says BAD_GEOMETRY."""

    daemon = DaemonProcess(tmp_path, *SETTINGS, program=(sys.executable, "-m", "tests.fuzz.careless"))
    daemon.start()
    try:
        with pytest.raises(AssertionError):
            judge(call_fuzz.run(daemon, SEED, 3 * SHORT))
    finally:
        daemon.kill()
        daemon.program = DAEMON
        daemon.start()
        daemon.close()


# ---- the raw sockets


def try_lines(daemon: DaemonProcess, seed: int, count: int) -> Counter[str]:
    """Mutated handshakes; how often each answer came."""
    rng, answers = Random(seed), Counter[str]()
    worker = handshake(daemon.socket, "worker")
    for _ in range(count):
        line = peer_line(rng, worker.token, worker.session_id)
        answer = exchange(daemon.paths.peer_socket, line, rng)
        found = json.loads(answer) if answer else {"reason": "none"}
        answers[found.get("reason", "granted")] += 1
        assert found.get("reason") != "INTERNAL", line
    return answers


def try_requests(daemon: DaemonProcess, seed: int, count: int) -> Counter[str]:
    """Mutated HTTP requests; how often each status came."""
    rng, answers = Random(seed), Counter[str]()
    for _ in range(count):
        request = http_bytes(rng)
        status = exchange(daemon.paths.http_socket, request, rng)[9:12].decode()
        answers[status] += 1
        assert not status.startswith("5") or status == "505", request
    return answers


def test_mutated_handshakes_and_requests_are_answered(daemon: DaemonProcess) -> None:
    with Beside(daemon.socket) as beside:
        beside.look()
        answers = try_lines(daemon, SEED, 600)
        assert {"ABI_MISMATCH", "UNAUTHENTICATED", "UNSPECIFIED", "granted"} <= set(answers)
        statuses = try_requests(daemon, SEED, 600)
        assert {"200", "400", "404", "405", "431", "505"} <= set(statuses)
        beside.look()
        beside.end()


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_many_mutated_handshakes_and_requests(daemon: DaemonProcess, capsys: pytest.CaptureFixture[str]) -> None:
    with Beside(daemon.socket) as beside:
        try_lines(daemon, SEED, CALLS // 20)
        try_requests(daemon, SEED, CALLS // 20)
        beside.look()
        warm = process_figures(daemon.pid)
        answers = try_lines(daemon, SEED + 1, CALLS // 2)
        statuses = try_requests(daemon, SEED + 1, CALLS // 2)
        beside.look()
        beside.end()
        after = process_figures(daemon.pid)
    grown = {name: after[name] - warm[name] for name in QUIET}
    with capsys.disabled():
        print(f"\nhandshakes {dict(answers)}\nHTTP {dict(statuses)}\nthe daemon grew by {grown}")
    assert {name: size for name, size in grown.items() if size > QUIET[name]} == {}


@pytest.mark.parametrize("socket", [pytest.param("peer", marks=pytest.mark.soak), "http", "grpc"])
def test_a_crowd_that_says_nothing_is_borne(daemon: DaemonProcess, socket: str) -> None:
    """Slow-loris: more connections than are served at once, each with a first byte and no more. Calls go on, no session
    is touched, and who comes after them is served: at once, or when their time is over.
    """
    paths = daemon.paths
    path = {"peer": paths.peer_socket, "http": paths.http_socket, "grpc": paths.socket}[socket]
    before = process_figures(daemon.pid)["descriptors"]
    with Beside(daemon.socket) as beside:
        attached = process_figures(daemon.pid)["descriptors"]
        slow = crowd(path, 3 * MAX_CONNECTIONS, lambda index: b"{" if index % 2 else b"PRI * HTTP/2.0\r\n")
        for _ in range(10):
            beside.load.run_step()
        found = poll_until(lambda: served(daemon), "somebody to be served", ANSWER_TIMEOUT_S + 5.0)
        assert found == "observer"
        beside.look()
        for connection in slow:
            connection.close()
        poll_until(
            lambda: process_figures(daemon.pid)["descriptors"] <= attached + 2, "the descriptors to be back", 15.0
        )
        beside.end()
    poll_until(lambda: process_figures(daemon.pid)["descriptors"] <= before + 2, "those of the session too", 15.0)


def served(daemon: DaemonProcess) -> str:
    try:
        return handshake(daemon.socket, "observer", timeout_s=1.0).role
    except (DaemonUnavailableError, CallRefusedError):
        return ""
    except StageCacheError as error:
        return "" if error.reason == "TOO_MANY" else f"{error}"
