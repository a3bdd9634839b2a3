"""Runs the demo's requests through a real vLLM engine in this process and records every prompt's rows."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stagecache.demo.workload import DemoRequest
from stagecache.local_engine import running_engine
from stagecache.shim.assemble import PromptAssembler, PromptRows
from stagecache.shim.steps import StepRows, external_id, on_step


@dataclass(frozen=True)
class EngineSettings:
    """How the engine is set up; lengths in tokens.

    Attributes:
        checkpoint: the model's directory.
        dtype: of weights and rows: float32, bfloat16 or float16.
        block_size: tokens in a KV block; a multiple of 32 on the CPU engine.
        max_len: longest request, prompt and output.
        max_seqs: requests in one batch.
        max_batched_tokens: tokens of one step; longer prefills are chunked.
        kv_bytes: bytes of the KV cache.
        output_tokens: tokens that each request generates.
    """

    checkpoint: Path
    dtype: str = "float32"
    block_size: int = 32
    max_len: int = 1024
    max_seqs: int = 8
    max_batched_tokens: int = 512
    kv_bytes: int = 64 << 20
    output_tokens: int = 6


@dataclass(frozen=True)
class StepSample:
    """One engine step.

    Attributes:
        step_s: seconds of the engine's execute_model.
        shim_s: seconds that the row cache added on the engine's thread.
        computed: tokens that the step computed.
        from_cache: rows that the cache gave back in it.
        requests: requests in the batch.
    """

    step_s: float
    shim_s: float
    computed: int
    from_cache: int
    requests: int


@dataclass
class Recording:
    """What one engine did with all requests.

    Attributes:
        prompts: each request's full-prompt rows.
        hit_tokens: prompt tokens that the engine took from its prefix cache, by request.
        steps: every step with tokens, in order.
        run_s: seconds from the first request to the last answer.
        start_s: seconds that the engine took to start.
    """

    prompts: dict[str, PromptRows] = field(default_factory=dict)
    hit_tokens: dict[str, int] = field(default_factory=dict)
    steps: list[StepSample] = field(default_factory=list)
    run_s: float = 0.0
    start_s: float = 0.0


def record(
    settings: EngineSettings,
    waves: Sequence[Sequence[DemoRequest]],
    *,
    prefix_caching: bool,
    on_start: Callable[[], None],
    on_prompt: Callable[[], None],
    on_step_done: Callable[[], None] = lambda: None,
) -> Recording:
    """Run the waves one after another and record rows, hits and steps.

    Args:
        settings: of the engine.
        waves: requests that run together; a wave starts when the one before it has ended.
        prefix_caching: the engine's prefix caching, and with it the row cache.
        on_start: called when the engine is ready.
        on_prompt: called when a prompt's rows are complete.
        on_step_done: called between engine steps; what it raises ends the run.
    """
    recording = Recording()

    def keep(prompt: PromptRows) -> None:
        recording.prompts[external_id(prompt.req_id)] = prompt
        on_prompt()

    def sample(rows: StepRows) -> None:
        if rows.req_ids:
            computed = sum(rows.num_scheduled.values())
            cached = sum(max(0, rows.rows_from_cache(req_id)) for req_id in rows.req_ids)
            recording.steps.append(StepSample(rows.step_s, rows.shim_s, computed, cached, len(rows.req_ids)))

    started = time.perf_counter()
    with running_engine(_arguments(settings, prefix_caching)) as running, contextlib.ExitStack() as subscriptions:
        recording.start_s = time.perf_counter() - started
        _warm_up(running, settings)
        on_start()
        subscriptions.callback(on_step(PromptAssembler(keep)))
        subscriptions.callback(on_step(sample))
        started = time.perf_counter()
        for wave in waves:
            _run_wave(running, settings, wave, recording, on_step_done)
        recording.run_s = time.perf_counter() - started
    return recording


def _arguments(settings: EngineSettings, prefix_caching: bool) -> dict[str, Any]:
    return {
        "model": str(settings.checkpoint),
        "skip_tokenizer_init": True,
        "enable_prefix_caching": prefix_caching,
        "dtype": settings.dtype,
        "block_size": settings.block_size,
        "max_model_len": settings.max_len,
        "max_num_seqs": settings.max_seqs,
        "max_num_batched_tokens": settings.max_batched_tokens,
        "kv_cache_memory_bytes": settings.kv_bytes,
    }


def _warm_up(running: Any, settings: EngineSettings) -> None:
    """Let the engine pay for its first steps, with prompts that share nothing with the requests."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=3, temperature=0.0, detokenize=False, ignore_eos=True)
    for number in range(settings.max_seqs):
        length = settings.max_batched_tokens // 4 - number
        tokens = [3 + (7 * number + 5 * position) % 200 for position in range(length)]
        running.add_request(f"warm-up-{number}", {"prompt_token_ids": tokens}, params)
    while running.has_unfinished_requests():
        running.step()


def _run_wave(
    running: Any,
    settings: EngineSettings,
    wave: Sequence[DemoRequest],
    recording: Recording,
    on_step_done: Callable[[], None],
) -> None:
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=settings.output_tokens, temperature=0.0, detokenize=False, ignore_eos=True)
    for request in wave:
        running.add_request(request.req_id, {"prompt_token_ids": list(request.tokens)}, params)
    while running.has_unfinished_requests():
        for output in running.step():
            if output.finished:
                recording.hit_tokens[output.request_id] = int(output.num_cached_tokens or 0)
        on_step_done()
