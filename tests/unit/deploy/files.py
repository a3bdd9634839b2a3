"""The files of deploy/, read once."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"
SOCKET = "/run/stagecache/stagecached.sock"
METRICS_PORT = 9470
UID = 990


def parse_yaml(text: str) -> list[Any]:
    yaml = pytest.importorskip("yaml")
    return [document for document in yaml.safe_load_all(text) if document is not None]


def compose_text() -> str:
    """The compose file with every variable at its default, as `docker compose config` would fill it in."""
    text = (DEPLOY / "compose/compose.yaml").read_text()
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text)


def compose() -> dict[str, Any]:
    (found,) = parse_yaml(compose_text())
    return found


def manifests(folder: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """(file name, object) of every Kubernetes manifest."""
    for path in sorted((DEPLOY / "kubernetes" / folder).rglob("*.yaml")):
        for document in parse_yaml(path.read_text()):
            yield str(path.relative_to(DEPLOY)), document


def size_of(text: str | int) -> int:
    """Bytes of 17Gi, 6G (Kubernetes' and the daemon's suffixes are all powers of 1024 here), 1536m, 2g."""
    found = re.fullmatch(r"(\d+)\s*([kmgKMG]?)i?", str(text))
    assert found, text
    return int(found[1]) << {"": 0, "k": 10, "m": 20, "g": 30}[found[2].lower()]


def unit() -> dict[str, list[str]]:
    """Settings of the systemd unit by name, values in order."""
    found: dict[str, list[str]] = {}
    for line in (DEPLOY / "systemd/stagecached.service").read_text().splitlines():
        if line and not line.startswith(("#", "[")):
            name, _, value = line.partition("=")
            found.setdefault(name, []).append(value)
    return found
