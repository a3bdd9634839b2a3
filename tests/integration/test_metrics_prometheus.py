"""Rules and dashboards against promtool and a real Prometheus that scrapes a real daemon."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import time
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from stagecache import errors
from stagecache.rpc import Rpc, handshake
from stagecache_wire.v1 import stagecache_pb2 as pb
from tests.daemon_process import poll_until
from tests.integration.metrics_kit import MiniEngine, get, metrics_daemon, url_of
from tests.integration.programs import need
from tests.integration.replica import Replica, hashes_of
from tools import draw_dashboards

ROOT = Path(__file__).parents[2]
RULES = ROOT / "deploy" / "prometheus" / "stagecache.rules.yml"
BOARDS = sorted((ROOT / "deploy" / "grafana").glob("*.json"))


def promtool(*arguments: str) -> None:
    done = subprocess.run(
        [need("promtool", package="prometheus"), *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_accepts_the_rules_and_the_example_configuration() -> None:
    promtool("check", "rules", str(RULES))
    promtool("check", "config", str(RULES.with_name("prometheus.yml")))


def test_every_rule_fires_where_it_should_and_only_there() -> None:
    promtool("test", "rules", str(RULES.with_name("stagecache.rules.test.yml")))


class Prometheus:
    """A real one, scraping every second."""

    def __init__(self, folder: Path, target: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.url = f"http://127.0.0.1:{probe.getsockname()[1]}"
        (folder / "rules.yml").write_text(RULES.read_text().replace("interval: 30s", "interval: 1s"))
        (folder / "prometheus.yml").write_text(
            json.dumps(
                {
                    "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
                    "rule_files": ["rules.yml"],
                    "scrape_configs": [{"job_name": "stagecache", "static_configs": [{"targets": [target]}]}],
                }
            )
        )
        self.log = (folder / "prometheus.log").open("wb")
        self._process = subprocess.Popen(
            [
                need("prometheus", package="prometheus"), f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}", f"--web.listen-address={self.url.removeprefix('http://')}",
            ],
            stdout=self.log, stderr=self.log,
        )  # fmt: skip
        poll_until(self._ready, "Prometheus to start", 60.0)

    def _ready(self) -> bool:
        with suppress(OSError):
            return "Ready" in get(f"{self.url}/-/ready", 5.0)
        return False

    def query(self, expression: str) -> list[dict[str, Any]]:
        answer = json.loads(get(f"{self.url}/api/v1/query?query={urllib.parse.quote(expression)}"))
        result: list[dict[str, Any]] = answer["data"]["result"]
        return result

    def rules(self) -> list[dict[str, Any]]:
        groups = json.loads(get(f"{self.url}/api/v1/rules"))["data"]["groups"]
        return [rule for group in groups for rule in group["rules"]]

    def close(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(15)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self.log.close()


@contextmanager
def scraping(folder: Path, target: str) -> Iterator[Prometheus]:
    prometheus = Prometheus(folder, target)
    try:
        yield prometheus
    finally:
        prometheus.close()


def expressions() -> Iterator[tuple[str, str]]:
    """(where, expression) of every panel, with the variables at their default: all."""
    for path in BOARDS:
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel.get("targets", ()):
                expression = re.sub(r"\$(instance|stage|replica)\b", ".*", target["expr"])
                yield f"{path.stem}: {panel['title']}", expression.replace("$__rate_interval", "30s")


QUIET = {
    "Failed sessions", "Waits", "Waits a second", "Leases", "Oldest lease", "Ways around a full arena", "Device clones",
    "Garbage collection", "Age of the presence counts", "Memory for copies from the device",
}  # fmt: skip
"""Panels of node and stage that may show zeros under a steady load; no other may."""


def look_at_dashboards(url: str, folder: Path) -> None:
    """Every panel of node and stage has data over the last seconds, and is drawn; a renamed metric is noticed."""
    end = time.time()
    server = draw_dashboards.Prometheus(url, end - 20, end, 1.0, 15)
    for name in ("node", "stage"):
        board = json.loads((ROOT / "deploy" / "grafana" / f"{name}.json").read_text())
        panels = [server.fill(panel) for panel in draw_dashboards.panels_of(board)]
        empty = [(panel.title, panel.empty_targets) for panel in panels if panel.empty_targets]
        assert not empty
        flat = {panel.title for panel in panels if panel.targets and all(line.zero for line in panel.lines)}
        assert flat <= QUIET, flat - QUIET
        draw_dashboards.draw(board["title"], panels, folder / f"{name}.png")
        assert (folder / f"{name}.png").stat().st_size > 50_000
        renamed = json.loads(json.dumps(board).replace("stagecache_hit_tokens_total", "stagecache_hit_tokenz_total"))
        broken = [server.fill(panel) for panel in draw_dashboards.panels_of(renamed)]
        noticed = {panel.title for panel in broken if panel.empty_targets}
        uses_it = {made["title"] for made in board["panels"] if "stagecache_hit_tokens_total" in json.dumps(made)}
        assert noticed == uses_it != set()


class Sharing:
    """Two replicas of a stage that share blocks on a node with room for few."""

    def __init__(self, socket: Path) -> None:
        self._turn = 0
        self._replicas = [Replica(socket, stage="replicas") for _ in range(2)]
        for replica in self._replicas:
            assert replica.join().on

    def fill(self) -> None:
        """From now on each new block evicts another."""
        while not self._replicas[0].cache.session.rpc.stats(5.0).namespaces[0].evictions["capacity"]:
            self.turn()

    def turn(self) -> None:
        """One computes a prompt and publishes it, the other holds it, is filled with it, and hits."""
        first, second = self._replicas
        self._turn += 1
        prompt = [1000 * self._turn + token for token in range(9)]
        first.run(prompt, [0, 1, 2], publish=(0, 1))
        first.consumed()
        asked = pb.AcquireBlocksRequest(
            request_ids=["r"], hashes=b"".join(hashes_of(prompt)) + b"?" * 32, span_blocks=[3], all=True
        )
        assert second.cache.session.rpc.acquire_blocks(asked, 5.0).held[0] == 2
        second.run(prompt, [3, 4, 5], hit=8, fill=(0, 1))
        second.consumed()

    def close(self) -> None:
        for replica in self._replicas:
            replica.cache.close()


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_real_prometheus_evaluates_every_rule_and_every_dashboard(tmp_path: Path) -> None:
    need("prometheus", package="prometheus")
    with metrics_daemon(tmp_path, "--shared-bytes", "16KiB") as daemon:
        target = url_of(daemon).removeprefix("http://").rstrip("/")
        engines: list[MiniEngine | Sharing] = [MiniEngine(daemon.socket, stage) for stage in ("thinker", "talker")]
        engines.append(sharing := Sharing(daemon.socket))
        sharing.fill()
        with scraping(tmp_path, target) as prometheus, Rpc(handshake(daemon.socket, "observer")) as observer:

            def work() -> None:
                for engine in engines:
                    engine.turn()
                with suppress(errors.StageCacheError):
                    observer.reset(pb.ResetRequest(stage="nobody's"), 5.0)

            deadline = time.monotonic() + 60
            while not prometheus.query("instance_stage:stagecache_hit:ratio_rate5m > 0"):
                assert time.monotonic() < deadline, "no hit ratio was recorded"
                work()
                time.sleep(0.2)

            def empty() -> list[str]:
                work()
                return [where + ": " + text for where, text in expressions() if not prometheus.query(text)]

            deadline = time.monotonic() + 30
            while missing := empty():
                assert time.monotonic() < deadline, "\n".join(missing)
            look_at_dashboards(prometheus.url, tmp_path)
            rules = prometheus.rules()
            assert len(rules) == RULES.read_text().count(" expr:")
            bad = [(rule["name"], rule.get("lastError")) for rule in rules if rule["health"] != "ok"]
            assert not bad
            silent = [
                rule["name"] for rule in rules if rule["type"] == "recording" and not prometheus.query(rule["name"])
            ]
            assert not silent
            firing = {alert["metric"]["alertname"] for alert in prometheus.query('ALERTS{alertstate="firing"}')}
            assert firing <= {"StagecacheNotLocked"}, "nothing is wrong"
        for engine in engines:
            engine.close()
