"""A vLLM engine in this process, for commands: quiet, offline, and shut down when its block ends."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any


def quiet_engine_environment() -> dict[str, str]:
    """Environment of a small engine in this process: no network, no chatter. Set it before vLLM is imported."""
    return {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
        "VLLM_PLUGINS": "stagecache",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TQDM_DISABLE": "1",
    }


@contextlib.contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for a while."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def running_engine(arguments: Mapping[str, Any]) -> Iterator[Any]:
    """A vLLM engine (its LLMEngine) made with ``LLM(**arguments)``, eager and seeded unless the arguments say else."""
    from vllm import LLM

    llm = LLM(**{"enforce_eager": True, "seed": 0, "use_tqdm_on_load": False, **arguments})
    try:
        yield llm.llm_engine
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()


class Interrupts:
    """Ctrl-C and SIGTERM that cannot get lost, and that come once.

    Python raises wherever the main thread is, and where that is a finalizer, the exception is dropped. So the handler
    notes the signal as well, and a loop that calls ``check`` raises it again. Signals after the first are taken for
    impatience: they would interrupt the cleaning up, and leave a daemon or a directory behind.

    SIGINT raises KeyboardInterrupt; SIGTERM and SIGHUP raise SystemExit with the status that a shell gives, 128 and the
    number. A signal that is ignored when the block begins (nohup) stays so.
    """

    def __init__(self) -> None:
        self._seen: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if error is None:
            self.check()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._seen is None:
            self._seen = number
            self.check()

    def check(self) -> None:
        """Raise again what the signal raised, where there was one."""
        if self._seen == signal.SIGINT:
            raise KeyboardInterrupt
        if self._seen is not None:
            raise SystemExit(128 + self._seen)


@contextlib.contextmanager
def stderr_to(path: Path) -> Iterator[None]:
    """Send this process' stderr, of native code too, to a file for a while, so that a live display stays whole."""
    sys.stderr.flush()
    saved = os.dup(2)
    target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        os.dup2(target, 2)
        yield
    finally:
        sys.stderr.flush()
        os.dup2(saved, 2)
        os.close(saved)
        os.close(target)


def file_tail(path: Path, lines: int = 20) -> str:
    """The last lines of a file, empty where there is none."""
    try:
        return "\n".join(path.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])
    except OSError:
        return ""
