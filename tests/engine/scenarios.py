"""What the engine tests run, each in a process of its own: ``python scenarios.py NAME DIRECTORY [ARGUMENT]``.

A scenario prints one JSON object on its last line. Engines run as a user's would: the plugin comes in by its entry
point, switched on by the environment that the test sets.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from stagecache.errors import StageCacheError

BLOCK = 32


def tokens(seed: int, count: int) -> list[int]:
    return [10 + (seed * 131 + (seed + 7) * position) % 900 for position in range(count)]


SHARED = tokens(1, 150)
"""Rounds run one after another, the prompts of a round together."""
ROUNDS: tuple[dict[str, list[int]], ...] = (
    {"first": SHARED},
    {"shares_prefix": SHARED[:110] + tokens(2, 60), "same_again": SHARED},
    {"twin_a": tokens(3, 130), "twin_b": tokens(3, 130)},
    {"chunked": SHARED + tokens(4, 300)},
    {"exact_blocks": SHARED[: 4 * BLOCK]},
)


def make_engine(checkpoint: Path, **changes: Any) -> Any:
    from vllm import LLM

    return LLM(
        **{
            "model": str(checkpoint),
            "skip_tokenizer_init": True,
            "enforce_eager": True,
            "enable_prefix_caching": True,
            "dtype": "float32",
            "block_size": BLOCK,
            "max_model_len": 512,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 256,
            "kv_cache_memory_bytes": 16 << 20,
            "use_tqdm_on_load": False,
            "seed": 0,
            **changes,
        }
    )


def generate(llm: Any, prompts: dict[str, list[int]], max_tokens: int = 3, lora: Any = None) -> dict[str, Any]:
    """Run prompts together under ids of ours, with a LoRARequest; their outputs by id."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, detokenize=False, ignore_eos=True)
    for name, prompt in prompts.items():
        llm.llm_engine.add_request(name, {"prompt_token_ids": prompt}, params, lora_request=lora)
    finished = {}
    while llm.llm_engine.has_unfinished_requests():
        for output in llm.llm_engine.step():
            if output.finished:
                finished[output.request_id] = output
    return finished


def stop(llm: Any) -> None:
    llm.llm_engine.engine_core.shutdown()


def recorded(run: Callable[[], object]) -> dict[str, Any]:
    """The prompts that complete while ``run`` runs, by external id."""
    from stagecache.shim.assemble import PromptAssembler
    from stagecache.shim.vllm import external_id, on_step

    prompts: dict[str, Any] = {}
    unsubscribe = on_step(PromptAssembler(lambda prompt: prompts.__setitem__(external_id(prompt.req_id), prompt)))
    try:
        run()
    finally:
        unsubscribe()
    return prompts


def judge(mine: Any, reference: Any, hit: int) -> dict[str, Any]:
    import torch

    shifted = mine.hidden.roll(1, dims=0)
    return {
        "shape": list(mine.hidden.shape),
        "hit": hit,
        "from_cache": mine.from_cache,
        "steps": mine.steps,
        "equal": torch.equal(mine.hidden, reference),
        "close": torch.allclose(mine.hidden, reference, atol=1e-4),
        "shifted_close": torch.allclose(shifted, reference, atol=1e-4),
    }


def in_process(checkpoint: Path, out: Path) -> dict[str, Any]:
    """Every round with the cache; the same prompts without prefix caching, kept as safetensors for other tests."""
    from stagecache.shim.sinks import write_hidden_states
    from stagecache.shim.vllm import on_step

    rounds = [dict(prompts) for prompts in ROUNDS]
    hits: dict[str, int] = {}
    llm = make_engine(checkpoint)

    def with_cache() -> None:
        for prompts in rounds:
            hits.update({name: output.num_cached_tokens for name, output in generate(llm, prompts).items()})

    cached = recorded(with_cache)
    steps: list[Any] = []
    unsubscribe = on_step(steps.append)
    answer = generate(llm, {"talker": tokens(5, 90)}, max_tokens=45)["talker"]
    # Its output is part of the next prompt, so that a hit has rows that decode made.
    continued = {"after_decode": tokens(5, 90) + list(answer.outputs[0].token_ids) + tokens(6, 20)}
    unsubscribe()
    rounds.append(continued)

    def after_decode() -> None:
        hits.update({name: output.num_cached_tokens for name, output in generate(llm, continued).items()})

    cached |= recorded(after_decode)
    stop(llm)
    llm = make_engine(checkpoint, enable_prefix_caching=False)
    uncached = recorded(lambda: [generate(llm, prompts) for prompts in rounds])
    stop(llm)
    for name, prompt in uncached.items():
        write_hidden_states(out / f"{name}.safetensors", prompt.hidden, {})
    (out / "prompts.jsonl").write_text(
        "".join(json.dumps({"id": n, "tokens": t}) + "\n" for prompts in rounds for n, t in prompts.items())
    )
    return {
        "prompts": {name: judge(cached[name], uncached[name].hidden, hits[name]) for name in cached},
        "uncached_from_cache": sum(prompt.from_cache for prompt in uncached.values()),
        "decode_steps": [
            [rows.num_scheduled[r], rows.first_position(r), list(rows.hidden[r].shape)]
            for rows in steps
            for r in rows.req_ids
        ][1:],
    }


def preempted(checkpoint: Path, out: Path) -> dict[str, Any]:
    """Few blocks and long answers: requests are preempted, resumed with hits, and prompts come complete nonetheless."""
    from stagecache.shim.vllm import on_step

    prompts = {f"r{number}": SHARED[:40] + tokens(20 + number, 60) for number in range(6)}
    resumed: list[str] = []
    llm = make_engine(checkpoint, num_gpu_blocks_override=19)
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    original = scheduler.schedule

    def schedule(*args: Any, **kwargs: Any) -> Any:
        output = original(*args, **kwargs)
        cached = output.scheduled_cached_reqs
        resumed.extend(
            r
            for r, n in zip(cached.req_ids, cached.num_computed_tokens, strict=True)
            if r in cached.resumed_req_ids and n
        )
        return output

    scheduler.schedule = schedule
    spans: dict[str, list[tuple[int, int]]] = {}

    def keep(rows: Any) -> None:
        for r in rows.req_ids:
            spans.setdefault(r, []).append((rows.first_position(r), rows.end_position(r)))

    unsubscribe = on_step(keep)
    cached = recorded(lambda: generate(llm, prompts, max_tokens=80))
    unsubscribe()
    stop(llm)
    llm = make_engine(checkpoint, enable_prefix_caching=False)
    uncached = recorded(lambda: generate(llm, prompts))
    stop(llm)
    once = all(all(later[0] == earlier[1] for earlier, later in pairwise(all_spans)) for all_spans in spans.values())
    return {
        "resumed_with_hits": len(resumed),
        "prompts": {name: judge(cached[name], uncached[name].hidden, 0) for name in prompts},
        "every_position_once": once,
    }


def killed_daemon(checkpoint: Path, out: Path) -> dict[str, Any]:
    """The daemon is killed: once with nothing between, once with a miss and a hit while it is gone.

    After the second time, the same prompt is sent until it hits again: until the engine has forgotten its hashes of
    the time before, its hits fail.
    """
    import os
    import signal
    import time

    from stagecache.local_daemon import LocalDaemon
    from stagecache.shim.assemble import PromptAssembler
    from stagecache.shim.vllm import external_id, on_step

    cached: dict[str, Any] = {}
    errors: dict[str, str] = {}
    hits: dict[str, int] = {}
    answered: list[int] = []

    def run(name: str, prompt: list[int]) -> None:
        output = generate(llm, {name: prompt})[name]
        hits[name] = output.num_cached_tokens
        answered.append(len(output.outputs[0].token_ids))

    with LocalDaemon(out) as daemon:
        os.environ["STAGECACHE_SOCKET"] = str(daemon.socket)
        llm = make_engine(checkpoint)
        unsubscribe = on_step(
            PromptAssembler(
                lambda prompt: cached.__setitem__(external_id(prompt.req_id), prompt),
                lambda req_id, error: errors.__setitem__(external_id(req_id), type(error).__name__),
            )
        )
        run("first", SHARED)
        os.kill(daemon.pid or 0, signal.SIGKILL)
        daemon.start()
        run("adopted", SHARED)
        os.kill(daemon.pid or 0, signal.SIGKILL)
        run("miss", tokens(8, 100))
        run("hit", SHARED)
        daemon.start()
        last, deadline = "", time.monotonic() + 60
        while not (hits.get(last) and last not in errors) and time.monotonic() < deadline:
            last = f"again{len(answered)}"
            run(last, SHARED)
            time.sleep(0.05)
        unsubscribe()
        stop(llm)
    llm = make_engine(checkpoint, enable_prefix_caching=False)
    uncached = recorded(lambda: generate(llm, {"shared": SHARED, "miss": tokens(8, 100)}))
    stop(llm)
    judged = {
        name: judge(prompt, uncached["miss" if name == "miss" else "shared"].hidden, hits[name])
        for name, prompt in cached.items()
    }
    return {"answered": answered, "errors": errors, "prompts": judged, "last": last}


def late_daemon(llm: Any, out: Path) -> dict[str, Any]:
    """A daemon starts under the running engine: its hits have their rows soon, and are the bits of the first run."""
    import time

    from stagecache.local_daemon import LocalDaemon
    from stagecache.shim.assemble import PromptAssembler
    from stagecache.shim.vllm import on_step

    prompt = tokens(9, 140)
    computed = recorded(lambda: generate(llm, {"computed": prompt}))["computed"]
    prompts: list[Any] = []
    errors: list[str] = []
    unsubscribe = on_step(PromptAssembler(prompts.append, lambda _, error: errors.append(type(error).__name__)))
    with LocalDaemon(out):
        deadline = time.monotonic() + 60
        while not (prompts and prompts[-1].from_cache) and time.monotonic() < deadline:
            generate(llm, {f"late{len(prompts) + len(errors)}": prompt})
    unsubscribe()
    return judge(prompts[-1], computed.hidden, 128) | {"errors": sorted(set(errors))} if prompts else {"errors": errors}


def without_daemon(checkpoint: Path, out: Path) -> dict[str, Any]:
    """The engine runs, says once that there is no cache, and only rows of hits are missing."""
    warnings: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            warnings.append(record.getMessage())

    import vllm  # noqa: F401  its logging configuration, which clears handlers below its own

    logging.getLogger("vllm.stagecache").addHandler(Keep(logging.WARNING))
    from stagecache.shim.vllm import on_step

    llm = make_engine(checkpoint)
    silent = generate(llm, {"before": SHARED})["before"]
    whole = recorded(lambda: generate(llm, {"miss": tokens(8, 100)}))
    errors: list[str] = []

    def consume(rows: Any) -> None:
        for req_id in rows.req_ids:
            try:
                rows.hidden[req_id]
            except StageCacheError as error:
                errors.append(f"{type(error).__name__}: {error}")

    unsubscribe = on_step(consume)
    hit = generate(llm, {"hit": SHARED})["hit"]
    unsubscribe()
    late = late_daemon(llm, out)
    generate(llm, {"again": SHARED})
    raised = ""
    try:
        recorded(lambda: generate(llm, {"raises": SHARED}))
    except StageCacheError as error:
        raised = type(error).__name__
    stop(llm)
    return {
        "late": late,
        "warnings": warnings,
        "answered": [len(silent.outputs[0].token_ids), len(hit.outputs[0].token_ids)],
        "miss_rows": list(whole["miss"].hidden.shape),
        "hit_tokens": hit.num_cached_tokens,
        "errors": errors,
        "raised": raised,
    }


def refused(checkpoint: Path, out: Path) -> dict[str, Any]:
    """What the start of the engine says, by the setting that is refused."""
    import os

    said = {}
    draft = {"method": "draft_model", "model": str(checkpoint), "num_speculative_tokens": 2}
    settings: Sequence[tuple[str, dict[str, str], dict[str, Any]]] = (
        ("required", {"STAGECACHE_REQUIRED": "1"}, {}),
        ("speculative", {}, {"speculative_config": draft}),
        ("sink", {"STAGECACHE_SINK": "csv:x"}, {}),
    )
    for name, environ, changes in settings:
        before = dict(os.environ)
        os.environ.update(environ)
        try:
            make_engine(checkpoint, **changes)
            said[name] = "started"
        except Exception as error:  # what a user would see
            said[name] = f"{type(error).__name__}: {error}"
        finally:
            os.environ.clear()
            os.environ.update(before)
    said["v2_runner"] = v2_refusal(checkpoint)
    return said


def v2_refusal(checkpoint: Path) -> str:
    """What the V2 runner says when it is made with a real configuration; no CPU engine would get that far."""
    import torch
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    config = EngineArgs(model=str(checkpoint), skip_tokenizer_init=True, max_model_len=512).create_engine_config()
    try:
        GPUModelRunner(config, torch.device("cpu"))
    except StageCacheError as error:
        return f"{type(error).__name__}: {error}"
    return "made"


def spawned(checkpoint: Path, out: Path) -> dict[str, Any]:
    """Engine core and worker in processes of their own; the environment names who gets the rows."""
    llm = make_engine(checkpoint)
    hits = {}
    for prompts in ROUNDS:
        hits.update({name: output.num_cached_tokens for name, output in generate(llm, prompts).items()})
    stop(llm)
    return {"hits": hits, "patched_here": "vllm.v1.worker.gpu_model_runner" in sys.modules}


def note_step(rows: Any) -> None:
    """STAGECACHE_ON_STEP of the spawned scenario: one line a step, with the process that it ran in."""
    import os

    line = {"pid": os.getpid(), "requests": len(rows.req_ids), "cached": sum(map(rows.rows_from_cache, rows.req_ids))}
    with Path(os.environ["SCENARIO_STEPS"]).open("a") as file:
        file.write(json.dumps(line) + "\n")


SCENARIOS = (in_process, preempted, killed_daemon, without_daemon, refused, spawned)

if __name__ == "__main__":
    scenario = {f.__name__: f for f in SCENARIOS}[sys.argv[1]]
    print(json.dumps(scenario(Path(sys.argv[2]), Path(sys.argv[3]))))
