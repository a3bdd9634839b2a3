"""Write into docs/semantics.md, under each rule, the tests that hold it: those whose docstring begins with its number.

python tools/semantics_index.py            rewrite the page
python tools/semantics_index.py --check    exit 1 if the page is not what this would write
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "semantics.md"
RULE = re.compile(r"^- \*\*([SKHRWG]\d+)\*\*")
NUMBERS = re.compile(r"^((?:[SKHRWG]\d+)(?:(?:, | and | to )[SKHRWG]\d+)*)\b")
HELD = "  - held by "


def tests() -> Iterator[tuple[str, Path, str]]:
    """(rule, file, name) of every test whose docstring begins with numbers of rules."""
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                match = NUMBERS.match(ast.get_docstring(node) or "")
                if match:
                    for rule in spelled_out(match[1]):
                        yield rule, path.relative_to(ROOT), node.name


def spelled_out(numbers: str) -> list[str]:
    """["H6", "H7", "H8"] for "H6 to H8", ["H2", "R3"] for "H2, R3"."""
    found: list[str] = []
    for part in re.split(r", | and ", numbers):
        first, _, last = part.partition(" to ")
        end = int((last or first)[1:])
        found += [f"{first[0]}{number}" for number in range(int(first[1:]), end + 1)]
    return found


def page(text: str) -> str:
    """The page with its lists of tests made anew."""
    held: dict[str, dict[Path, list[str]]] = defaultdict(lambda: defaultdict(list))
    for rule, path, name in tests():
        held[rule][path].append(name)
    lines: list[str] = []
    pending = ""
    for line in [*text.splitlines(), ""]:
        if line.startswith(HELD):
            continue
        if pending and (RULE.match(line) or not line.startswith("  ")):
            for path, names in held[pending].items():
                lines.append(f"{HELD}`{path}`: {', '.join(sorted(set(names)))}")
            pending = ""
        match = RULE.match(line)
        if match:
            pending = match[1]
        lines.append(line)
    return "\n".join(lines).rstrip() + "\n"


def main() -> int:
    """Rewrite the page, or check it; the exit status."""
    before = PAGE.read_text()
    after = page(before)
    if "--check" in sys.argv[1:]:
        return int(before != after)
    PAGE.write_text(after)
    return 0


if __name__ == "__main__":
    sys.exit(main())
