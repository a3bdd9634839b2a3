"""Every name that rules, dashboards and docs use is a metric that exists, and every metric is documented."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from stagecached.metrics.catalog import METRICS
from stagecached.metrics.sheet import KEY_LINES, SESSION_LINES

ROOT = Path(__file__).parents[3]
RULES = (ROOT / "deploy" / "prometheus" / "stagecache.rules.yml").read_text()
TESTS = (ROOT / "deploy" / "prometheus" / "stagecache.rules.test.yml").read_text()
DOC = (ROOT / "docs" / "metrics.md").read_text()
BOARDS = sorted((ROOT / "deploy" / "grafana").glob("*.json"))
SERIES = {name for metric in METRICS.values() for name in metric.series}
RECORDED = set(re.findall(r"record: (\S+)", RULES))
ALERTS = re.findall(r"alert: (\S+)", RULES)


def panels() -> list[dict[str, object]]:
    return [panel for path in BOARDS for panel in json.loads(path.read_text())["panels"] if panel["type"] != "row"]


def names_in(text: str) -> set[str]:
    """Metric names in an expression; recorded ones have colons."""
    return set(re.findall(r"(?<![\w:\"~.])(?:\w+:)?stagecache_\w+(?::\w+)?", text))


def test_names_follow_the_conventions() -> None:
    for name, metric in METRICS.items():
        assert re.fullmatch(r"stagecache_[a-z_]+", name)
        assert name.endswith("_total") == (metric.kind == "counter"), name
        assert metric.help.endswith("."), name
        assert not re.search(r"_(ms|us|ns|milliseconds|kib|mib)(_|$)", name), f"{name}: base units"
        assert set(dict(metric.values)) <= set(metric.labels)
        if metric.kind == "histogram":
            assert name.endswith("_seconds")
            assert list(metric.bounds_s) == sorted(metric.bounds_s)


def test_every_line_of_a_sheet_belongs_to_the_catalog_and_takes_values_of_its_closed_sets() -> None:
    for lines, named in ((SESSION_LINES, 2), (KEY_LINES, 3)):
        for line in lines:
            labels = line.metric.labels[named:]
            values = line.labels[: len(labels)]
            assert len(values) == len(labels), line
            for label, value in zip(labels, values, strict=True):
                assert value in dict(line.metric.values)[label]
    for lines in (SESSION_LINES, KEY_LINES):
        keys = [(line.metric.name, line.suffix, line.labels) for line in lines]
        assert len(keys) == len(set(keys))


def test_rules_name_only_metrics_that_exist() -> None:
    for text in (RULES, TESTS):
        used = set()
        for line in text.splitlines():
            if not line.lstrip().startswith(("#", "-", "summary", "description", "runbook", "rule_files")):
                used |= names_in(line)
        used -= {name for name in used if name.endswith(("_rules", "rules"))}
        assert used <= SERIES | RECORDED, used - SERIES - RECORDED
    assert names_in(TESTS) | {
        "instance_stage:stagecache_hit_tokens:rate5m", "instance_stage:stagecache_queried_tokens:rate5m",
    } >= RECORDED, "each recorded figure is tested, or used by one that is"  # fmt: skip


def test_every_alert_is_tested_documented_and_says_what_it_means() -> None:
    assert len(ALERTS) == len(set(ALERTS)) > 15
    for alert in ALERTS:
        assert alert in TESTS, f"{alert} has no unit test"
        assert f"docs/metrics.md#{alert.lower()}\n" in RULES, f"{alert} has no runbook link"
        assert f"\n### {alert}\n" in DOC, f"{alert} is not in the runbook"
    assert RULES.count("summary:") == RULES.count("description:") == RULES.count("severity:") == len(ALERTS)
    assert set(re.findall(r"severity: (\w+)", RULES)) == {"critical", "warning", "info"}


def test_dashboards_are_what_the_generator_writes() -> None:
    script = ROOT / "deploy" / "grafana" / "generate.py"
    done = subprocess.run([sys.executable, str(script), "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", BOARDS, ids=lambda path: path.stem)
def test_panels_have_a_description_a_unit_and_metrics_that_exist(path: Path) -> None:
    board = json.loads(path.read_text())
    ids = [panel["id"] for panel in board["panels"]]
    assert len(ids) == len(set(ids))
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken
        assert at["x"] + at["w"] <= 24
        taken |= cells
        if panel["type"] == "row":
            continue
        assert panel["description"].endswith("."), panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        assert panel["targets"], panel["title"]
        for target in panel["targets"]:
            used = names_in(target["expr"])
            assert used | set(re.findall(r"\b(?:up|process_\w+)\b", target["expr"])), target["expr"]
            assert used <= SERIES, used - SERIES
            assert "$instance" in target["expr"]


def test_every_metric_is_on_a_dashboard() -> None:
    shown: set[str] = set()
    for panel in panels():
        for target in panel["targets"]:  # type: ignore[attr-defined]
            shown |= names_in(target["expr"])
    hidden = {name for name, metric in METRICS.items() if not shown & set(metric.series)}
    assert not hidden


def test_the_documented_table_is_the_catalog() -> None:
    rows = re.findall(r"^\| `(stagecache_\w+)` \| (\w+) \| ([^|]*?) ?\| (.+) \|$", DOC, re.MULTILINE)
    assert rows == [(name, metric.kind, ", ".join(metric.labels), metric.help) for name, metric in METRICS.items()], (
        "docs/metrics.md: the table of all metrics is not that of stagecached/metrics/catalog.py"
    )
