"""``make bench-hitrate`` on the real engine, as small as it can be: counts and rows, no times."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SMALL = "--quick --turns 1 --batch-turns 1 --rates 0 80 --prompt 320 --requests 2 --batch-output 4 --output 4"

pytestmark = [pytest.mark.soak, pytest.mark.engine, pytest.mark.timeout(300)]


def test_hits_are_exact_and_every_row_comes(tmp_path: Path) -> None:
    """Six engines, so it takes most of a minute on two cores. The tiny model's times decide nothing."""
    command = [sys.executable, "-m", "bench.engine.hit_rates", *SMALL.split(), "--hidden", "256", "--layers", "2"]
    done = subprocess.run(
        [*command, "--json", str(tmp_path / "hits.json"), "--markdown", str(tmp_path / "hits.md")],
        cwd=ROOT,
        env=os.environ | {"VLLM_CACHE_ROOT": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode in (0, 1), done.stderr
    checks = json.loads((tmp_path / "hits.json").read_text())["checks"]
    counted = [check for check in checks if "computed" in check["what"] or "rows" in check["what"]]
    assert [check["held"] for check in counted] == [True] * 4
    assert counted[1]["wanted"] == "exactly 64 of 320: 8 blocks of 32 hit"
    assert counted[3]["found"] == "complete 14 of 14 requests, equal 2 of 2"
    assert "| 80 % | 64 |" in (tmp_path / "hits.md").read_text()
