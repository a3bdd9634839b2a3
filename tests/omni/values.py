"""Values for keys: 2-D tensors of one int64 a token, as vLLM-Omni's models emit them, and how results read."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from tests.model.steps import Tensor


def column(words: str | int, count: int = 1) -> Tensor:
    """int64 [n, 1]: ``"1 2 3"``, or one number ``count`` times."""
    numbers = [words] * count if isinstance(words, int) else [int(word) for word in words.split()]
    return Tensor("int64", (1,), tuple(number.to_bytes(8, "little", signed=True) for number in numbers))


def read(value: object) -> str:
    """A column as words; empty where there is none."""
    if value is None:
        return ""
    assert isinstance(value, Tensor), value
    return " ".join(str(int.from_bytes(row, "little", signed=True)) for row in value.rows)


def to_torch(tensor: Tensor) -> torch.Tensor:
    """A tensor of its own memory, with these rows."""
    dtype = getattr(torch, tensor.dtype)
    if not tensor.rows:
        return torch.empty((0, *tensor.row_shape), dtype=dtype)
    flat = torch.frombuffer(bytearray(b"".join(tensor.rows)), dtype=torch.uint8)
    return flat.view(dtype).reshape(len(tensor.rows), *tensor.row_shape)


def from_torch(value: torch.Tensor) -> Tensor:
    """The rows of a tensor as bytes."""
    size = math.prod(value.shape[1:]) * value.element_size()
    raw = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b""
    rows = tuple(raw[index * size : (index + 1) * size] for index in range(value.shape[0]))
    return Tensor(str(value.dtype).removeprefix("torch."), tuple(value.shape[1:]), rows)


def converted(value: Any, convert: Callable[[Any], Any]) -> Any:
    """``value`` with whatever its containers hold converted."""
    if isinstance(value, dict):
        return {name: converted(inner, convert) for name, inner in value.items()}
    if isinstance(value, (list, tuple)) and not isinstance(value, Tensor):
        return [converted(inner, convert) for inner in value]
    return convert(value)
