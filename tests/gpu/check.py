"""The GPU path on a machine with one GPU: correctness and figures, in under four minutes.

    python tests/gpu/check.py [--json FILE]

It starts a daemon of its own, prints one table and writes JSON. Where there is no GPU it runs to its end and reports
the GPU's rows as skipped; the same cases then run in host memory, which checks this script. Exit status: 1 where a row
was wrong, 2 where something that it needs is not installed; a missed figure is no failure. posix_ipc may be missing:
tests/gpu/fallback stands in for it.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FALLBACK = Path(__file__).resolve().parent / "fallback"
NEEDED = (
    "grpc",
    "grpc_health",
    "grpc_reflection",
    "google.protobuf",
    "uvloop",
    "prometheus_client",
    "numpy",
    "pydantic_settings",
    "structlog",
    "torch",
)
LIMIT_S = 220.0
"""No figure is begun after so many seconds."""


def use_checkout(*, stand_in: bool) -> bool:
    """Put this checkout on the path, for us and for the daemon. Whether posix_ipc is stood in for."""
    folders = [ROOT, ROOT / "proto", ROOT / "server", ROOT / "client"]
    stand_in = stand_in or importlib.util.find_spec("posix_ipc") is None
    if stand_in:
        folders.insert(0, FALLBACK)
    paths = [str(folder) for folder in folders]
    sys.path[:0] = paths
    os.environ["PYTHONPATH"] = os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")])
    return stand_in


def missing() -> list[str]:
    """What is needed and not installed."""
    found = []
    for name in NEEDED:
        try:
            there = importlib.util.find_spec(name) is not None
        except ModuleNotFoundError:
            there = False
        if not there:
            found.append(name)
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Checks the GPU path.")
    parser.add_argument("--json", type=Path, default=Path("gpu-check.json"), help="where to write the rows")
    parser.add_argument(
        "--stand-in", action="store_true", help="use the stand-in for posix_ipc where it is installed too"
    )
    options = parser.parse_args(arguments)
    stand_in = use_checkout(stand_in=options.stand_in)
    lacking = missing()
    if lacking:
        print(f"not installed here: {', '.join(lacking)}", file=sys.stderr)
        return 2
    rows, facts = run()
    facts["posix_ipc"] = "stand-in" if stand_in else "installed"
    print(table(rows, facts))
    options.json.write_text(json.dumps({"facts": facts, "rows": [asdict(row) for row in rows]}, indent=2) + "\n")
    print(f"written to {options.json}")
    return 1 if any(row.verdict == "FAILED" for row in rows) else 0


def run() -> tuple[list[Any], dict[str, Any]]:
    """All rows, and what machine they are of."""
    import torch

    from stagecache.local_daemon import LocalDaemon
    from tests.gpu.beds import Bed, CudaBed
    from tests.gpu.cases import CASES, GPU_CASES
    from tests.gpu.figures import FIGURES, Row

    started = time.monotonic()
    there = torch.cuda.is_available() and torch.version.cuda is not None
    why = (
        "" if there else f"no CUDA device ({'this torch has no CUDA' if torch.version.cuda is None else 'none found'})"
    )
    facts: dict[str, Any] = {
        "card": torch.cuda.get_device_name() if there else None,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "cpus": len(os.sched_getaffinity(0)),
    }
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="stagecache-gpu-") as folder, LocalDaemon(Path(folder)) as daemon:
        beds = [Bed(), *([CudaBed()] if there else [])]
        for bed in beds:
            cases = (*CASES, *(GPU_CASES if bed.name == "gpu" else ()))
            rows += [_case(bed, case, daemon.socket) for case in cases]
        if not there:
            rows += [Row(f"gpu: {_words(case)}", "", "", "skipped", None, why) for case in (*CASES, *GPU_CASES)]
        for name, figure in FIGURES:
            late = time.monotonic() - started > LIMIT_S
            if not there or late:
                rows.append(Row(f"gpu: {name}", "", "", "skipped", None, why or "out of time"))
                continue
            try:
                rows += figure(beds[-1], daemon.socket)  # type: ignore[arg-type]
            except Exception as error:
                rows.append(Row(f"gpu: {name}", "", "", "FAILED", None, f"{type(error).__name__}: {error}"))
    facts["seconds"] = round(time.monotonic() - started, 1)
    return rows, facts


def _case(bed: Any, case: Callable[..., None], socket: Path) -> Any:
    from tests.gpu.figures import Row

    what = f"{bed.name}: {_words(case)}"
    try:
        case(bed, socket)
    except Exception as error:
        return Row(what, "wrong", "right rows", "FAILED", None, f"{type(error).__name__}: {error}")
    return Row(what, "right rows", "right rows", "ok")


def _words(case: Any) -> str:
    return str(case.__name__).replace("_", " ")


def table(rows: list[Any], facts: dict[str, Any]) -> str:
    """One table, as Markdown."""
    machine = f"{facts['card'] or 'no GPU'}, torch {facts['torch']}, CUDA {facts['cuda'] or '-'}"
    head = f"{machine}, {facts['cpus']} CPUs, {facts['seconds']} s"
    lines = [head, "", "| what | seen | wanted | |", "|---|---|---|---|"]
    for row in rows:
        seen = row.seen or row.note
        note = f" ({row.note})" if row.note and row.seen else ""
        lines.append(f"| {row.what} | {seen}{note} | {row.wanted} | {row.verdict} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
