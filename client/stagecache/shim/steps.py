"""What a consumer of rows sees of an engine step, and how it asks to see it.

from stagecache.shim.vllm import on_step


def consume(rows: StepRows) -> None:
    for req_id in rows.req_ids:
        print(req_id, rows.first_position(req_id), rows.hidden[req_id].shape)


unsubscribe = on_step(consume)

A consumer runs on the engine's thread, after the forward pass and before sampling; it must not keep the engine waiting.
The tensors it gets never change afterwards, so it may keep them. What a consumer raises goes through to the engine.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from stagecache.errors import StageCacheError

logger = logging.getLogger(__name__)

_RANDOM_SUFFIX = re.compile(r"-[0-9a-f]{8}$")


def external_id(req_id: str) -> str:
    """The id that the caller of the engine gave: inside, vLLM appends a dash and eight hexadecimal digits."""
    return _RANDOM_SUFFIX.sub("", req_id)


class StepHidden(Mapping[str, "torch.Tensor"]):
    """Hidden states of a step by request id; asking for rows that could not be had raises that request's error.

    Values are [rows, hidden_size] in the model's dtype, in position order.
    """

    def __init__(self, rows: Mapping[str, torch.Tensor], errors: Mapping[str, StageCacheError]) -> None:
        self._rows = rows
        self._errors = errors

    def __getitem__(self, req_id: str) -> torch.Tensor:
        error = self._errors.get(req_id)
        if error is not None:
            raise error
        return self._rows[req_id]

    def __iter__(self) -> Iterator[str]:
        yield from self._rows
        yield from self._errors

    def __len__(self) -> int:
        return len(self._rows) + len(self._errors)


@dataclass(frozen=True)
class StepRows:
    """One engine step: the rows of every request in the batch, those of prefix hits put before the computed ones.

    Attributes:
        step: number of this step in this worker, from 0; steps without tokens count too.
        req_ids: the batch, in the order of the engine's input batch.
        hidden: rows by request id; see :class:`StepHidden`.
        errors: requests whose rows could not be had, with the reason; the others are complete.
        num_computed: first position that this step computed, by request.
        num_scheduled: tokens that this step computed, by request.
        prompt_len: tokens of the prompt, by request.
        finished: requests that ended before this step; they are not in the batch.
        step_s: seconds of the engine's own execute_model.
        shim_s: seconds that the cache took on the engine's thread, before and after it, without the consumers.
        tp_rank: tensor-parallel rank of this worker; all ranks hold the same rows.
    """

    step: int
    req_ids: tuple[str, ...]
    hidden: StepHidden
    errors: Mapping[str, StageCacheError] = field(default_factory=dict)
    num_computed: Mapping[str, int] = field(default_factory=dict)
    num_scheduled: Mapping[str, int] = field(default_factory=dict)
    prompt_len: Mapping[str, int] = field(default_factory=dict)
    finished: tuple[str, ...] = ()
    step_s: float = 0.0
    shim_s: float = 0.0
    tp_rank: int = 0

    def end_position(self, req_id: str) -> int:
        """One past the last position of the request's rows."""
        return self.num_computed[req_id] + self.num_scheduled[req_id]

    def first_position(self, req_id: str) -> int:
        """Position of the request's first row; the rows run from it to :meth:`end_position` without a gap."""
        return self.end_position(req_id) - int(self.hidden[req_id].shape[0])

    def rows_from_cache(self, req_id: str) -> int:
        """Rows of this request that the engine did not compute in this step."""
        return int(self.hidden[req_id].shape[0]) - self.num_scheduled[req_id]


StepCallback = Callable[[StepRows], None]


class StepConsumers:
    """The consumers of one process, in the order in which they came."""

    def __init__(self) -> None:
        self._callbacks: list[StepCallback] = []

    def __bool__(self) -> bool:
        return bool(self._callbacks)

    def add(self, callback: StepCallback) -> Callable[[], None]:
        self._callbacks.append(callback)

        def unsubscribe() -> None:
            if callback in self._callbacks:
                self._callbacks.remove(callback)

        return unsubscribe

    def __call__(self, rows: StepRows) -> None:
        for callback in tuple(self._callbacks):
            callback(rows)


consumers = StepConsumers()


def on_step(callback: StepCallback) -> Callable[[], None]:
    """Have ``callback`` called with the :class:`StepRows` of every engine step of this process.

    The engine must run in this process (VLLM_ENABLE_V1_MULTIPROCESSING=0); for workers in processes of their own, name
    the consumer by STAGECACHE_ON_STEP or STAGECACHE_SINK (:mod:`stagecache.shim.sinks`).

    Returns:
        A function that ends the subscription; calling it again does nothing.
    """
    if not os.environ.get("STAGECACHE_SOCKET"):
        logger.warning("stagecache: on_step has no effect yet: set STAGECACHE_SOCKET before the engine is made")
    return consumers.add(callback)
