"""Correctness on a device: each case raises where a row is wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from tests.gpu.beds import Bed, Worker, same

HIT = 64


def overwritten_live_buffers(bed: Bed, socket: Path) -> None:
    """W1, S3: saved while the forward runs, overwritten at once, read by this step and by later hits."""
    worker = Worker(bed, socket)
    try:
        for turn in range(4):
            count = worker.begin((f"a{turn}", [8 * turn, 8 * turn + 1, 8 * turn + 2, 8 * turn + 3], 0, HIT))
            made = worker.rows(count)
            step = worker.save(made)
            same(worker.cache.materialize(step, [f"a{turn}"]).hidden_states[f"a{turn}"], made, "this step's rows")
            worker.begin((f"b{turn}", [8 * turn + index for index in range(5)], HIT, 1), finished=[f"a{turn}"])
            tail = worker.rows(1)
            merged = worker.cache.materialize(worker.save(tail), [f"b{turn}"])
            same(merged.hidden_states[f"b{turn}"], torch.cat([made, tail]), "a hit's rows")
    finally:
        worker.close()


def padded_batches(bed: Bed, socket: Path) -> None:
    """K1: a batch padded to a graph's size; the padding reaches nobody."""
    worker = Worker(bed, socket)
    try:
        worker.begin(("a", [0, 1], 0, 16), ("b", [2], 0, 3))
        made, more = worker.rows(19), worker.rows(19)
        merged = worker.cache.materialize(worker.save(made, {"k": more}, padding=13), ["a", "b"])
        same(merged.hidden_states["b"], made[16:], "hidden rows of b")
        same(merged.mm_outputs["k"]["a"], more[:16], "rows of k of a")
        worker.begin(("c", [0, 5], 16, 1), finished=["b"])
        tail = worker.rows(1)
        merged = worker.cache.materialize(worker.save(tail, {"k": tail}, padding=7), ["c"])
        same(merged.mm_outputs["k"]["c"], torch.cat([more[:16], tail]), "a hit's rows of k")
    finally:
        worker.close()


def deferred_under_pressure(bed: Bed, socket: Path) -> None:
    """W3: clones that a small budget pushes out, the rest at the finish; a hit reads all of them."""
    worker = Worker(bed, socket, deferred=frozenset({"late"}), gpu_staging_bytes=2 * 1024)
    try:
        parts = []
        for first in range(0, HIT, 16):
            worker.begin(("a", [0, 1, 2, 3], first, 16))
            parts.append(worker.rows(16))
            step = worker.save(worker.rows(16), {"late": parts[-1]})
            same(worker.cache.materialize(step, ["a"]).mm_outputs["late"]["a"], parts[-1], "this step's deferred rows")
        worker.begin(("b", [0, 1, 2, 3, 4], HIT, 1), finished=["a"])
        tail = worker.rows(1)
        merged = worker.cache.materialize(worker.save(worker.rows(1), {"late": tail}), ["b"])
        same(merged.mm_outputs["late"]["b"], torch.cat([*parts, tail]), "a hit's deferred rows")
    finally:
        worker.close()


def late_materialize(bed: Bed, socket: Path) -> None:
    """S3, H6, H8: a hit on rows of its own step, read after the slots have had two new tenants."""
    worker = Worker(bed, socket)
    try:
        worker.begin(("old", [0], 0, 16))
        worker.cache.discard_step(worker.save(worker.rows(16)))
        worker.begin(("a", [0], 0, 16), ("b", [0, 1], 16, 2))
        made = worker.rows(18)
        late = worker.save(made)
        for tenant in ("c", "d"):
            worker.begin((tenant, [0], 0, 16))
            worker.cache.discard_step(worker.save(worker.rows(16)))
        same(worker.cache.materialize(late, ["b"]).hidden_states["b"], made, "a late hit")
    finally:
        worker.close()


def leftovers(bed: Bed, socket: Path) -> None:
    """K4: tensors that are no rows, large and small, on the device and on the host."""
    worker = Worker(bed, socket)
    try:
        for size in (3, 5000):
            worker.begin(("a", [0], 0, 2))
            ref = torch.arange(size, dtype=torch.int64)
            step = worker.save(worker.rows(2), {"ref": ref})
            same(worker.cache.materialize(step, ["a"]).mm_outputs["ref"]["a"], ref, "a leftover")
            worker.begin(finished=["a"])
    finally:
        worker.close()


def unpinned(bed: Bed, socket: Path) -> None:
    """Memory that cannot be pinned: slower, and nothing else."""
    worker = Worker(bed, socket, device=bed.unpinned())
    try:
        worker.begin(("a", [0], 0, 16))
        made = worker.rows(16)
        worker.cache.discard_step(worker.save(made))
        worker.begin(("b", [0, 1], 16, 1))
        tail = worker.rows(1)
        merged = worker.cache.materialize(worker.save(tail), ["b"])
        same(merged.hidden_states["b"], torch.cat([made, tail]), "a hit's rows")
    finally:
        worker.close()


def graph_replay(bed: Bed, socket: Path) -> None:
    """A CUDA graph writes the same buffer at every replay; the next one is given to the device right after the save."""
    worker = Worker(bed, socket)
    try:
        count, width = 16, worker.hidden
        source = torch.zeros(count, width, device="cuda", dtype=torch.bfloat16)
        live = torch.zeros_like(source)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            live.copy_(source)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            live.copy_(source)
        steps = []
        for turn in range(4):
            worker.begin((f"a{turn}", [turn], 0, count))
            made = worker.rows(count)
            source.copy_(made)
            graph.replay()
            step = worker.cache.save_outputs(live, None, num_tokens_unpadded=count, num_tokens_padded=count)
            steps.append((turn, step, made))
        for turn, step, made in steps:
            same(worker.cache.materialize(step, [f"a{turn}"]).hidden_states[f"a{turn}"], made, f"replay {turn}")
    finally:
        worker.close()


CASES: tuple[Callable[[Bed, Path], None], ...] = (
    overwritten_live_buffers,
    padded_batches,
    deferred_under_pressure,
    late_materialize,
    leftovers,
    unpinned,
)
GPU_CASES: tuple[Callable[[Bed, Path], None], ...] = (graph_replay,)
