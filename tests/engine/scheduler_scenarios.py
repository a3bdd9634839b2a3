"""What the tests of the scheduler's side run: ``python scheduler_scenarios.py NAME[,NAME] CHECKPOINT DIRECTORY``.

The last line is a JSON object with the answer of each scenario by name.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from scenarios import SHARED, generate, make_engine, recorded, stop, tokens

from stagecache.control import connect_observer
from stagecache.demo.checkpoint import ModelShape, write_checkpoint
from stagecache.local_daemon import LocalDaemon
from stagecache.local_engine import environment
from stagecache.shim.assemble import PromptAssembler
from stagecache.shim.scheduler import shim_of
from stagecache.shim.vllm import external_id, on_step


def wait_for(look: Callable[[], Any], what: str) -> None:
    deadline = time.monotonic() + 20.0
    while not look():
        if time.monotonic() > deadline:
            raise TimeoutError(what)
        time.sleep(0.01)


def stagecache_reset() -> str:
    """As an operator does it; what the command said."""
    command = [sys.executable, "-m", "stagecache.cli", "reset", "stage0"]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout.strip()


class Prompts:
    """Sends the same prompt again and again, and notes what came of it."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        core = llm.llm_engine.engine_core.engine_core
        self.scheduler = core.scheduler
        self.shim: Any = shim_of(self.scheduler)
        self.cache: Any = core.model_executor.driver_worker.worker.model_runner._stagecache_shim.cache
        self.rows: dict[str, Any] = {}
        self.seen: dict[str, dict[str, int]] = {}

    def send(self, name: str) -> None:
        hits: dict[str, int] = {}

        def run() -> None:
            hits.update({n: output.num_cached_tokens for n, output in generate(self._llm, {name: SHARED}).items()})

        prompt = recorded(run)[name]
        self.rows[name] = prompt.hidden
        self.seen[name] = {
            "hit": hits[name],
            "from_cache": prompt.from_cache,
            "epoch": self.shim.epoch,
            "worker_epoch": self.cache.session.epoch,
        }


def resets(checkpoint: Path, out: Path) -> dict[str, Any]:
    """Everything that makes KV stale, each followed by the same prompt twice."""
    import torch

    other = out / "other"
    write_checkpoint(other, ModelShape(hidden=128, vocab=1024, max_len=1024), seed=1)
    llm = make_engine(checkpoint)
    prompts = Prompts(llm)
    wait_for(lambda: prompts.shim.watch.connected, "the scheduler's connection")

    def reload(path: Path) -> None:
        llm.collective_rpc("reload_weights", kwargs={"weights_path": str(path)})

    def reload_unnoticed() -> None:
        reload(other)
        prompts.shim._causes.clear()

    said = []

    def operator() -> None:
        said.append(stagecache_reset())
        wait_for(lambda: prompts.shim.pending, "the reset to arrive")

    events: dict[str, Callable[[], Any]] = {
        "start": lambda: None,
        "reload_unnoticed": reload_unnoticed,
        "reload": lambda: reload(other),
        "pause": lambda: (llm.sleep(level=0), llm.wake_up(tags=["scheduling"])),
        "sleep": lambda: (llm.sleep(level=1), llm.wake_up()),
        "reset_prefix_cache": llm.reset_prefix_cache,
        "operator": operator,
    }
    for name, event in events.items():
        event()
        prompts.send(name)
        prompts.send(f"{name}_again")
    stop(llm)
    llm = make_engine(other, enable_prefix_caching=False)
    reference = recorded(lambda: generate(llm, {"reference": SHARED}) and None)["reference"].hidden
    stop(llm)
    return {
        "seen": prompts.seen,
        "new_weights": [name for name, rows in prompts.rows.items() if torch.equal(rows, reference)],
        "said": said,
    }


def running(checkpoint: Path, out: Path) -> dict[str, Any]:
    """A reset in the middle of requests: prompts and answers are those of an undisturbed run."""
    import torch

    llm = make_engine(checkpoint, max_num_batched_tokens=64, max_model_len=256)
    prompts = {f"r{number}": SHARED[:70] + tokens(30 + number, 40) for number in range(4)}
    shim: Any = shim_of(llm.llm_engine.engine_core.engine_core.scheduler)
    wait_for(lambda: shim.watch.connected, "the scheduler's connection")
    step, runs, steps = llm.llm_engine.step, [], 0

    def stepping() -> Any:
        nonlocal steps
        steps += 1
        if steps in (3, 9, 14):
            shim.request_reset("test")
        return step()

    for disturbed in (False, True):
        llm.reset_prefix_cache()
        if disturbed:
            llm.llm_engine.step = stepping
        answers: dict[str, Any] = {}
        rows = recorded(lambda answers=answers: answers.update(generate(llm, prompts, max_tokens=12)))
        runs.append(({n: list(a.outputs[0].token_ids) for n, a in answers.items()}, rows))
    stop(llm)
    return {
        "epoch": shim.epoch,
        "same_answers": runs[0][0] == runs[1][0],
        "close_rows": [torch.allclose(runs[0][1][n].hidden, runs[1][1][n].hidden, atol=1e-4) for n in prompts],
    }


def priority(checkpoint: Path, out: Path) -> dict[str, Any]:
    """Policy priority in a cache for one long prompt; the second time without the guard."""
    import torch

    low = {"low": tokens(50, 400)}
    high = {"high": tokens(51, 64)}
    settings = {"max_num_batched_tokens": 128, "long_prefill_token_threshold": 96, "max_model_len": 448}
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=4, temperature=0.0, detokenize=False, ignore_eos=True)

    def send(llm: Any) -> dict[str, Any]:
        engine = llm.llm_engine
        answers = {}
        for prompts, rank in ((low, 5), (high, 0)):
            for name, prompt in prompts.items():
                engine.add_request(name, {"prompt_token_ids": prompt}, params, priority=rank)
            engine.step()
        while engine.has_unfinished_requests():
            answers.update({o.request_id: list(o.outputs[0].token_ids) for o in engine.step() if o.finished})
        return answers

    runs = []
    for guard in (True, False):
        llm = make_engine(checkpoint, scheduling_policy="priority", num_gpu_blocks_override=15, **settings)
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        if not guard:
            del scheduler._preempt_request  # the wrapper; the class has the engine's own
        answers: dict[str, Any] = {}
        errors: dict[str, str] = {}

        def missed(req_id: str, error: Exception, errors: dict[str, str] = errors) -> None:
            errors[external_id(req_id)] = type(error).__name__

        prompts: dict[str, Any] = {}

        def keep(prompt: Any, prompts: dict[str, Any] = prompts) -> None:
            prompts[external_id(prompt.req_id)] = prompt.hidden

        unsubscribe = on_step(PromptAssembler(keep, missed))
        answers = send(llm)
        unsubscribe()
        runs.append((answers, prompts, errors, getattr(shim_of(scheduler), "taken_back", 0)))
        stop(llm)
    llm = make_engine(checkpoint, enable_prefix_caching=False)
    answers = {}
    rows = recorded(lambda: answers.update(generate(llm, low | high, max_tokens=4)))
    stop(llm)
    truth = {name: list(answer.outputs[0].token_ids) for name, answer in answers.items()}
    return {
        name: {
            "right_answers": answered == truth,
            "right_rows": {n: torch.allclose(kept[n], rows[n].hidden, atol=1e-4) for n in kept},
            "errors": failed,
            "taken_back": taken_back,
        }
        for name, (answered, kept, failed, taken_back) in zip(("guarded", "unguarded"), runs, strict=True)
    }


def apart(checkpoint: Path, out: Path) -> dict[str, Any]:
    """The worker in a process of its own: the epoch reaches it with the scheduler output."""
    llm = make_engine(checkpoint, distributed_executor_backend="mp")
    core = llm.llm_engine.engine_core.engine_core
    shim: Any = shim_of(core.scheduler)
    hits = []
    for name in ("first", "again", "reloaded"):
        if name == "reloaded":
            llm.collective_rpc("reload_weights")
        hits.append(generate(llm, {name: SHARED})[name].num_cached_tokens)
    with connect_observer(os.environ["STAGECACHE_SOCKET"]) as observer:
        sessions = observer.stats().sessions
    stop(llm)
    return {
        "hits": hits,
        "epoch": shim.epoch,
        "worker_epochs": [session.epoch for session in sessions],
        "other_process": [session.pid != os.getpid() for session in sessions],
    }


def outage(checkpoint: Path, out: Path) -> dict[str, Any]:
    """The daemon is away for longer than its grace while steps go on, then comes back."""
    folder = out / "o"
    folder.mkdir()
    with LocalDaemon(folder) as daemon, environment({"STAGECACHE_SOCKET": str(daemon.socket)}):
        llm = make_engine(checkpoint)
        prompts = Prompts(llm)
        wait_for(lambda: prompts.shim.watch.connected, "the scheduler's connection")
        prompts.send("before")
        prompts.send("before_again")
        assert daemon.pid is not None
        os.kill(daemon.pid, signal.SIGKILL)
        generate(llm, {"meanwhile": tokens(40, 200)}, max_tokens=8)
        daemon.start()
        generate(llm, {"back": tokens(41, 60)})
        wait_for(lambda: prompts.shim.pending or prompts.shim.epoch, "the worker to ask for a reset")
        prompts.send("after")
        prompts.send("after_again")
        stop(llm)
    return prompts.seen


if __name__ == "__main__":
    scenarios = {function.__name__: function for function in (resets, running, outage, priority, apart)}
    answers = {name: scenarios[name](Path(sys.argv[2]), Path(sys.argv[3])) for name in sys.argv[1].split(",")}
    print(json.dumps(answers))
