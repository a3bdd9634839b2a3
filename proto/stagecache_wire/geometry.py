"""What a session mirrors, and the one place where its numbers are checked.

A slot is ``block_id * block_size + offset``: one token's place in the engine's KV cache. Pools and tables have one
row a slot, staging pages one row a token of a step.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

MAX_SLOTS = 1 << 31
"""Slots travel as u32 in records; half of the range keeps ``start + length`` free of overflow."""

MAX_ROW_BYTES = 1 << 24
MAX_KEYS = 256
MAX_SEGMENT_BYTES = 1 << 42
DEFAULT_ARENA_BYTES = 64 << 20
MIN_ARENA_BYTES = 1 << 16
LOG_ENTRIES = 1024

DTYPE_BYTES: dict[str, int] = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int16": 2,
    "uint16": 2,
    "float16": 2,
    "bfloat16": 2,
    "int32": 4,
    "uint32": 4,
    "float32": 4,
    "int64": 8,
    "uint64": 8,
    "float64": 8,
    "complex64": 8,
    "complex128": 16,
}
"""Bytes of one element, by torch's dtype name without its prefix."""


class BadGeometryError(ValueError):
    """A size of the geometry or of a key schema is zero, negative, too large or inconsistent."""


def _in_range(what: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise BadGeometryError(f"{what} is {value}, allowed are {low} to {high}")


@dataclass(frozen=True)
class Geometry:
    """Sizes of one session. ``arena_bytes`` 0 means the default of 64 MiB.

    num_blocks, block_size: the engine's KV cache, in blocks and in tokens a block.
    staging_capacity_tokens: rows of one staging page (the engine's max_num_batched_tokens).
    staging_depth: pages a key, so steps that may be unconsumed at once.
    arena_bytes: size of the merge arena.
    max_results: entries of the result table, one a gathered (request, key).
    """

    num_blocks: int
    block_size: int
    staging_capacity_tokens: int
    staging_depth: int = 4
    arena_bytes: int = 0
    max_results: int = 4096

    @property
    def num_slots(self) -> int:
        return self.num_blocks * self.block_size

    @property
    def payload_bytes(self) -> int:
        """Size of the log's payload ring: room for four of the largest records, 1 MiB at least.

        The largest FLUSH names each of ``staging_capacity_tokens`` rows with its claim (12 bytes), the largest gather
        of one hit 65,536 runs (8 bytes), and up to ``max_results`` gathers (24 bytes) share a record.
        """
        largest = self.staging_capacity_tokens * 16 + min(self.num_blocks, 1 << 16) * 8 + self.max_results * 32
        return max(1 << 20, _round_up(4 * largest, 4096))

    def checked(self) -> Geometry:
        """This geometry with defaults filled in.

        Raises:
            BadGeometryError: a size outside its range.
        """
        _in_range("num_blocks", self.num_blocks, 1, MAX_SLOTS)
        _in_range("block_size", self.block_size, 1, 1 << 20)
        _in_range("num_blocks * block_size", self.num_slots, 1, MAX_SLOTS)
        _in_range("staging_capacity_tokens", self.staging_capacity_tokens, 1, 1 << 24)
        _in_range("staging_depth", self.staging_depth, 1, 64)
        _in_range("max_results", self.max_results, 16, 1 << 20)
        arena = self.arena_bytes or DEFAULT_ARENA_BYTES
        _in_range("arena_bytes", arena, MIN_ARENA_BYTES, MAX_SEGMENT_BYTES)
        return Geometry(
            self.num_blocks,
            self.block_size,
            self.staging_capacity_tokens,
            self.staging_depth,
            _round_up(arena, 4096),
            self.max_results,
        )


@dataclass(frozen=True)
class KeySchema:
    """One key: its name, element type and trailing shape, all fixed once it is opened (K3).

    dtype: torch's name without its prefix, one of ``DTYPE_BYTES``.
    row_shape: shape of one token's row; empty for one scalar a token.
    provisional: first seen in a pure decode step, where a per-request tensor looks per-token (K1).
    """

    name: str
    dtype: str
    row_shape: tuple[int, ...]
    provisional: bool = False

    @property
    def row_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype] * prod(self.row_shape)

    def same_rows(self, other: KeySchema) -> bool:
        """Whether rows of the one may stand in the pool of the other."""
        return (self.name, self.dtype, self.row_shape) == (other.name, other.dtype, other.row_shape)

    def checked(self) -> KeySchema:
        """This schema.

        Raises:
            BadGeometryError: an empty or overlong name, an unknown dtype, a row of no bytes or too many.
        """
        try:
            length = len(self.name.encode())
        except (AttributeError, UnicodeEncodeError):
            raise BadGeometryError(f"key name {self.name!r} is no text that UTF-8 can hold") from None
        if not 0 < length <= 512:
            raise BadGeometryError(f"key name of {length} bytes, allowed are 1 to 512")
        if self.dtype not in DTYPE_BYTES:
            raise BadGeometryError(f"key {self.name}: dtype {self.dtype!r} is none of {', '.join(DTYPE_BYTES)}")
        if len(self.row_shape) > 8 or any(n < 1 for n in self.row_shape):
            raise BadGeometryError(
                f"key {self.name}: row shape {self.row_shape} has a dimension below 1 or over 8 of them"
            )
        _in_range(f"key {self.name}: bytes of a row", self.row_bytes, 1, MAX_ROW_BYTES)
        return self


def staging_bytes(geometry: Geometry, row_bytes: int) -> int:
    """Bytes of a key's staging segment: ``staging_depth`` pages, each on its own memory pages."""
    return geometry.staging_depth * page_stride(geometry, row_bytes)


def page_stride(geometry: Geometry, row_bytes: int) -> int:
    """Bytes from one staging page of a key to the next."""
    return _round_up(geometry.staging_capacity_tokens * row_bytes, 4096)


def pool_bytes(geometry: Geometry, row_bytes: int) -> int:
    """Bytes of a key's pool segment: one row a slot."""
    return geometry.num_slots * row_bytes


def table_bytes(geometry: Geometry) -> int:
    """Bytes of a table segment (one u64 a slot): a key's claims, or the session's slot words."""
    return geometry.num_slots * 8


def key_bytes(geometry: Geometry, row_bytes: int) -> int:
    """All shared memory that one key costs."""
    return staging_bytes(geometry, row_bytes) + pool_bytes(geometry, row_bytes) + table_bytes(geometry)


def _round_up(value: int, to: int) -> int:
    return (value + to - 1) // to * to
