"""Rows whose every byte tells where they come from: position, key, and which write of the sequence made them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tests.model.steps import Schema, Tensor


def rows_at(schema: Schema, salt: int, positions: Sequence[int], extra: int = 0) -> Tensor:
    """One row a position, and ``extra`` rows of noise. Different salts or positions give different bytes; any bit
    pattern may occur, NaNs too."""
    shape = Tensor(schema.dtype, schema.row_shape, ())
    size = shape.row_bytes
    words = -(-size // 8)
    places = np.array([*positions, *range(1_000_000, 1_000_000 + extra)], np.uint64)
    with np.errstate(over="ignore"):
        state = (places[:, None] * np.uint64(words) + np.arange(words, dtype=np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
        state += np.uint64(salt * 0xD1B54A32D192ED03 & 0xFFFFFFFFFFFFFFFF)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state ^= state >> np.uint64(31)
    raw = state.view(np.uint8).reshape(len(places), words * 8)[:, :size]
    if schema.dtype == "bool":
        raw = raw & 1
    return shape.with_rows(row.tobytes() for row in raw)
