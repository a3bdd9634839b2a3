"""The Grafana dashboards as code: writes the JSON files beside this one, or with ``--check``
compares them.

python deploy/grafana/generate.py [--check]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from node import node
from reliability import reliability
from stage import stage

HERE = Path(__file__).parent

BOARDS = {"node.json": node, "stage.json": stage, "reliability.json": reliability}


def main(arguments: Sequence[str]) -> int:
    """Write the files, or compare them."""
    stale = []
    for name, build in BOARDS.items():
        path, text = HERE / name, build().to_json()
        if "--check" in arguments:
            if not path.exists() or path.read_text(encoding="utf-8") != text:
                stale.append(name)
        else:
            path.write_text(text, encoding="utf-8")
    if stale:
        print(f"not current: {', '.join(stale)}; run python deploy/grafana/generate.py", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
