"""``stagecache hidden-states``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from stagecache.cli.apart import ENGINE_LOG, run_apart
from stagecache.cli.console import out, show_error
from stagecache.cli.demo import missing_engine
from stagecache.errors import StageCacheError
from stagecache.local_daemon import LocalDaemon
from stagecache.local_engine import Interrupts, environment, file_tail, quiet_engine_environment, stderr_to


def run(arguments: dict[str, Any], *, model: Path, prompts: Path, out_directory: Path, socket: Path | None) -> int:
    """Run the prompts; the process' exit status: 0 when every prompt has its file."""
    if text := missing_engine():
        show_error(text)
        return 1
    return run_apart("stagecache-", lambda work: _run_in(work, arguments, model, prompts, out_directory, socket))


def _run_in(
    work: Path, arguments: dict[str, Any], model: Path, prompts: Path, out_directory: Path, socket: Path | None
) -> int:
    from stagecache.hidden_states import encode_texts, extract, read_prompts

    wanted = encode_texts(read_prompts(prompts), model)
    settings = quiet_engine_environment() | {"STAGECACHE_REQUIRED": "1"}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with contextlib.ExitStack() as stack:
        interrupts = stack.enter_context(Interrupts())
        stack.enter_context(environment(settings))
        stack.enter_context(_daemon(work, socket))
        progress = stack.enter_context(Progress(*columns, console=out, redirect_stderr=False))
        task = progress.add_task("engine starts", total=None)
        try:
            with stderr_to(work / ENGINE_LOG):
                result = extract(
                    {"enable_prefix_caching": True, "skip_tokenizer_init": True, **arguments},
                    wanted,
                    out_directory,
                    on_start=lambda: progress.update(task, description="prompts", total=len(wanted), completed=0),
                    on_prompt=lambda: progress.advance(task),
                    on_step_done=interrupts.check,
                )
        except StageCacheError:
            raise
        except Exception as error:
            raise StageCacheError(
                f"the engine failed: {type(error).__name__}: {error}\n{file_tail(work / ENGINE_LOG)}"
            ) from error
    for req_id, why in result.failed.items():
        show_error(f"{req_id}: {why}")
    out.print(
        f"{result.written} of {len(wanted)} prompts written to [bold]{out_directory}[/]: {result.from_cache} rows from "
        f"the pool, {result.computed} computed"
    )
    return 1 if result.failed else 0


@contextlib.contextmanager
def _daemon(work: Path, socket: Path | None) -> Iterator[None]:
    """A daemon for the engine: the one at ``socket``, or one of our own."""
    if socket is not None:
        with environment({"STAGECACHE_SOCKET": str(socket)}):
            yield
        return
    with LocalDaemon(work) as daemon, environment({"STAGECACHE_SOCKET": str(daemon.socket)}):
        yield
