"""The status page in a real browser, `stagecache top`, and the small HTTP server that carries both."""

from __future__ import annotations

import http.client
import json
import os
import socket as sockets
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from stagecache.errors import StageCacheError
from stagecache.step import NewRequest, SchedulerStep
from tests.daemon_process import DaemonProcess
from tests.integration.chromium import Chromium
from tests.integration.helpers import run_daemon
from tests.integration.metrics_kit import MiniEngine, get, get_unix, metrics_daemon, url_of
from tests.integration.programs import need
from tests.integration.sharing_worker import SharingWorker, lookup

SHARED = ("--shared-bytes", "64KiB")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    with metrics_daemon(tmp_path_factory.mktemp("served"), *SHARED) as daemon:
        yield daemon


class Load:
    """Two stages at work on a thread."""

    def __init__(self, daemon: DaemonProcess) -> None:
        self.engines = [MiniEngine(daemon.socket, stage) for stage in ("thinker", "talker")]
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._done.wait(0.02):
            for engine in self.engines:
                engine.turn()

    def fail_a_hit(self) -> None:
        """One request hits blocks of an older epoch."""
        self.pause()
        engine = self.engines[0]
        engine.cache.reset("test")
        with pytest.raises(StageCacheError):
            engine.step(SchedulerStep({"x": 4}, [NewRequest("x", 16, [0, 1])]), ["x"])

    def pause(self) -> None:
        self._done.set()
        self._thread.join()

    def close(self) -> None:
        self.pause()
        for engine in self.engines:
            engine.close()


def share_blocks(daemon: DaemonProcess) -> None:
    """A namespace ``kept`` with two blocks, of three that are asked for; its session is over."""
    sharing = SharingWorker(daemon.socket, stage="kept")
    assert sharing.join().on
    sharing.share(1, 2)
    lookup(sharing.rpc, 1, 2, 3)
    sharing.close()


# ---------------------------------------------------------------- the page

INKED = """(id) => {
    const canvas = document.getElementById(id), seen = new Set();
    const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
    for (let i = 0; i < pixels.length; i += 4)
        if (pixels[i + 3]) seen.add(pixels[i] << 16 | pixels[i + 1] << 8 | pixels[i + 2]);
    return seen.size;
}"""
"""How many colours a canvas shows."""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_page_shows_a_daemon_at_work_in_both_themes_and_says_when_it_is_gone(tmp_path: Path) -> None:
    need("chromium", package="chromium")
    with metrics_daemon(tmp_path, *SHARED) as daemon:
        share_blocks(daemon)
        load = Load(daemon)
        try:
            with Chromium(tmp_path / "profile") as page:
                page.dark(False)
                page.open(url_of(daemon))
                page.wait("document.body?.dataset.ready === 'yes'")
                page.wait("document.querySelectorAll('#sessions tbody tr').length === 2")
                page.wait("parseInt(document.querySelector('#tile-hits [data-v]').textContent) > 0")
                page.wait("document.querySelectorAll('#waterfall tbody tr').length > 3")
                assert "working" in page.run("document.querySelector('#sessions tbody').innerText")
                shared = page.run("document.querySelector('#shared:not([hidden]) tbody').innerText").split()
                assert shared[0] == "kept"
                assert "67%" in " ".join(shared).replace(" %", "%"), shared
                steps = "document.querySelector('#tile-steps [data-s]').textContent"
                before = page.run(steps)
                page.wait(f"{steps} !== {json.dumps(before)}")  # live: by itself, without a reload

                for drawing, colours in (("chart-ratio", 4), ("chart-tokens", 4), ("pool", 3), ("strip", 1)):
                    page.wait(f"({INKED})('{drawing}') >= {colours}")

                page.run("document.querySelectorAll('#sessions tbody tr')[1].click()")
                page.wait("document.querySelector('#pool-of').textContent === 'of thinker #0'")
                assert page.run("[...document.querySelectorAll('#pool-key option')].map(o => o.text)") == [
                    "__hidden_states__",
                    "codes.audio",
                ]
                page.run("document.querySelectorAll('#scope button')[1].click()")
                page.wait("document.querySelectorAll('#scope button')[1].getAttribute('aria-pressed') === 'true'")

                assert page.run("document.querySelector('#no-errors').hidden") is False
                load.fail_a_hit()
                page.wait("document.querySelector('#errors')?.innerText.includes('What to do') || "
                          "document.querySelectorAll('#errors li .cure').length > 0")  # fmt: skip
                assert "unreadable" in page.run("document.querySelector('#errors').innerText")
                assert "stagecache reset" in page.run("document.querySelector('#errors .cure code').innerText")

                shade = "getComputedStyle(document.body).backgroundColor"
                light = page.run(shade)
                page.screenshot(tmp_path / "light.png")
                page.dark(True)
                page.wait(f"{shade} !== {json.dumps(light)}")
                dark = page.run(shade)
                page.screenshot(tmp_path / "dark.png")
                page.run("document.getElementById('theme').click()")  # auto, then light
                page.wait(f"{shade} === {json.dumps(light)}")
                page.run("document.getElementById('theme').click()")
                page.wait(f"{shade} === {json.dumps(dark)}")
                assert (tmp_path / "light.png").stat().st_size > 50_000

                for width in (1440, 820, 390):
                    page.size(width, 900)
                    page.wait(f"document.documentElement.clientWidth === {width}")
                    assert page.run("document.documentElement.scrollWidth") <= width, (
                        f"no sideways scrolling at {width}"
                    )
                assert page.console == []
                resources = page.run("performance.getEntriesByType('resource').map(entry => entry.name)")
                assert all(name.startswith(url_of(daemon)) for name in resources), "nothing comes from elsewhere"

                load.close()
                daemon.stop()
                page.wait("document.getElementById('link-text').textContent.includes('does not answer')")
                assert page.run("document.body.classList.contains('stale')")
        finally:
            load.close()


# ---------------------------------------------------------------- top


def test_top_shows_the_same_figures(served: DaemonProcess) -> None:
    engine = MiniEngine(served.socket, "ocr")
    engine.turn()
    share_blocks(served)
    shown = subprocess.run(
        [sys.executable, "-m", "stagecache.cli", "top", "--once", "--socket", str(served.socket)],
        capture_output=True, text=True, timeout=60, check=True, env={**os.environ, "COLUMNS": "180"},
    ).stdout  # fmt: skip
    engine.close()
    for word in (
        "stagecached",
        "ocr #0",
        "demo/omni-7b",
        "codes.audio",
        "working",
        "MiB",
        url_of(served),
        "kept",
        "67 %",
    ):
        assert word in shown, shown


def test_top_without_a_daemon_says_how_to_start_one(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "stagecache.cli", "top", "--once", "--socket", str(tmp_path / "none.sock")],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "Start one with" in " ".join(done.stderr.split())


# ---------------------------------------------------------------- HTTP


def raw(daemon: DaemonProcess, request: bytes) -> bytes:
    """What the port answers to these bytes, until it closes."""
    where = urlsplit(url_of(daemon))
    with sockets.create_connection((where.hostname, where.port), timeout=20) as connection:
        connection.sendall(request)
        answer = b""
        while chunk := connection.recv(65536):
            answer += chunk
    return answer


@pytest.mark.parametrize(
    ("request_head", "status"),
    [
        (b"POST /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n", b"405"),
        (b"GET / HTTP/2\r\nHost: localhost\r\n\r\n", b"505"),
        (b"nonsense\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nHost: evil.example\r\n\r\n", b"421"),
        (b"GET / HTTP/1.1\r\n\r\n", b"421"),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"y" * 20_000 + b"\r\n\r\n", b"431"),
        (b"GET /static/../site.py HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n", b"404"),
        (b"GET /static/%2e%2e%2fsite.py HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n", b"404"),
        (b"GET /api/pool?session=x&key=0 HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n", b"404"),
        (b"GET /api/history?session=x HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n", b"404"),
        (b"HEAD /healthz HTTP/1.1\r\nHost: 127.0.0.1:1\r\nConnection: close\r\n\r\n", b"200"),
        (b"GET /healthz HTTP/1.0\r\nHost: [::1]:80\r\nConnection: close\r\n\r\n", b"200"),
    ],
)
def test_requests_that_are_wrong_are_answered_and_closed(
    served: DaemonProcess, request_head: bytes, status: bytes
) -> None:
    answer = raw(served, request_head)
    assert answer.startswith(b"HTTP/1.1 " + status), answer[:200]
    if request_head.startswith(b"HEAD"):
        assert answer.endswith(b"\r\n\r\n")


def test_connection_is_kept_and_answers_carry_safe_headers(served: DaemonProcess) -> None:
    where = urlsplit(url_of(served))
    connection = http.client.HTTPConnection(str(where.hostname), where.port, timeout=20)
    for path, kind in (("/", "text/html"), ("/static/app.js", "text/javascript"), ("/metrics", "text/plain")):
        connection.request("GET", path)
        answer = connection.getresponse()
        answer.read()
        assert answer.status == 200
        assert str(answer.getheader("Content-Type")).startswith(kind)
        assert answer.getheader("X-Content-Type-Options") == "nosniff"
        assert "default-src 'none'" in str(answer.getheader("Content-Security-Policy"))
    connection.close()


def test_events_come_every_second(served: DaemonProcess) -> None:
    where = urlsplit(url_of(served))
    with sockets.create_connection((where.hostname, where.port), timeout=20) as connection:
        connection.sendall(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        file = connection.makefile("rb")
        states = []
        for line in file:
            if line.startswith(b"data: "):
                states.append(json.loads(line[6:]))
            if len(states) == 3:
                break
    assert states[0]["daemon"]["pid"] == served.pid
    assert states[0]["now"] < states[1]["now"] < states[2]["now"]


def test_slow_and_many_connections_do_not_stop_the_daemon(served: DaemonProcess) -> None:
    where = urlsplit(url_of(served))
    open_ones = [sockets.create_connection((where.hostname, where.port), timeout=20) for _ in range(100)]
    for one in open_ones[:50]:
        one.sendall(b"GET /metrics HT")
    assert get_unix(served.paths.http_socket, "/healthz") == (200, "ok\n")
    for one in open_ones:
        one.close()
    deadline = time.monotonic() + 20
    while True:
        try:
            assert get(url_of(served) + "healthz") == "ok\n"
            return
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.1)


def test_unix_socket_serves_the_same_to_this_user_only(served: DaemonProcess) -> None:
    path = served.paths.http_socket
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert get_unix(path, "/healthz") == (200, "ok\n")
    assert "stagecache_build_info" in get_unix(path, "/metrics")[1]
    assert get_unix(path, "/nothing")[0] == 404


def test_metrics_port_that_is_taken_is_refused_at_start(served: DaemonProcess, tmp_path: Path) -> None:
    port = urlsplit(url_of(served)).port
    done = run_daemon("--socket", str(tmp_path / "d.sock"), "--metrics-port", str(port))
    assert done.returncode == 3
    assert f"port {port}" in done.stderr
    assert "--metrics-port" in done.stderr


def test_without_a_metrics_port_there_is_no_port(tmp_path: Path) -> None:
    daemon = DaemonProcess(tmp_path)
    daemon.start()
    try:
        assert "url=http" not in daemon.log
        listening = subprocess.run(
            ["cat", f"/proc/{daemon.pid}/net/tcp"], capture_output=True, text=True, check=True
        ).stdout
        inodes = {os.readlink(f"/proc/{daemon.pid}/fd/{fd}") for fd in os.listdir(f"/proc/{daemon.pid}/fd")}
        assert not [line for line in listening.splitlines()[1:] if f"socket:[{line.split()[9]}]" in inodes]
        assert get_unix(daemon.paths.http_socket, "/healthz") == (200, "ok\n")
    finally:
        daemon.close()
    assert not daemon.paths.http_socket.exists()
