"""The space in which block hashes are valid.

A block hash says which tokens; it does not say which model computed rows for them, with which keys, or how. All of
that is the namespace. Rows are shared only inside one namespace: two sessions with equal `digest` serve each other,
any differing field keeps them apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256

from stagecache_wire import cbor
from stagecache_wire.hash_errors import UnsupportedHash
from stagecache_wire.identity import BlockHasher

# vLLM's prefix_caching_hash_algo by name. `sha256` hashes a pickle: its hashes are accepted as the engine made them,
# and cannot be made here. `sha256_cbor` can be made here too.
ENGINE_HASH_ALGORITHMS = ("sha256", "sha256_cbor")
TOKEN_HASH_ALGORITHM = "sha256_cbor"

# Part of every digest: raise it when the meaning of a field changes, so that old names are not found.
_NAMESPACE_VERSION = 1


@dataclass(frozen=True)
class KeySchema:
    """One key of the stage: every row is `row_shape` elements of `dtype`. dtype: torch's name without the prefix."""

    name: str
    dtype: str
    row_shape: tuple[int, ...]


@dataclass(frozen=True)
class Namespace:
    """Everything beside the block hash that must be equal for rows to be equal.

    model_fingerprint       identity of the weights and of the configuration that rows depend on.
    hash_algorithm          vLLM's prefix_caching_hash_algo: sha256 or sha256_cbor. One that can collide is refused.
    hash_seed               the seed of the first block's parent.
    stage                   the pipeline stage's name.
    key_schemas             the keys that a block's rows consist of; their order means nothing.
    dtype                   the model's compute dtype.
    block_size              tokens a block.
    tensor_parallel_size    ranks that shared the computation: their number decides how sums were split.
    """

    model_fingerprint: str
    hash_algorithm: str
    hash_seed: str
    stage: str
    key_schemas: tuple[KeySchema, ...]
    dtype: str
    block_size: int
    tensor_parallel_size: int = 1

    def __post_init__(self) -> None:
        if self.hash_algorithm not in ENGINE_HASH_ALGORITHMS:
            raise UnsupportedHash(
                f"hash algorithm {self.hash_algorithm!r} is refused: only {' and '.join(ENGINE_HASH_ALGORITHMS)} do "
                "not collide; set the engine's prefix_caching_hash_algo to one of them"
            )
        if self.block_size < 1 or self.tensor_parallel_size < 1:
            raise ValueError(
                f"block_size {self.block_size} and tensor_parallel_size {self.tensor_parallel_size} must be at least 1"
            )
        names = [schema.name for schema in self.key_schemas]
        if len(set(names)) != len(names):
            raise ValueError(f"each key has one schema; found names {sorted(names)}")

    @cached_property
    def digest(self) -> bytes:
        """The namespace's name, 32 bytes: equal exactly when every field is, the order of key_schemas aside."""
        schemas = sorted((schema.name, schema.dtype, schema.row_shape) for schema in self.key_schemas)
        fields = (
            _NAMESPACE_VERSION,
            self.model_fingerprint,
            self.hash_algorithm,
            self.hash_seed,
            self.stage,
            tuple(schemas),
            self.dtype,
            self.block_size,
            self.tensor_parallel_size,
        )
        return sha256(cbor.encode(fields)).digest()

    def hasher(self) -> BlockHasher:
        """Makes this namespace's hashes from token ids. Raises UnsupportedHash where only the engine can."""
        if self.hash_algorithm != TOKEN_HASH_ALGORITHM:
            raise UnsupportedHash(
                f"the engine's hashes are {self.hash_algorithm!r}, of pickled values; a lookup by token ids needs "
                f"prefix_caching_hash_algo={TOKEN_HASH_ALGORITHM}, or look up by the engine's own hashes"
            )
        return BlockHasher(self.block_size, self.hash_seed)
