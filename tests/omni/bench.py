"""vLLM-Omni's real AR runner on the CPU, three ways: prefix caching off, in-process cache, sidecar.

    python -m tests.omni.bench [--hidden 512] [--requests 16] [--tokens 48]

For each stage and way: what the engine's thread spends in the prefix cache a decode step and a prefill step with hits,
how long the whole workload took, and whether what was handed on equals the uncached run. It starts a daemon of its own.
Ends non-zero when rows differ.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from tests.omni.settings import quiet

METHODS = ("_prefix_cache_step_begin", "_prefix_cache_save_step", "_prefix_cache_materialize")
WAYS = ("off", "in-process", "sidecar")


class Stopwatch:
    """Times the mixin's calls of one runner on the engine's thread; a step ends with its materialize."""

    def __init__(self, runner: Any) -> None:
        self.steps: dict[str, list[float]] = defaultdict(list)
        self._step_ms = 0.0
        self._kind = ""
        for name in METHODS:
            setattr(runner, name, self._timed(name, getattr(runner, name)))

    def _timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            result = call(*args, **kwargs)
            self._step_ms += (time.perf_counter() - started) * 1e3
            if name == METHODS[0]:
                new = args[0].scheduled_new_reqs
                self._kind = "hits" if any(r.num_computed_tokens for r in new) else "prefill" if new else "decode"
            elif name == METHODS[2]:
                self.steps[self._kind].append(self._step_ms)
                self._step_ms = 0.0
            return result

        return timed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=48, help="tokens to generate a request")
    options = parser.parse_args()
    quiet()
    with tempfile.TemporaryDirectory() as folder:
        return compare(Path(folder), options)


def compare(folder: Path, options: argparse.Namespace) -> int:
    import torch

    from stagecache.demo.checkpoint import ModelShape, write_checkpoint
    from stagecache.local_daemon import LocalDaemon
    from tests.omni.engines import stage_engine, tokens

    write_checkpoint(folder / "model", ModelShape(hidden=options.hidden, vocab=1024, max_len=1024))
    shared = tokens(1, 320)
    first = {f"a{i}": shared[: 32 * (i % 8 + 1)] + tokens(i + 2, 40) for i in range(options.requests)}
    second = {f"b{i}": shared + tokens(i + 90, 20) for i in range(options.requests)}
    limits = {"max_num_seqs": options.requests, "max_num_batched_tokens": 512, "kv_cache_memory_bytes": 512 << 20}
    different = 0
    print(f"{'stage':8} {'way':11} {'decode step':>12} {'step with hits':>15} {'workload':>10}  rows")
    with LocalDaemon(folder) as daemon:
        for stage in ("thinker", "talker"):
            uncached: dict[str, Any] = {}
            for way in WAYS:
                socket = daemon.socket if way == "sidecar" else None
                with stage_engine(
                    folder / "model", stage, socket, enable_prefix_caching=way != "off", **limits
                ) as engine:
                    engine.run({"warm": tokens(77, 64)}, max_tokens=2)
                    watch = Stopwatch(engine.runner)
                    started = time.perf_counter()
                    engine.run(first, max_tokens=options.tokens)
                    rows = engine.run(second)
                    took = time.perf_counter() - started
                uncached = uncached or rows
                same = all(torch.equal(rows[name][key], uncached[name][key]) for name in rows for key in rows[name])
                different += not same
                cells = [f"{median(watch.steps[kind]):9.3f} ms" for kind in ("decode", "hits") if watch.steps[kind]]
                if way == "off":
                    cells = ["-", "-"]
                print(
                    f"{stage:8} {way:11} {cells[0]:>12} {cells[-1]:>15} {took:8.2f} s  {'equal' if same else 'DIFFER'}"
                )
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
