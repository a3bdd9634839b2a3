"""Where our manager does otherwise than vLLM-Omni's: the rules, and the mark of a test that shows one.

docs/vllm-omni.md lists the same rules; ``test_docs`` compares.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

Test = TypeVar("Test", bound=Callable[..., None])

RULES = ("S4", "K1", "K2", "K3", "H3", "H4", "H5", "H7", "R3", "W5", "W8", "G3")

shown: set[str] = set()
"""Rules of which a test was defined."""


def beyond(*rules: str) -> Callable[[Test], Test]:
    """The test shows how the managers differ by these rules."""
    assert set(rules) <= set(RULES), rules

    def mark(test: Test) -> Test:
        shown.update(rules)
        return test

    return mark
