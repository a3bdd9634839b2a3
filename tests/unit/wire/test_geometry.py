"""Sizes: what is allowed, and what it costs."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagecache_wire import geometry as module
from stagecache_wire.geometry import (
    DTYPE_BYTES,
    BadGeometryError,
    Geometry,
    KeySchema,
    key_bytes,
    page_stride,
    pool_bytes,
    staging_bytes,
    table_bytes,
)

GOOD = Geometry(16, 4, 32)


def test_defaults_are_filled_in() -> None:
    checked = GOOD.checked()
    assert checked.arena_bytes == module.DEFAULT_ARENA_BYTES
    assert checked.checked() == checked


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"num_blocks": 0}, "num_blocks"),
        ({"num_blocks": -1}, "num_blocks"),
        ({"block_size": 0}, "block_size"),
        ({"block_size": (1 << 20) + 1}, "block_size"),
        ({"num_blocks": 1 << 20, "block_size": 1 << 20}, "num_blocks \\* block_size"),
        ({"staging_capacity_tokens": 0}, "staging_capacity_tokens"),
        ({"staging_capacity_tokens": 1 << 30}, "staging_capacity_tokens"),
        ({"staging_depth": 0}, "staging_depth"),
        ({"staging_depth": 65}, "staging_depth"),
        ({"max_results": 15}, "max_results"),
        ({"arena_bytes": 1}, "arena_bytes"),
        ({"arena_bytes": 1 << 60}, "arena_bytes"),
    ],
)
def test_a_size_out_of_range_is_refused_by_name(change: dict[str, int], names: str) -> None:
    with pytest.raises(BadGeometryError, match=names):
        replace(GOOD, **change).checked()


@pytest.mark.parametrize(
    ("schema", "names"),
    [
        (KeySchema("", "float32", (2,)), "name"),
        (KeySchema("x" * 513, "float32", (2,)), "513 bytes"),
        (KeySchema("ü" * 300, "float32", (2,)), "600 bytes"),
        (KeySchema("k", "float99", (2,)), "float99"),
        (KeySchema("k", "float32", (2, 0)), "dimension"),
        (KeySchema("k", "float32", (1,) * 9), "dimension"),
        (KeySchema("k", "float32", (1 << 23,)), "bytes of a row"),
    ],
)
def test_a_bad_key_is_refused_by_what_is_bad(schema: KeySchema, names: str) -> None:
    with pytest.raises(BadGeometryError, match=names):
        schema.checked()


@given(st.sampled_from(sorted(DTYPE_BYTES)), st.lists(st.integers(1, 20), max_size=4))
def test_a_row_has_the_bytes_of_its_elements(dtype: str, shape: list[int]) -> None:
    schema = KeySchema("k", dtype, tuple(shape)).checked()
    assert schema.row_bytes == DTYPE_BYTES[dtype] * prod(shape)


def test_dtypes_are_torchs() -> None:
    torch: Any = pytest.importorskip("torch")
    for name, size in DTYPE_BYTES.items():
        assert getattr(torch, name).itemsize == size, name


def test_rows_are_the_same_whatever_is_provisional() -> None:
    assert KeySchema("k", "int8", (2,), provisional=True).same_rows(KeySchema("k", "int8", (2,)))
    for other in (KeySchema("j", "int8", (2,)), KeySchema("k", "bool", (2,)), KeySchema("k", "int8", (1, 2))):
        assert not KeySchema("k", "int8", (2,)).same_rows(other)


@given(
    st.integers(1, 1 << 20), st.integers(1, 64), st.integers(1, 1 << 15), st.integers(1, 64), st.integers(1, 1 << 16)
)
def test_costs_cover_every_page_and_slot(blocks: int, size: int, capacity: int, depth: int, row_bytes: int) -> None:
    geometry = Geometry(blocks, size, capacity, depth)
    stride = page_stride(geometry, row_bytes)
    assert stride % 4096 == 0
    assert 0 <= stride - capacity * row_bytes < 4096
    assert staging_bytes(geometry, row_bytes) == depth * stride
    assert pool_bytes(geometry, row_bytes) == blocks * size * row_bytes
    assert table_bytes(geometry) == blocks * size * 8
    assert key_bytes(geometry, row_bytes) >= depth * stride + blocks * size * (row_bytes + 8)


@given(st.integers(1, 1 << 20), st.integers(1, 1 << 14), st.integers(16, 1 << 14))
def test_the_payload_ring_holds_the_largest_records(blocks: int, capacity: int, results: int) -> None:
    """A SAVE that names each row of a full page, and a hit on the whole cache, each more than once."""
    geometry = Geometry(blocks, 16, capacity, max_results=results)
    save = capacity * 12 + 64
    gather = min(blocks, 1 << 16) * 8 + results * 24 + 64
    assert geometry.payload_bytes >= 2 * max(save, gather)
    assert geometry.payload_bytes % 8 == 0
