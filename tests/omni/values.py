"""Values for keys: 2-D tensors of one int64 a token, as vLLM-Omni's models emit them, and how results read."""

from __future__ import annotations

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
