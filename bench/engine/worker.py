"""The process of one engine: reads a piece of work a line, does it, answers a line (``processes`` is its owner)."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from bench.engine.hits import hit_tokens
from bench.engine.processes import EngineSettings
from bench.engine.rows_seen import RowsSeen, complete, equal_prefix
from bench.engine.shim_cpu import OwnCpu, meter_engine_thread, shim_threads_s
from stagecache.local_engine import running_engine

if TYPE_CHECKING:
    import torch

#: Tokens of the checkpoint's vocabulary that prompts are made of.
_TOKENS = range(3, 2000)


class Driver:
    """Does the work; each public method is one, named by its owner."""

    def __init__(self, engine: Any, settings: EngineSettings, own: OwnCpu | None) -> None:
        self._engine = engine
        self._settings = settings
        self._own = own
        self._rows = RowsSeen()
        self._count = 0
        self._document: list[int] = []
        self._document_rows: torch.Tensor | None = None
        if own is not None:
            from stagecache.shim.steps import on_step

            on_step(own.inner(self._rows))

    # ------------------------------------------------------------------ work

    def seed(self, *, length: int, seed: str) -> dict[str, Any]:
        """Compute the document whose beginning later prompts share, and warm up what a first request meets."""
        self._document = _tokens(seed, length)
        self._rows.keep = self._own is not None
        name = self._run(self._document, 2)
        first = self._rows.forget(name).first
        self._document_rows = None if first is None else first.clone()
        self._rows.keep = False
        for number in range(4):
            self._rows.forget(self._run(_tokens(f"{seed} {number}", 96), 8))
        return {}

    def serve(self, *, rates: Sequence[int], length: int, output: int, seed: str) -> list[dict[str, Any]]:
        """One request after another, each with its hit rate in percent. Seconds to the first token and between tokens.

        Before them one that is not measured: what ran meanwhile in other processes has emptied the CPU's caches.
        """
        self._rows.forget(self._run(_tokens(f"{seed} warm-up", 96), 4))
        found = []
        for rate in rates:
            hit = hit_tokens(length, rate, self._settings.block_size)
            tokens = self._document[:hit] + _tokens(f"{seed} {rate}", length - hit)
            self._rows.keep = self._own is not None
            gc.collect()
            found.append({"rate": rate, "hit": hit, **self._serve_one(tokens, output, hit)})
            self._rows.keep = False
        return found

    def batch(self, *, rate: int, requests: int, length: int, output: int, seed: str) -> dict[str, Any]:
        """Requests that all come at once: seconds until the last one ends, and the process' CPU seconds meanwhile."""
        self._rows.forget(self._run(_tokens(f"{seed} warm-up", 96), 4))
        hit = hit_tokens(length, rate, self._settings.block_size) if rate else 0
        prompts = [self._document[:hit] + _tokens(f"{seed} {n}", length - hit) for n in range(requests)]
        gc.collect()
        own, threads = self._shim_s()
        begun, begun_cpu = time.perf_counter(), time.process_time()
        names = [self._add(tokens, output) for tokens in prompts]
        cached: dict[str, int] = {}
        while self._engine.has_unfinished_requests():
            for each in self._engine.step():
                if each.finished:
                    cached[each.request_id] = int(each.num_cached_tokens or 0)
        cpu, wall = time.process_time() - begun_cpu, time.perf_counter() - begun
        own_after, threads_after = self._shim_s()
        return {
            "wall_s": wall,
            "cpu_s": cpu,
            "shim_cpu_s": own_after - own,
            "shim_threads_s": threads_after - threads,
            "hit": hit,
            "cached": [cached.get(name, -1) for name in names],
            "complete": [self._complete(name, length, output, hit) for name in names],
        }

    def decode(self, *, requests: int, steps: int, seed: str) -> dict[str, Any]:
        """Decode steps of a batch without hits: CPU, wall and shim seconds of each."""
        warm_up = 8
        for number in range(requests):
            self._add(_tokens(f"{seed} {number}", 48), steps + warm_up + 1)
        for _ in range(warm_up):  # The prefill, and steps that warm up.
            self._engine.step()
        cpu, wall, shim = [], [], []
        threads = self._shim_s()[1]
        for _ in range(steps):
            own, begun_cpu, begun = self._shim_s()[0], time.process_time(), time.perf_counter()
            self._engine.step()
            wall.append(time.perf_counter() - begun)
            cpu.append(time.process_time() - begun_cpu)
            shim.append(self._shim_s()[0] - own)
        threads = self._shim_s()[1] - threads
        while self._engine.has_unfinished_requests():
            self._engine.step()
        self._rows.by_name.clear()
        return {"cpu": cpu, "wall": wall, "shim": shim, "shim_threads_s": threads}

    # --------------------------------------------------------------- helpers

    def _serve_one(self, tokens: list[int], output: int, hit: int) -> dict[str, Any]:
        own, threads = self._shim_s()
        begun, begun_cpu = time.perf_counter(), time.process_time()
        name = self._add(tokens, output)
        first = first_cpu = own_first = 0.0
        last: Any = None
        while self._engine.has_unfinished_requests():
            for last in self._engine.step():
                if not first and last.outputs[0].token_ids:
                    first, first_cpu, own_first = time.perf_counter(), time.process_time(), self._own_s()
        done, done_cpu = time.perf_counter(), time.process_time()
        own_after, threads_after = self._shim_s()
        found = {
            "ttft_s": first - begun,
            "tpot_s": (done - first) / (output - 1),
            "first_cpu_s": first_cpu - begun_cpu,
            "cpu_s": done_cpu - begun_cpu,
            "shim_first_cpu_s": own_first - own,
            "shim_cpu_s": own_after - own,
            "shim_threads_s": threads_after - threads,
            "cached": int(last.num_cached_tokens or 0),
        }
        rows = self._rows.by_name[name].first if self._own is not None else None
        equal = None
        if rows is not None and self._document_rows is not None:
            equal = equal_prefix(rows, self._document_rows, hit)
        return {**found, "equal": equal, "complete": self._complete(name, len(tokens), output, hit)}

    def _complete(self, name: str, length: int, output: int, hit: int) -> bool | None:
        """Whether the consumer got every row; None without the shim."""
        seen = self._rows.forget(name)
        return None if self._own is None else complete(seen, length, output, hit)

    def _add(self, tokens: Sequence[int], output: int) -> str:
        from vllm import SamplingParams

        self._count += 1
        name = f"request-{self._count}"
        params = SamplingParams(max_tokens=output, temperature=0.0, detokenize=False, ignore_eos=True)
        self._engine.add_request(name, {"prompt_token_ids": list(tokens)}, params)
        return name

    def _run(self, tokens: Sequence[int], output: int) -> str:
        name = self._add(tokens, output)
        while self._engine.has_unfinished_requests():
            self._engine.step()
        return name

    def _own_s(self) -> float:
        return 0.0 if self._own is None else self._own.cpu_s

    def _shim_s(self) -> tuple[float, float]:
        """CPU seconds so far: the shim's on the engine's thread, and its own threads'."""
        return (0.0, 0.0) if self._own is None else (self._own.cpu_s, shim_threads_s())


def _tokens(seed: str, length: int) -> list[int]:
    """Tokens that begin no other prompt, the same for each engine."""
    return random.Random(seed).choices(_TOKENS, k=length)


def main(argv: Sequence[str]) -> None:
    """Start the engine that argv's JSON describes, and do what comes on the standard input until that ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # What the engine prints goes to the log.
    settings = EngineSettings(**json.loads(argv[0]))
    own = OwnCpu() if os.environ.get("STAGECACHE_SOCKET") else None
    if own is not None:
        meter_engine_thread(own)
    arguments = {
        "model": settings.checkpoint,
        "skip_tokenizer_init": True,
        "enable_prefix_caching": settings.prefix_caching,
        "dtype": "bfloat16",
        "block_size": settings.block_size,
        "max_model_len": settings.max_len,
        "max_num_seqs": settings.max_seqs,
        "max_num_batched_tokens": settings.max_batched_tokens,
        "kv_cache_memory_bytes": settings.kv_bytes,
    }
    with running_engine(arguments) as engine, contextlib.closing(answers):
        driver = Driver(engine, settings, own)
        answers.write(json.dumps({"pid": os.getpid()}) + "\n")
        for line in sys.stdin:
            asked = json.loads(line)
            work: Callable[..., Any] = getattr(driver, asked.pop("work"))
            answers.write(json.dumps(work(**asked)) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
