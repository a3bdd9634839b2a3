"""What a step is, in plain values: the language that the reference model, the simulated engines and the adapter to
the real cache share.

Rows are opaque bytes, one ``bytes`` object a token and key, so nothing here knows what a dtype means.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple, Protocol

HIDDEN = "__hidden_states__"

ELEMENT_BYTES = {"bool": 1, "uint8": 1, "bfloat16": 2, "float16": 2, "float32": 4, "int32": 4, "int64": 8}


class Tensor(NamedTuple):
    """A tensor as bytes: ``rows[i]`` holds index i of its first dimension, each of shape ``row_shape``."""

    dtype: str
    row_shape: tuple[int, ...]
    rows: tuple[bytes, ...]

    @property
    def row_bytes(self) -> int:
        return ELEMENT_BYTES[self.dtype] * prod(self.row_shape)

    def with_rows(self, rows: Iterable[bytes | None]) -> Tensor:
        return self._replace(rows=tuple(rows))

    def __repr__(self) -> str:
        shown = " ".join(row[:4].hex() for row in self.rows)
        return f"{self.dtype}{[len(self.rows), *self.row_shape]}<{shown}>"


@dataclass(frozen=True)
class Scheduled:
    """One request of a step.

    blocks: its whole block table, this step's additions included.
    first: position of the first token computed in this step; for an arrival or a comeback also its hit length.
    count: tokens scheduled.
    how: ``new`` (in scheduled_new_reqs), ``cached`` (an ordinary continuation), ``resumed`` (in resumed_req_ids) or
        ``idle`` (in the batch, not in the scheduler's output).
    """

    req_id: str
    blocks: tuple[int, ...]
    first: int
    count: int
    how: str = "cached"

    @property
    def tokens(self) -> int:
        """Rows of the request in the step's tensors (S4: a negative count counts as 0)."""
        return max(0, self.count)

    def __str__(self) -> str:
        mark = {"new": " new", "resumed": " resumed", "idle": " idle"}.get(self.how, "")
        return f"{self.req_id}:[{','.join(map(str, self.blocks))}]@{self.first}+{self.count}{mark}"


@dataclass(frozen=True)
class Step:
    """One scheduler output. ``batch`` is in the order of the rows; ``new_epoch``: the scheduler forgot its prefix cache
    before it (R5)."""

    batch: tuple[Scheduled, ...] = ()
    finished: tuple[str, ...] = ()
    preempted: tuple[str, ...] = ()
    new_epoch: bool = False

    @property
    def tokens(self) -> int:
        return sum(request.tokens for request in self.batch)

    def __str__(self) -> str:
        parts = [str(request) for request in self.batch]
        parts += [f"finished {' '.join(self.finished)}"] if self.finished else []
        parts += [f"preempted {' '.join(self.preempted)}"] if self.preempted else []
        parts += ["new epoch"] if self.new_epoch else []
        return "; ".join(parts) or "nothing scheduled"


@dataclass(frozen=True)
class Outputs:
    """What one forward yields, with what save_outputs is told of it.

    mm: per key a Tensor, or anything else (a leftover).
    """

    hidden: Tensor | None
    mm: Mapping[str, Any] = field(default_factory=dict)
    unpadded: int = 0
    padded: int = 0


@dataclass(frozen=True)
class Schema:
    """dtype and row shape of a key, fixed once it is opened (K3)."""

    dtype: str
    row_shape: tuple[int, ...]


@dataclass(frozen=True)
class Rules:
    """The settings that the rules depend on.

    schemas: per-token keys opened at attach.
    roles: ``token`` or ``global`` for keys whose role the model declares (K2); the others are discovered.
    deferred: keys whose rows stay on the device until a flush (W3); no result depends on it.
    explicit_acks: rows are delivered when ``ack`` says so, not when they are handed out (R3).
    """

    block_size: int = 4
    capacity: int = 64
    depth: int = 4
    needs_hidden: bool = True
    schemas: Mapping[str, Schema] = field(default_factory=dict)
    roles: Mapping[str, str] = field(default_factory=dict)
    deferred: frozenset[str] = frozenset()
    explicit_acks: bool = False


Merged = dict[str, dict[str, Any]]
"""key -> request -> Tensor of its rows, or the leftover that it was handed. Requests without rows are left out."""


class Refused(Exception):
    """A call that the rules refuse. ``kinds``: class names of the errors that are right here."""

    def __init__(self, kinds: Iterable[str], text: str = ""):
        self.kinds = frozenset(kinds)
        super().__init__(f"{' or '.join(sorted(self.kinds))}: {text}")


class Cache(Protocol):
    """The calls that are compared. Every one may raise Refused."""

    def new_step_starts(self, step: Step) -> None: ...

    def save_outputs(self, outputs: Outputs) -> int: ...

    def materialize(self, step_id: int, req_ids: list[str]) -> Merged: ...

    def discard_step(self, step_id: int) -> None: ...

    def reset(self) -> None: ...

    def ack(self, req_id: str, upto: int) -> None: ...
