"""docs/vllm-omni.md says what is: the releases, the patches, the variables and the differences."""

from __future__ import annotations

import re
from pathlib import Path

from stagecache.shim.omni import patch
from tests.omni import beyond

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "vllm-omni.md").read_text()


def table_rules(heading: str) -> list[str]:
    """First cells of the table under a heading."""
    section = PAGE.split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
    cells = re.findall(r"^\| ([^|]+?) \|", section, re.MULTILINE)
    return [cell for cell in cells if cell not in ("rule",) and not set(cell) <= {"-"}]


def test_the_differences_are_those_that_tests_show() -> None:
    import tests.omni.test_attach
    import tests.omni.test_beyond  # noqa: F401  both mark what they show

    assert beyond.shown == set(beyond.RULES)
    assert table_rules("Where it does otherwise than vLLM-Omni's cache") == list(beyond.RULES)


def test_the_page_names_every_release_patch_and_variable() -> None:
    for named in (*patch.SUPPORTED, "_ensure_omni_prefix_cache", "OmniGPUModelRunner.initialize_kv_cache"):
        assert named in PAGE
    for variable in ("STAGECACHE_SOCKET", "STAGECACHE_STAGE", "STAGECACHE_KEYS", "STAGECACHE_REQUIRED"):
        assert variable in PAGE
