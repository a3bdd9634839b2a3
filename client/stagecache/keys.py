"""Which outputs are per-token rows: discovery by first dimension, declared roles, provisional keys (K1 to K5)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from stagecache.device import is_plain
from stagecache.errors import CallDeadlineError, DaemonLostError, SchemaMismatchError, StageCacheError
from stagecache.mapping import StagedKey, dtype_name
from stagecache.policy import HIDDEN_KEY, ModelCachePolicy
from stagecache_wire.geometry import DTYPE_BYTES, KeySchema

OpenKey = Callable[[KeySchema, StagedKey | None], StagedKey]
"""Opens a key at the daemon, in place of an open one if given."""

logger = logging.getLogger("stagecache")


@dataclass(slots=True)
class Split:
    """One step's outputs, by how they are treated. Tensors are the live buffers, cut to the step's n tokens.

    immediate, deferred: rows of open keys.
    unkept: per-token rows whose key the daemon refused for good: handed out, but not kept.
    unopened: per-token rows whose key could not be opened now; the step's slots must become UNKNOWN.
    failed: keys refused in this step (K3), with the error for materialize.
    leftover: everything else.
    demoted: provisional keys given up in this step, to be closed.
    replaced: remembered keys that were closed, since the model's rows are others now.
    """

    immediate: list[tuple[StagedKey, torch.Tensor]]
    deferred: list[tuple[StagedKey, torch.Tensor]]
    unkept: list[tuple[str, torch.Tensor]]
    unopened: list[tuple[str, torch.Tensor]]
    failed: list[tuple[StagedKey | None, SchemaMismatchError]]
    leftover: dict[str, Any]
    demoted: list[StagedKey]
    replaced: list[StagedKey]


class KeyBook:
    """The keys of a session and the rules by which outputs find theirs. Engine thread only."""

    def __init__(self, open_key: OpenKey, policy: ModelCachePolicy, declared: frozenset[str] = frozenset()) -> None:
        """open_key makes a key at the daemon. declared: names whose schema was given at attach."""
        self._open_key = open_key
        self._declared = declared
        self.policy = policy
        self.open: dict[str, StagedKey] = {}
        self.opened: dict[str, StagedKey] = {}
        """The same, in a dictionary that stays as it is when keys come and go. Never to be changed."""
        self._provisional: set[str] = set()
        self._remembered: set[str] = set()
        self._demoted: set[str] = set()
        self._settled: dict[str, tuple[StagedKey, bool]] = {}
        """Open keys whose rows came before, and whether they are deferred: most steps ask nothing else."""
        self._hit_keys: list[StagedKey] | None = None
        self._hit_keys_for: ModelCachePolicy | None = None
        self._settled_for: ModelCachePolicy | None = None
        self.refused: dict[str, StageCacheError] = {}
        """Keys that the daemon will not open (budget, shape), with its error: hits on them fail. It is not asked
        again: rows of the steps between could otherwise never be told from rows that were never written."""

    def add(self, key: StagedKey, *, remembered: bool = False) -> None:
        """A key that the daemon opened. ``remembered``: from an earlier session; a hint, which the first rows of this
        one may prove wrong.
        """
        self.open[key.schema.name] = key
        self._changed()
        if remembered and key.schema.name not in self._declared:
            self._remembered.add(key.schema.name)
        if key.schema.provisional:
            self._provisional.add(key.schema.name)

    @property
    def settled(self) -> bool:
        """Whether keys are open, and none of them may prove a mistake."""
        return bool(self.open) and not self._provisional and not self._remembered

    def renewed(self, open_key: OpenKey) -> KeyBook:
        """A book for another session: what the model brings is known, nothing is open."""
        book = KeyBook(open_key, self.policy, self._declared)
        book._demoted = set(self._demoted)
        return book

    def schemas(self) -> list[KeySchema]:
        """Schemas of open keys that are no guesses, declared ones first. Any thread."""
        found = [key.schema for key in list(self.open.values()) if not key.schema.provisional]
        return sorted(found, key=lambda schema: schema.name not in self._declared)

    def is_declared(self, name: str) -> bool:
        """Whether the key's schema was given at attach."""
        return name in self._declared

    def hit_keys(self) -> list[StagedKey]:
        """Keys that a hit gathers: hidden first where the model needs it, then the others by name.
        The list is shared, so never to be changed.
        """
        if self._hit_keys is not None and self._hit_keys_for is self.policy:
            return self._hit_keys
        names = sorted(name for name in self.open if name != HIDDEN_KEY)
        if self.policy.needs_full_hidden_states and HIDDEN_KEY in self.open:
            names.insert(0, HIDDEN_KEY)
        self._hit_keys, self._hit_keys_for = [self.open[name] for name in names], self.policy
        return self._hit_keys

    def split(
        self, hidden: torch.Tensor | None, outputs: Mapping[str, Any], n: int, padded: int, batch_size: int
    ) -> Split:
        """Sort a step's outputs.

        hidden: [>= n, ...]. outputs: multimodal values by flat name. n: tokens of the step. padded: n, or the
        CUDA-graph size. batch_size: requests in the batch.
        """
        split = Split([], [], [], [], [], {}, [], [])
        if self._settled_for is not self.policy:
            self._settled_for = self.policy
            self._settled.clear()
        if hidden is not None and self.policy.needs_full_hidden_states and n > 0:
            rows = hidden.shape[0] if hidden.shape else 0
            if rows < n or not self._settle(split, HIDDEN_KEY, hidden, n, rows):
                self._hidden(split, hidden, n)
        for name, value in outputs.items():
            if name == HIDDEN_KEY:
                continue
            if n and (n == batch_size or name not in self._provisional) and self._settle(split, name, value, n, padded):
                continue
            role = self._role(name)
            if n == 0 or role == "global" or name in self._demoted:
                split.leftover[name] = value
            else:
                self._output(split, name, value, n, padded, batch_size, declared=role == "token")
        return split

    def _settle(self, split: Split, name: str, value: Any, n: int, padded: int) -> bool:
        """Rows of a key that was decided in an earlier step, and that look as they did then."""
        found = self._settled.get(name)
        if found is None or not isinstance(value, torch.Tensor):
            return False
        if value.layout is not torch.strided or value.is_nested or value.is_meta:
            return False
        key, deferred = found
        shape = value.shape
        if value.dtype != key.dtype or shape[1:] != key.schema.row_shape or not shape or shape[0] not in (n, padded):
            return False
        (split.deferred if deferred else split.immediate).append((key, value if shape[0] == n else value[:n]))
        return True

    def _role(self, name: str) -> str | None:
        role = self.policy.key_roles.get(name)
        if role is None and (name in self.policy.deferred_keys or name in self._declared):
            return "token"
        return role

    def _hidden(self, split: Split, hidden: torch.Tensor, n: int) -> None:
        if hidden.ndim < 1 or hidden.shape[0] < n:
            self._refuse(split, HIDDEN_KEY, hidden, f"{n} rows")
            return
        self._rows(split, HIDDEN_KEY, hidden, n, provisional=False)

    def _output(
        self, split: Split, name: str, value: Any, n: int, padded: int, batch_size: int, *, declared: bool
    ) -> None:
        key = self.open.get(name)
        tensor = isinstance(value, torch.Tensor)
        per_token = (
            tensor and is_plain(value) and value.ndim >= 1 and value.shape[0] in (n, padded) and _may_be_rows(value)
        )
        if name in self._provisional and key is not None:
            if not per_token or not key.fits(value):
                self._demote(split, key)
                split.leftover[name] = value
                return
            if n != batch_size:
                self._provisional.discard(name)
        if per_token:
            self._rows(split, name, value, n, provisional=not declared and n == batch_size)
        elif tensor and is_plain(value) and (key is not None or declared):
            self._refuse(split, name, value, f"a first dimension of {n}" + (f" or {padded}" if padded != n else ""))
        else:
            split.leftover[name] = value

    def _rows(self, split: Split, name: str, tensor: torch.Tensor, n: int, *, provisional: bool) -> None:
        key = self.open.get(name)
        wrong = key if key is not None and name in self._remembered and not key.fits(tensor) else None
        self._remembered.discard(name)
        if key is None or wrong is not None:
            schema = KeySchema(name, dtype_name(tensor.dtype), tuple(tensor.shape[1:]), provisional)
            if wrong is not None:
                self._drop(name)
                split.replaced.append(wrong)
            try:
                if name not in self.refused:
                    self.add(self._open_key(schema, wrong))
            except (DaemonLostError, CallDeadlineError):
                split.unopened.append((name, tensor[:n]))
                return
            except StageCacheError as error:
                self.refused[name] = error.again()
                logger.warning("stagecache: key %s is not kept: %s", name, self.refused[name])
            if name in self.refused:
                split.unkept.append((name, tensor[:n]))
                return
            key = self.open[name]
        if not key.fits(tensor):
            self._refuse(split, name, tensor, f"{key.schema.dtype} rows of shape {key.schema.row_shape}")
            return
        rows = tensor[:n]
        deferred = name in self.policy.deferred_keys
        self._settled[name] = key, deferred
        (split.deferred if deferred else split.immediate).append((key, rows))

    def _refuse(self, split: Split, name: str, tensor: torch.Tensor, wanted: str) -> None:
        """K3: this key, this step only."""
        key = self.open.get(name)
        found = f"{dtype_name(tensor.dtype)} of shape {tuple(tensor.shape)}"
        had = (
            "not opened yet" if key is None else f"opened with {key.schema.dtype} rows of shape {key.schema.row_shape}"
        )
        error = SchemaMismatchError(
            f"key {name}: {had}, this step brought {found} where {wanted} were expected; not saved in this step.",
            remedy="A model must keep a key's dtype and row shape; declare it global if it is no per-token row.",
        )
        split.failed.append((key, error))

    def _demote(self, split: Split, key: StagedKey) -> None:
        name = key.schema.name
        self._provisional.discard(name)
        self._demoted.add(name)
        self._drop(name)
        split.demoted.append(key)

    def _drop(self, name: str) -> None:
        del self.open[name]
        self._settled.pop(name, None)
        self._changed()

    def _changed(self) -> None:
        self._hit_keys, self.opened = None, dict(self.open)


def _may_be_rows(tensor: torch.Tensor) -> bool:
    """Whether a pool could hold the tensor's rows at all: a known dtype, and no row of no bytes."""
    return dtype_name(tensor.dtype) in DTYPE_BYTES and 0 not in tensor.shape[1:] and tensor.ndim <= 9
