"""Consumers that a worker process sets up from its environment.

``STAGECACHE_SINK=safetensors:DIR``
    writes each request's full prompt to ``DIR/REQUEST.safetensors`` (tensor ``hidden_states``).
``STAGECACHE_ON_STEP=module:function``
    imports the function and calls it with the StepRows of every step.

Both may be set. A file is written before the engine answers its request, so it is there when the answer is.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast
from urllib.parse import quote

from stagecache.errors import StageCacheError
from stagecache.shim.assemble import PromptAssembler, PromptRows
from stagecache.shim.steps import StepCallback, StepRows, external_id

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)


class SinkConfigError(StageCacheError):
    """STAGECACHE_SINK or STAGECACHE_ON_STEP does not name something that can be used."""


MAX_NAME_BYTES: Final = 200
"""Of a file's name without its suffix; file systems take 255 bytes."""


class SafetensorsSink:
    """Writes each complete prompt to a file of its own; a prompt that failed leaves ``REQUEST.error.json``.

    Args:
        directory: where the files go; made if it is not there.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        self._assemble = PromptAssembler(self.write, self.write_error)

    def __call__(self, rows: StepRows) -> None:
        if rows.tp_rank == 0:
            self._assemble(rows)

    def path(self, req_id: str, suffix: str) -> Path:
        name = quote(external_id(req_id), safe=" ", errors="replace")
        if len(name) > MAX_NAME_BYTES:  # A client chooses its id; the file system does not take every length.
            name = f"{name[: MAX_NAME_BYTES - 17]}-{hashlib.sha256(name.encode()).hexdigest()[:16]}"
        return self.directory / (name + suffix)

    def write(self, prompt: PromptRows) -> bool:
        """Write a prompt's file; False, and a line in the log, where the file system refuses."""
        path = self.path(prompt.req_id, ".safetensors")
        metadata = {
            "request_id": external_id(prompt.req_id),
            "rows_from_cache": str(prompt.from_cache),
            "rows_computed": str(int(prompt.hidden.shape[0]) - prompt.from_cache),
            "prefill_steps": str(prompt.steps),
        }
        try:
            write_hidden_states(path, prompt.hidden, metadata)
            self.path(prompt.req_id, ".error.json").unlink(missing_ok=True)
        except Exception as error:  # safetensors has no OSError of its own; and no file may stop the engine
            logger.error("stagecache: cannot write %s: %s", path, error)
            return False
        return True

    def write_error(self, req_id: str, error: StageCacheError) -> None:
        logger.error("stagecache: no hidden states for request %s: %s", external_id(req_id), error)
        text = json.dumps({"request_id": external_id(req_id), "error": type(error).__name__, "text": str(error)})
        try:
            self.path(req_id, ".safetensors").unlink(missing_ok=True)
            self.path(req_id, ".error.json").write_text(text + "\n", encoding="utf-8")
        except OSError as refusal:
            logger.error("stagecache: cannot write below %s: %s", self.directory, refusal)


def write_hidden_states(path: Path, hidden: torch.Tensor, metadata: Mapping[str, str]) -> None:
    """Write ``hidden`` ([prompt_len, hidden_size]) as a safetensors file, whole or not at all."""
    from safetensors.torch import save_file

    draft = path.with_name(path.name + ".part")
    save_file({"hidden_states": hidden.detach().contiguous().cpu()}, draft, dict(metadata))
    os.replace(draft, path)


def consumers_from_env(environ: Mapping[str, str] = os.environ) -> list[StepCallback]:
    """The consumers that the environment names, none when it names none.

    Raises:
        SinkConfigError: a value has another form, or the function cannot be imported.
    """
    found: list[StepCallback] = []
    if sink := environ.get("STAGECACHE_SINK"):
        kind, _, where = sink.partition(":")
        if kind != "safetensors" or not where:
            raise SinkConfigError(f"STAGECACHE_SINK={sink!r} is not known; write it as safetensors:DIR")
        found.append(SafetensorsSink(Path(where)))
    if target := environ.get("STAGECACHE_ON_STEP"):
        found.append(_import_function(target))
    return found


def _import_function(target: str) -> StepCallback:
    module_name, _, name = target.partition(":")
    if not module_name or not name:
        raise SinkConfigError(f"STAGECACHE_ON_STEP={target!r} is not of the form module:function")
    try:
        function = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise SinkConfigError(
            f"STAGECACHE_ON_STEP={target!r} cannot be imported in the worker: {error}. Put the module on the worker's "
            "PYTHONPATH"
        ) from error
    if not callable(function):
        raise SinkConfigError(f"STAGECACHE_ON_STEP={target!r} is a {type(function).__name__}, not a function")
    return cast(StepCallback, function)
