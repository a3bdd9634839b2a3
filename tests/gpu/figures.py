"""Figures of the GPU path: bandwidth into pinned pages, the engine thread's time, what is hidden behind compute."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch

from tests.gpu.beds import CudaBed, Worker

HIDDEN = 4096
REQUESTS = 64
FORWARD_MS = 10.0
COPY_TOKENS = 8192
SHARE_OF_TORCH = 0.95
ENGINE_US = 150.0
GAP_SHARE = 0.02


@dataclass
class Row:
    """One line of the table. verdict: ok, MISSED, FAILED, skipped, or - where nothing is wanted."""

    what: str
    seen: str
    wanted: str = ""
    verdict: str = "-"
    value: float | None = None
    note: str = ""


def judged(what: str, value: float, seen: str, wanted: str, good: bool, note: str = "") -> Row:
    return Row(what, seen, wanted, "ok" if good else "MISSED", value, note)


# -------------------------------------------------------------- bandwidth


def bandwidth(bed: CudaBed, socket: Path) -> list[Row]:
    """Device to host, 64 MiB a copy, on one stream: into our pages, torch's pinned memory, pageable memory."""
    worker = Worker(bed, socket, hidden=HIDDEN, capacity=COPY_TOKENS, num_blocks=64, depth=2)
    try:
        key = worker.cache.session.keys[0]
        pins = worker.cache._saver._device.pins  # type: ignore[attr-defined]
        source = torch.empty(COPY_TOKENS, HIDDEN, device="cuda", dtype=torch.bfloat16).normal_()
        theirs = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
        pageable = torch.empty(source.shape, dtype=source.dtype)
        ours = key.pages[0][:COPY_TOKENS]
        speed = {
            name: _gbps(host, source) for name, host in (("ours", ours), ("torch", theirs), ("pageable", pageable))
        }
        again = _gbps(ours, source)
        best = max(speed["ours"], again)
        pinned = pins.unpinned_bytes == 0
        return [
            Row(
                "pages, arena and own memory pinned",
                f"{pins.pinned_bytes >> 20} MiB pinned, {pins.unpinned_bytes >> 20} MiB not",
                "all",
                "ok" if pinned else "MISSED",
                float(pins.pinned_bytes),
                pins.cause,
            ),
            Row("device to host, torch's pinned memory", f"{speed['torch']:.1f} GB/s", value=speed["torch"]),
            Row("device to host, pageable memory", f"{speed['pageable']:.1f} GB/s", value=speed["pageable"]),
            judged(
                "device to host, staging page",
                best,
                f"{best:.1f} GB/s, {best / speed['torch']:.0%} of torch's pinned",
                f"{SHARE_OF_TORCH:.0%}",
                best >= SHARE_OF_TORCH * speed["torch"],
            ),
        ]
    finally:
        worker.close()


def _gbps(host: torch.Tensor, source: torch.Tensor, rounds: int = 12) -> float:
    """Bytes of the median copy over its time on the stream."""
    times = []
    for _ in range(rounds + 2):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        host.copy_(source, non_blocking=True)
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return source.numel() * source.element_size() / statistics.median(times[2:]) / 1e6


# ----------------------------------------------------------- engine thread


class Forward:
    """Matrix products that keep the device busy for about ``milliseconds``, then hidden states in a live buffer."""

    def __init__(self, tokens: int, milliseconds: float) -> None:
        self._left = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
        self._right = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
        self._out = torch.empty_like(self._left)
        self.live = torch.zeros(tokens, HIDDEN, device="cuda", dtype=torch.bfloat16)
        self._times = 1
        self._times = max(1, round(self._times * milliseconds / max(self.measure(), 1e-3)))
        self.ms = self.measure()

    def __call__(self) -> torch.Tensor:
        for _ in range(self._times):
            torch.matmul(self._left, self._right, out=self._out)
        self.live.add_(1)
        return self.live

    def measure(self) -> float:
        times = []
        for _ in range(7):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            self()
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end))
        return statistics.median(times[2:])


def engine_thread(bed: CudaBed, socket: Path, steps: int = 200) -> list[Row]:
    """begin + save + materialize of a decode step. The runner waits for the forward before materialize, as for its
    sampled tokens; that wait is not counted, what materialize itself waits for is.
    """
    forward = Forward(REQUESTS, FORWARD_MS)
    off = _decode(forward, steps, None)
    rows = [Row("forward of a decode step", f"{forward.ms:.1f} ms", value=forward.ms)]
    rows.append(Row("step, cache off", f"{off['step']:.2f} ms", value=off["step"]))
    rows.append(_peer_row(forward, steps))
    worker = Worker(bed, socket, hidden=HIDDEN, capacity=1024, num_blocks=4096)
    try:
        ours = _decode(forward, steps, worker)
    finally:
        worker.close()
    rows.append(Row("step, ours", f"{ours['step']:.2f} ms", value=ours["step"]))
    parts = ", ".join(f"{name} {ours[name]:.0f}" for name in ("begin", "save", "materialize"))
    rows.append(
        judged(
            f"engine thread, {REQUESTS} requests, hidden {HIDDEN}",
            ours["engine"],
            f"{ours['engine']:.0f} µs (p90 {ours['p90']:.0f}; {parts})",
            f"under {ENGINE_US:.0f} µs",
            ours["engine"] < ENGINE_US,
        )
    )
    return rows


def _decode(forward: Forward, steps: int, worker: Any) -> dict[str, float]:
    """Medians: engine, begin, save, materialize in µs, p90 of engine; step in ms. worker None: no cache. Making the
    scheduler's output and the live batch is outside of all of them.
    """
    spans: dict[str, list[float]] = {"begin": [], "save": [], "materialize": [], "step": []}
    ids = [f"r{row}" for row in range(REQUESTS)]
    clock = time.perf_counter
    for number in range(steps + 20):
        batch = [(req, range(32 * row, 32 * row + 32), number, 1) for row, req in enumerate(ids)]
        plan = worker.plan(*batch) if worker is not None else None
        started = clock()
        if worker is not None:
            worker.cache.new_step_starts(plan)
        begun = clock()
        if worker is not None:
            worker.show(*batch)
        shown = clock()
        live = forward()
        launched = clock()
        step = None
        if worker is not None:
            step = worker.cache.save_outputs(live, {}, num_tokens_unpadded=REQUESTS, num_tokens_padded=REQUESTS)
        saved = clock()
        done = torch.cuda.Event()
        done.record()
        done.synchronize()
        synced = clock()
        if worker is not None:
            worker.cache.materialize(step, ids)
        ended = clock()
        if number >= 20:
            spans["begin"].append(begun - started)
            spans["save"].append(saved - launched)
            spans["materialize"].append(ended - synced)
            spans["step"].append(ended - started - (shown - begun))
    engine = sorted(sum(parts) for parts in zip(spans["begin"], spans["save"], spans["materialize"], strict=True))
    found = {name: 1e6 * statistics.median(values) for name, values in spans.items()}
    found["step"] /= 1e3
    return {**found, "engine": 1e6 * statistics.median(engine), "p90": 1e6 * engine[len(engine) * 9 // 10]}


def _peer_row(forward: Forward, steps: int) -> Row:
    what = "engine thread, in-process peer"
    try:
        peer = _decode(forward, steps, _peer())
    except ImportError as error:
        return Row(what, "", "", "skipped", None, f"vLLM-Omni is not here: {error}")
    except Exception as error:
        return Row(what, "", "", "skipped", None, f"{type(error).__name__}: {error}")
    seen = f"{peer['engine']:.0f} µs (p90 {peer['p90']:.0f}), step {peer['step']:.2f} ms"
    return Row(what, seen, value=peer["engine"])


def _peer() -> Any:
    """vLLM-Omni's manager behind what ``_decode`` calls."""
    from stagecache.bench.batch import BenchRequest, LiveBatch

    from vllm_omni.core.prefix_cache import (  # isort: skip
        FullAttentionGroupView,
        ModelCachePolicy,
        OmniPrefixCacheManager,
        PrefixCacheConfig,
    )

    batch = LiveBatch(REQUESTS, 4096)
    config = PrefixCacheConfig(num_blocks=4096, block_size=16, staging_depth=4, staging_capacity_tokens=1024)
    manager = OmniPrefixCacheManager(config, FullAttentionGroupView(batch.as_input_batch(), 16))
    manager.register_policy(ModelCachePolicy())
    requests: list[Any] = []

    class Peer:
        cache = manager

        @staticmethod
        def plan(*rows: Any) -> Any:
            if not requests:
                requests.extend(BenchRequest(req, list(blocks)) for req, blocks, *_ in rows)
            return batch.plan(requests, [1] * len(requests))

        @staticmethod
        def show(*_: Any) -> None:
            """``plan`` has done it."""

    return Peer


# ---------------------------------------------------------------- overlap


def overlap(bed: CudaBed, socket: Path, steps: int = 40) -> list[Row]:
    """Prefill steps of 8192 tokens, 64 MiB each, given to the device without waiting; a thread materializes. The gap is
    what a step of the compute stream takes longer than without the cache.
    """
    forward = Forward(COPY_TOKENS, FORWARD_MS)
    alone = _stream_ms(forward, steps, lambda live, number: None)
    worker = Worker(bed, socket, hidden=HIDDEN, capacity=COPY_TOKENS, num_blocks=2 * COPY_TOKENS // 16 * 4)
    inbox: SimpleQueue[int | None] = SimpleQueue()

    def consume() -> None:
        while (step := inbox.get()) is not None:
            worker.cache.discard_step(step)

    thread = threading.Thread(target=consume)
    thread.start()
    blocks = COPY_TOKENS // 16
    clone_ms = _clone_ms(forward.live)
    copy_ms = forward.live.numel() * 2 / _gbps(torch.empty(forward.live.shape, dtype=torch.bfloat16, pin_memory=True),
                                               forward.live) / 1e6  # fmt: skip

    def with_cache(live: torch.Tensor, number: int) -> None:
        slots = range(number % 4 * blocks, (number % 4 + 1) * blocks)
        worker.begin((f"p{number}", slots, 0, COPY_TOKENS), finished=[f"p{number - 1}"] if number else [])
        inbox.put(worker.cache.save_outputs(live, None, num_tokens_unpadded=COPY_TOKENS, num_tokens_padded=COPY_TOKENS))

    try:
        ours = _stream_ms(forward, steps, with_cache)
    finally:
        inbox.put(None)
        thread.join()
        worker.close()
    gap = max(ours - alone - clone_ms, 0.0)
    hidden = max(0.0, 1 - (ours - alone) / copy_ms)
    return [
        Row("clone of 64 MiB on the compute stream", f"{clone_ms:.3f} ms", value=clone_ms),
        Row("copy of 64 MiB on the copy stream", f"{copy_ms:.2f} ms", value=copy_ms),
        Row("share of the copy hidden behind compute", f"{hidden:.0%}", value=hidden),
        judged(
            "gap in the compute stream, beyond the clone",
            gap,
            f"{gap:.3f} ms of {alone:.2f} ms",
            f"under {GAP_SHARE:.0%}",
            gap < GAP_SHARE * alone,
        ),
    ]


def _stream_ms(forward: Forward, steps: int, after: Callable[[torch.Tensor, int], None]) -> float:
    """Milliseconds of the compute stream for each step, from the first forward to the last."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    for number in range(steps + 4):
        if number == 4:
            begin.record()
        after(forward(), number)
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / steps


def _clone_ms(live: torch.Tensor) -> float:
    times = []
    for _ in range(7):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        live.clone()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times[2:])


FIGURES: tuple[tuple[str, Callable[[CudaBed, Path], list[Row]]], ...] = (
    ("bandwidth into pinned pages", bandwidth),
    ("engine thread of a decode step", engine_thread),
    ("copies behind compute", overlap),
)
