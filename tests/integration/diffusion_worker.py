"""A diffusion worker in a process of its own, that kills itself at a named point.

python diffusion_worker.py SOCKET KILL_AT PROMPT...     one line of JSON for each prompt that it lived through

KILL_AT: "step N": where the N-th denoise step of the last prompt would begin. "publish N": behind the SAVE and before
the PUBLISH of the N-th transfer of the last prompt. "never".
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from examples.small_dit import MODEL_NAME, SmallDiT
from examples.small_dit.model import SmallDenoising
from stagecache.diffusion import NodeStore, RowQuery
from tests.unit.diffusion.kit import BLOCK, SIZES, ask, paged

WINDOW_BLOCKS = 4
ROOT = Path(__file__).resolve().parents[2]


def digest(latents: torch.Tensor) -> str:
    return sha256(latents.numpy().tobytes()).hexdigest()


def run_worker(socket: Path, kill_at: str, *prompts: str) -> tuple[list[dict[str, Any]], int]:
    """Start one and wait for its end: what it printed, and its exit status."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.integration.diffusion_worker", str(socket), kill_at, *prompts],
        stdout=subprocess.PIPE,
        check=False,
        cwd=ROOT,
        timeout=140,
    )
    return [json.loads(line) for line in done.stdout.splitlines()], done.returncode


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def arm(kill_at: str, node: NodeStore) -> None:
    point, _, number = kill_at.partition(" ")
    if point == "step":
        original = SmallDenoising.step

        def step(self: SmallDenoising, index: int, queries: Sequence[RowQuery]) -> int:
            if index == int(number):
                node.wait()  # All that was handed over is done: the point is between steps, not before the daemon's.
                die()
            return original(self, index, queries)

        SmallDenoising.step = step  # type: ignore[method-assign]
    elif point == "publish":
        publish, calls = node._cache.publish, [0]

        def count(blocks: Any) -> int:
            calls[0] += 1
            if calls[0] == int(number):
                node.wait()
                die()
            return publish(blocks)

        node._cache.publish = count  # type: ignore[method-assign]


def main() -> None:
    socket, kill_at, *prompts = sys.argv[1:]
    torch.set_num_threads(1)
    model = SmallDiT(SIZES)
    node = NodeStore.attach(
        socket, model.kv_shape, model=MODEL_NAME, stage="dit", block_size=BLOCK, window_blocks=WINDOW_BLOCKS
    )
    stage = paged(model, node)
    for index, prompt in enumerate(prompts):
        before = stage.counts.copy()
        if index == len(prompts) - 1:
            arm(kill_at, node)
        image = stage.generate(str(index), ask(prompt))
        print(json.dumps({"latents": digest(image.latents), **asdict(stage.counts.since(before))}), flush=True)
    node.close()


if __name__ == "__main__":
    main()
