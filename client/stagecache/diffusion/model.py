"""What a DiT must provide, in two parts: forwards over KV that the worker keeps, and the identity of its prefix.

The order of calls for one request:

    denoising = model.start(request)            lays the sequence out; no forward yet
    hook.identify(request)                      with prefix caching only, once
    denoising.step(0, queries)                  queries begin behind the cached prefix
    denoising.step(1 .. num_steps - 1, ...)     queries begin at the target
    denoising.result()

A row is one sequence that attends to itself: with classifier-free guidance a request has two. Its positions are

    [0, prefix_len)                         text and reference images: KV is the same in all steps
    [prefix_len, prefix_len + target_len)   timestep and noisy image: KV is new in each step; it stays here
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from stagecache.diffusion.identity import PrefixIdentity


@dataclass(frozen=True)
class KVShape:
    """KV of one token: ``layers`` times [2, heads, head_dim] of dtype, keys first."""

    layers: int
    heads: int
    head_dim: int
    dtype: torch.dtype = torch.float32

    @property
    def row_shape(self) -> tuple[int, int, int]:
        """Of one token in one layer."""
        return 2, self.heads, self.head_dim


@dataclass(frozen=True)
class RowLengths:
    """Tokens of one row: the stable prefix, and the target behind it."""

    prefix_len: int
    target_len: int

    @property
    def seq_len(self) -> int:
        return self.prefix_len + self.target_len


class RowKV(Protocol):
    """Where one row's KV lies. A model writes what it computed, then reads all."""

    def write(self, layer: int, start: int, kv: torch.Tensor) -> None:
        """Store kv, [n, 2, heads, head_dim], of positions [start, start + n)."""

    def read(self, layer: int, end: int) -> torch.Tensor:
        """KV of positions [0, at least end), [>= end, 2, heads, head_dim]; what lies beyond end is finite.

        The tensor is for reading, until the next write.
        """


@dataclass(frozen=True)
class RowQuery:
    """What one row computes in one step: positions [start, seq_len), against KV of all positions."""

    start: int
    kv: RowKV


class Denoising(Protocol):
    """One request while it is denoised."""

    @property
    def rows(self) -> Sequence[RowLengths]:
        """One for each CFG row."""

    @property
    def num_steps(self) -> int:
        """Denoise steps."""

    def step(self, index: int, queries: Sequence[RowQuery]) -> int:
        """One denoise step; a query for each row. Returns the tokens computed, over all rows."""

    def result(self) -> Any:
        """What the request asked for, after the last step."""


class DiffusionModel(Protocol):
    """A DiT."""

    @property
    def kv_shape(self) -> KVShape:
        """KV of one token."""

    def start(self, request: Any) -> Denoising:
        """Lay a request out. No KV is computed."""


class PrefixHook(Protocol):
    """The part that prefix caching needs: which content the KV of a prefix depends on."""

    @property
    def fingerprint(self) -> str:
        """Identity of the weights and of every setting that KV depends on: equal exactly where KV is."""

    def identify(self, request: Any) -> Sequence[PrefixIdentity]:
        """One identity for each CFG row, in the order of ``Denoising.rows``."""


HookFactory = Callable[[Any], PrefixHook]
"""Makes the hook of a loaded model."""

_hooks: dict[str, HookFactory] = {}


def register_prefix_hook(model: str, factory: HookFactory) -> None:
    """Make prefix caching possible for ``model``, the name in the stage's settings. A later one replaces it."""
    _hooks[model] = factory


def prefix_hook_names() -> list[str]:
    """Models that have a prefix hook."""
    return sorted(_hooks)


def make_prefix_hook(model: str, loaded: Any) -> PrefixHook:
    """The hook of a loaded model. Raises KeyError where none is registered: the settings refuse that first."""
    return _hooks[model](loaded)
