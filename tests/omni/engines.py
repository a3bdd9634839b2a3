"""Engines of one stage each, in this process, and what their requests hand on."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

BLOCK = 32
STAGES = {"thinker": "tests.omni.ar_worker.ThinkerWorker", "talker": "tests.omni.ar_worker.TalkerWorker"}

Rows = dict[str, dict[str, torch.Tensor]]
"""By prompt and key: all rows that the prompt's steps handed on, in order."""


def tokens(seed: int, count: int) -> list[int]:
    return [10 + (seed * 131 + (seed + 7) * position) % 900 for position in range(count)]


def engine_arguments(checkpoint: Path, stage: str, **changes: Any) -> dict[str, Any]:
    return {
        "model": str(checkpoint),
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "enable_prefix_caching": True,
        "dtype": "float32",
        "block_size": BLOCK,
        "max_model_len": 512,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 128,
        "kv_cache_memory_bytes": 16 << 20,
        "use_tqdm_on_load": False,
        "seed": 0,
        "worker_cls": STAGES[stage],
        **changes,
    }


@contextlib.contextmanager
def environment(values: Mapping[str, str | None]) -> Iterator[None]:
    """Environment variables for a while; None unsets one."""
    before = {name: os.environ.get(name) for name in values}
    try:
        _set(values)
        yield
    finally:
        _set(before)


def _set(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@contextlib.contextmanager
def stage_engine(checkpoint: Path, stage: str, socket: object = None, **changes: Any) -> Iterator[StageEngine]:
    """An engine of one stage; with a socket it is hooked as the plugin hooks it."""
    from vllm import LLM

    from stagecache.shim import plugin

    with environment({"STAGECACHE_SOCKET": None if socket is None else str(socket), "STAGECACHE_STAGE": None}):
        plugin.register()
        llm = LLM(**engine_arguments(checkpoint, stage, **changes))
        try:
            yield StageEngine(llm, stage)
        finally:
            llm.llm_engine.engine_core.shutdown()
            del llm
            gc.collect()


class StageEngine:
    """Runs prompts and collects what their requests hand on."""

    def __init__(self, llm: Any, stage: str) -> None:
        from tests.omni.ar_worker import RUNNERS

        self.llm = llm
        self.stage = stage
        self.runner = RUNNERS[stage]
        self.cached_tokens: dict[str, int] = {}
        self.generated: dict[str, list[int]] = {}

    @property
    def manager(self) -> Any:
        return self.runner.omni_prefix_cache

    def add(self, prompts: Mapping[str, list[int]], max_tokens: int = 1) -> None:
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, detokenize=False, ignore_eos=True)
        for name, prompt in prompts.items():
            self.llm.llm_engine.add_request(name, {"prompt_token_ids": prompt}, params)

    def step(self) -> bool:
        """One engine step, where there is anything to do; whether there is more."""
        if not self.llm.llm_engine.has_unfinished_requests():
            return False
        for output in self.llm.llm_engine.step():
            if output.finished:
                self.cached_tokens[output.request_id] = output.num_cached_tokens
                self.generated[output.request_id] = list(output.outputs[0].token_ids)
        return bool(self.llm.llm_engine.has_unfinished_requests())

    def run(self, prompts: Mapping[str, list[int]], max_tokens: int = 1) -> Rows:
        """Run prompts together."""
        return run_together([self], prompts, max_tokens)[self.stage]


def run_together(engines: list[StageEngine], prompts: Mapping[str, list[int]], max_tokens: int = 1) -> dict[str, Rows]:
    """Run the same prompts on every engine, a step of each in turn; rows by stage."""
    from tests.omni.ar_worker import STEPS

    for engine in engines:
        STEPS[engine.stage].clear()
        engine.add(prompts, max_tokens)
    while sum(engine.step() for engine in engines):
        pass
    return {engine.stage: collected(STEPS[engine.stage]) for engine in engines}


def collected(steps: list[dict[str, dict[str, torch.Tensor]]]) -> Rows:
    """Rows of each request over all steps, by its external id."""
    parts: dict[str, dict[str, list[torch.Tensor]]] = {}
    for step in steps:
        for req_id, payload in step.items():
            for key, rows in (payload or {}).items():
                if isinstance(rows, torch.Tensor):
                    parts.setdefault(req_id[:-9], {}).setdefault(key, []).append(rows)
    return {req_id: {key: torch.cat(rows) for key, rows in keys.items()} for req_id, keys in parts.items()}
