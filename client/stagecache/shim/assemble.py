"""Puts the rows of a request together, over as many steps as its prefill takes, into its full prompt."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from stagecache.errors import StageCacheError
from stagecache.shim.steps import StepRows

if TYPE_CHECKING:
    import torch


class IncompleteRowsError(StageCacheError):
    """Rows of a prompt are missing between two steps, so its hidden states cannot be put together.

    Attributes:
        req_id: the request.
        have: positions [0, have) are there.
        got: position of the first row that came next.
    """

    def __init__(self, req_id: str, have: int, got: int) -> None:
        super().__init__(
            f"request {req_id}: the rows of positions {have} to {got - 1} are missing. They were handed out before "
            "this consumer was registered, or an earlier step of the request failed; send the request again"
        )
        self.req_id = req_id
        self.have = have
        self.got = got

    def __reduce__(self) -> tuple[type[IncompleteRowsError], tuple[str, int, int]]:
        return type(self), (self.req_id, self.have, self.got)


@dataclass(frozen=True)
class PromptRows:
    """A whole prompt.

    Attributes:
        req_id: the request's id inside the engine.
        hidden: [prompt_len, hidden_size] in the model's dtype, row i for position i.
        from_cache: rows that came from the cache, the others were computed for this request.
        steps: engine steps that its prefill took.
    """

    req_id: str
    hidden: torch.Tensor
    from_cache: int
    steps: int


@dataclass
class _Open:
    """A prompt not complete yet: parts cover positions [0, have)."""

    parts: list[torch.Tensor] = field(default_factory=list)
    have: int = 0
    from_cache: int = 0
    steps: int = 0

    def cut(self, position: int) -> None:
        """Keep positions [0, position) only: a preempted request starts over from there."""
        import torch

        rows = torch.cat(self.parts)[:position]
        self.parts, self.have = ([rows], position) if position else ([], 0)
        self.from_cache = min(self.from_cache, position)


class PromptAssembler:
    """A step consumer that hands out each prompt once, when its last row is there.

    Args:
        on_prompt: called on the engine's thread with each complete prompt.
        on_error: called once for a request whose prompt cannot be completed; without it the error is raised.
    """

    def __init__(
        self,
        on_prompt: Callable[[PromptRows], object],
        on_error: Callable[[str, StageCacheError], object] | None = None,
    ) -> None:
        self._on_prompt = on_prompt
        self._on_error = on_error
        self._open: dict[str, _Open] = {}
        self._closed: set[str] = set()

    def __call__(self, rows: StepRows) -> None:
        for req_id in rows.finished:
            self._open.pop(req_id, None)
            self._closed.discard(req_id)
        for req_id in rows.req_ids:
            if req_id in self._closed:
                continue
            try:
                self._add(rows, req_id)
            except StageCacheError as error:
                self._open.pop(req_id, None)
                self._closed.add(req_id)
                if self._on_error is None:
                    raise
                self._on_error(req_id, error)

    def _add(self, rows: StepRows, req_id: str) -> None:
        import torch

        hidden = rows.hidden[req_id]
        if not hidden.shape[0]:
            return
        first = rows.first_position(req_id)
        prompt = self._open.setdefault(req_id, _Open())
        if first > prompt.have:
            raise IncompleteRowsError(req_id, prompt.have, first)
        if first < prompt.have:
            prompt.cut(first)
        prompt.parts.append(hidden)
        prompt.have += int(hidden.shape[0])
        prompt.from_cache += max(0, rows.num_computed[req_id] - first)
        prompt.steps += 1
        length = rows.prompt_len[req_id]
        if prompt.have < length:
            return
        del self._open[req_id]
        self._closed.add(req_id)
        whole = prompt.parts[0] if len(prompt.parts) == 1 else torch.cat(prompt.parts)
        self._on_prompt(PromptRows(req_id, whole[:length], prompt.from_cache, prompt.steps))
