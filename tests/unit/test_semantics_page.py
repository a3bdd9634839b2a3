"""docs/semantics.md names, for every rule, the tests that hold it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "semantics.md").read_text()


def test_the_page_lists_the_tests_that_exist() -> None:
    found = subprocess.run([sys.executable, ROOT / "tools" / "semantics_index.py", "--check"], check=False)
    assert found.returncode == 0, "run tools/semantics_index.py and commit docs/semantics.md"


def test_every_rule_is_held_by_a_test() -> None:
    """Without exception."""
    rules = re.split(r"(?m)^- \*\*([SKHRWG]\d+)\*\*", PAGE)
    bare = [rule for rule, text in zip(rules[1::2], rules[2::2], strict=True) if "held by `" not in text]
    assert not bare, f"no test names {bare}"
