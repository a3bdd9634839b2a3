"""Engines in processes of their own that wait for work, so that several can take turns on one machine.

    with EngineProcess(settings, "no shim", socket=None, log=folder / "no-shim.log") as engine:
        engine.wait_ready()
        answer = engine.ask("decode", requests=16, steps=40, seed="0")

A process runs ``bench.engine.worker``: it gets one JSON line a piece of work on its standard input and answers with one
JSON line. It ends when that input does, so it never outlives its owner by more than the work in hand.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from stagecache.local_engine import file_tail, quiet_engine_environment

ROOT = Path(__file__).parents[2]
Kind = TypeVar("Kind")


@dataclass(frozen=True)
class EngineSettings:
    """How an engine is set up; lengths in tokens.

    Attributes:
        checkpoint: the model's directory.
        block_size: tokens in a KV block; a multiple of 32 on the CPU engine.
        max_len: longest request, prompt and output.
        max_seqs: requests in one batch.
        max_batched_tokens: tokens of one step.
        kv_bytes: bytes of the KV cache.
        threads: threads that compute; 0 leaves it to vLLM, which binds one to each core.
        prefix_caching: the engine's prefix caching.
    """

    checkpoint: str
    block_size: int = 32
    max_len: int = 1024
    max_seqs: int = 16
    max_batched_tokens: int = 2048
    kv_bytes: int = 256 << 20
    threads: int = 1
    prefix_caching: bool = True


class EngineFailedError(RuntimeError):
    """An engine's process ended, failed or took too long; the text has the end of its log."""


class EngineProcess:
    """One engine.

    Args:
        settings: of the engine.
        name: for error texts, and the stage's name at the daemon.
        socket: of the daemon that the shim attaches to; None: the shim is not loaded.
        log: file for what the engine says.
        timeout_s: for its start, and for each piece of work.
    """

    def __init__(
        self, settings: EngineSettings, name: str, *, socket: Path | None, log: Path, timeout_s: float = 300.0
    ) -> None:
        self.name = name
        self._log = log
        self._timeout_s = timeout_s
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "bench.engine.worker", json.dumps(asdict(settings))],
                cwd=ROOT,
                env=child_environment(os.environ, settings.threads, socket, stage=name),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                text=True,
                start_new_session=True,  # Ctrl-C reaches the owner alone, which then ends its engines.
            )

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(at_once=error is not None)

    def wait_ready(self) -> None:
        """Wait until the engine has started."""
        self._answer("start")

    def ask(self, work: str, **arguments: Any) -> Any:
        """Have a piece of work done (a method of ``worker.Driver``) and return its answer.

        Raises:
            EngineFailedError: the process ended, or did not answer in time.
        """
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # It ended: waiting for its answer says with which status, and why.
            self._process.stdin.write(json.dumps({"work": work, **arguments}) + "\n")
            self._process.stdin.flush()
        return self._answer(work)

    def _answer(self, work: str) -> Any:
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], self._timeout_s)
        line = self._process.stdout.readline() if ready else ""
        if not line:
            end = "took too long" if not ready else f"ended with status {self._process.wait(30)}"
            raise EngineFailedError(f"engine {self.name!r} {end} in {work!r}:\n{file_tail(self._log)}")
        return json.loads(line)

    def close(self, *, at_once: bool = False) -> None:
        """End it: with its input's end, and by a kill where that takes too long or ``at_once``."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        if at_once:
            self._process.kill()
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(30)
        except BaseException as error:
            self._process.kill()
            self._process.wait()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
        finally:
            self._process.stdout.close()


def child_environment(base: Mapping[str, str], threads: int, socket: Path | None, *, stage: str) -> dict[str, str]:
    """Environment of an engine's process: nothing of the shim's or vLLM's comes from ``base``.

    With one computing thread a time is that of the work alone. With one on each core, the engine's threads wait for
    each other at every barrier, spinning: whenever somebody else needs a core, all of them burn CPU until it is back.
    """
    kept = {name: value for name, value in base.items() if not name.startswith(("STAGECACHE_", "VLLM_"))}
    made = kept | quiet_engine_environment()
    if threads:
        made |= {"OMP_NUM_THREADS": str(threads), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    if socket is not None:
        made |= {
            "STAGECACHE_SOCKET": str(socket),
            "STAGECACHE_REQUIRED": "1",
            "STAGECACHE_STAGE": stage.replace(" ", "-").replace(",", ""),
        }
    return made


def in_turn(kinds: Sequence[Kind], turn: int) -> list[Kind]:
    """The order of one turn: each comes first equally often, and any two in either order equally often."""
    at = turn // 2 % len(kinds)
    order = [*kinds[at:], *kinds[:at]]
    return order if turn % 2 == 0 else order[::-1]


def wait_all(engines: Sequence[EngineProcess]) -> None:
    """Wait until engines that start side by side are ready. A moment later they are idle."""
    for engine in engines:
        engine.wait_ready()
    time.sleep(0.2)
