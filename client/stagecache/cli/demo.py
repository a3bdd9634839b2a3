"""``stagecache demo``."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from stagecache.cli.apart import run_apart
from stagecache.cli.console import out, show_error

NEEDED = ("vllm", "torch", "safetensors", "tokenizers")


def missing_engine() -> str | None:
    """What to say where the engine is not installed, None where it is."""
    missing = [name for name in NEEDED if find_spec(name) is None]
    if not missing:
        return None
    return (
        f"this needs a vLLM environment, and {', '.join(missing)} cannot be imported here. In a checkout, `make demo` "
        "makes one for the CPU; elsewhere, install stagecache beside vLLM"
    )


def run(*, requests: int, hidden: int, dtype: str, report: Path, keep: bool) -> int:
    """Run the demo; the process' exit status."""
    if text := missing_engine():
        show_error(text)
        return 1
    return run_apart("stagecache-demo-", lambda work: _run_in(work, requests, hidden, dtype, report), keep=keep)


def _run_in(work: Path, requests: int, hidden: int, dtype: str, report: Path) -> int:
    from stagecache.demo.run import DemoOptions, run_demo

    try:
        outcome = run_demo(DemoOptions(requests, hidden, dtype, report), work, out)
    except ValueError as error:
        show_error(error)
        return 2
    if outcome.ok:
        out.print(f"[bold green]Every row is right[/]: {outcome.agreement} as without prefix caching.")
        return 0
    if outcome.wrong:
        show_error(f"{outcome.wrong} of {len(outcome.results)} requests have wrong or missing rows")
    else:
        show_error("rows shifted by one position were not noticed, so the comparison proves nothing")
    return 1
