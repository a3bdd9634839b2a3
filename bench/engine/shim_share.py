"""What the shim adds to a step of the real vLLM engine on the CPU, when no request hits: engine-process CPU with it
and without it, and twice without it (A/A), which says how much of a difference is noise.

    python bench/engine/shim_share.py [--requests 16] [--steps 150] [--hidden 1024] [--layers 4] [--rounds 3]
        [--json FILE]

Each run is a process of its own: an engine starts, all requests are prefilled, and their decode steps are measured.
Rounds run the three kinds in turn, in another order each time. Figures are medians over the steps of all rounds:
process CPU and wall time of a step, and in the runs with the shim also what the shim measured of itself on the engine's
thread, which needs no comparison. Rows are handed out in every step, as to a consumer that takes them.

There is a verdict on the comparison only where the A/A interval lies within 1 %. The exit status is 1 where the shim's
own measure says more than 1 %.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from stagecache.demo.checkpoint import ModelShape, write_checkpoint
from stagecache.local_daemon import LocalDaemon
from stagecache.local_engine import quiet_engine_environment, running_engine

KINDS = ("without", "with", "without again")
BOUND = 0.01


def run_engine(settings: argparse.Namespace) -> dict[str, Any]:
    """Start an engine in this process and drive decode steps. CPU and wall seconds of each."""
    from vllm import SamplingParams

    from stagecache.shim.steps import StepRows, on_step

    shim: list[tuple[float, float]] = []

    def note(rows: StepRows) -> None:
        shim.append((rows.shim_s, rows.step_s))

    arguments = {
        "model": settings.checkpoint,
        "skip_tokenizer_init": True,
        "enable_prefix_caching": True,
        "dtype": "bfloat16",
        "block_size": 32,
        "max_model_len": 64 + settings.steps + 16,
        "max_num_seqs": settings.requests,
        "max_num_batched_tokens": 2048,
        "kv_cache_memory_bytes": 256 << 20,
    }
    cpu: list[float] = []
    wall: list[float] = []
    with running_engine(arguments) as engine:
        unsubscribe = on_step(note) if settings.child == "with" else None
        params = SamplingParams(max_tokens=settings.steps + 8, temperature=0.0, detokenize=False, ignore_eos=True)
        for number in range(settings.requests):
            tokens = [3 + (131 * number + 7 * position) % 2000 for position in range(48)]
            engine.add_request(f"request-{number}", {"prompt_token_ids": tokens}, params)
        for _ in range(8):  # the prefill, and steps that warm up
            engine.step()
        shim.clear()
        for _ in range(settings.steps):
            begun_cpu, begun = time.process_time(), time.perf_counter()
            engine.step()
            cpu.append(time.process_time() - begun_cpu)
            wall.append(time.perf_counter() - begun)
        if unsubscribe is not None:
            unsubscribe()
    return {"cpu": cpu, "wall": wall, "shim": [own for own, _ in shim], "forward": [step for _, step in shim]}


def measure(settings: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """All rounds, each run in a process of its own. By kind: what ``run_engine`` found, joined."""
    found: dict[str, dict[str, list[float]]] = {kind: {} for kind in KINDS}
    with tempfile.TemporaryDirectory(prefix="stagecache-share-") as folder:
        checkpoint = Path(folder) / "checkpoint"
        write_checkpoint(checkpoint, ModelShape(hidden=settings.hidden, layers=settings.layers, std=0.02))
        with LocalDaemon(Path(folder)) as daemon:
            for turn in range(settings.rounds):
                for kind in KINDS[turn % 3 :] + KINDS[: turn % 3]:
                    print(f"round {turn + 1} of {settings.rounds}: {kind}", file=sys.stderr, flush=True)
                    run = _child(settings, checkpoint, daemon.socket if kind == "with" else None)
                    for name, values in run.items():
                        found[kind].setdefault(name, []).extend(values)
    return found


def _child(settings: argparse.Namespace, checkpoint: Path, socket: Path | None) -> dict[str, list[float]]:
    environment = {**os.environ, **quiet_engine_environment(), "STAGECACHE_REQUIRED": "1"}
    environment.pop("STAGECACHE_SOCKET", None)
    if socket is not None:
        environment["STAGECACHE_SOCKET"] = str(socket)
    command = [sys.executable, __file__, "--child", "with" if socket is not None else "without"]
    command += ["--checkpoint", str(checkpoint), "--requests", str(settings.requests), "--steps", str(settings.steps)]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True, timeout=900)
    answer: dict[str, list[float]] = json.loads(done.stdout.splitlines()[-1])
    return answer


def summary(found: dict[str, dict[str, list[float]]], requests: int) -> dict[str, Any]:
    """Medians in milliseconds, tokens per second, shares of a step's CPU."""
    plain, again, shim = (found[kind] for kind in ("without", "without again", "with"))
    base = median([*plain["cpu"], *again["cpu"]])
    noise = (median(again["cpu"]) - median(plain["cpu"])) / base
    return {
        "step_cpu_ms": {kind: 1e3 * median(found[kind]["cpu"]) for kind in KINDS},
        "step_wall_ms": {kind: 1e3 * median(found[kind]["wall"]) for kind in KINDS},
        "tokens_per_s": {kind: requests / median(found[kind]["wall"]) for kind in KINDS},
        "shim_ms": 1e3 * median(shim["shim"]),
        "shim_share": median(shim["shim"]) / base,
        "difference": (median(shim["cpu"]) - base) / base,
        "a_a": noise,
        "verdict": None if abs(noise) > BOUND else (median(shim["cpu"]) - base) / base <= BOUND,
    }


def show(result: dict[str, Any]) -> str:
    """The summary for people."""
    verdict = {None: "no verdict, A/A is wider than 1 %", True: "at most 1 %", False: "more than 1 %"}
    compared = f"A/A: {100 * result['a_a']:+.2f} %   with the shim: {100 * result['difference']:+.2f} %"
    return "\n".join(
        [
            f"{'':<16}{'CPU a step':>14}{'wall a step':>14}{'tokens a second':>18}",
            *(
                f"{kind:<16}{result['step_cpu_ms'][kind]:>11.2f} ms{result['step_wall_ms'][kind]:>11.2f} ms"
                f"{result['tokens_per_s'][kind]:>18.0f}"
                for kind in KINDS
            ),
            f"{compared}   {verdict[result['verdict']]}",
            f"the shim's own measure: {result['shim_ms']:.3f} ms a step, {100 * result['shim_share']:.2f} % of its CPU",
        ]
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, or be one of the measured processes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", choices=("with", "without"), help=argparse.SUPPRESS)
    parser.add_argument("--checkpoint", help=argparse.SUPPRESS)
    settings = parser.parse_args(argv)
    if settings.child:
        print(json.dumps(run_engine(settings)))
        return 0
    result = summary(measure(settings), settings.requests)
    print(show(result))
    if settings.json:
        settings.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if result["shim_share"] <= BOUND else 1


if __name__ == "__main__":
    sys.exit(main())
