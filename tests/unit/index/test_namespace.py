"""Namespaces: everything that must agree before rows are shared."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stagecached.index import BlockHasher, KeySchema, Namespace, UnsupportedHash

HIDDEN = KeySchema("__hidden_states__", "bfloat16", (2048,))
CODES = KeySchema("talker.codes", "int64", (16,))
BASE = Namespace(
    model_fingerprint="model@1",
    hash_algorithm="sha256_cbor",
    hash_seed="vllm-none-hash",
    stage="thinker",
    key_schemas=(HIDDEN, CODES),
    dtype="bfloat16",
    block_size=16,
    tensor_parallel_size=2,
)


@pytest.mark.parametrize(
    "change",
    [
        {"model_fingerprint": "model@2"},
        {"hash_algorithm": "sha256"},
        {"hash_seed": "0"},
        {"stage": "talker"},
        {"key_schemas": (HIDDEN,)},
        {"key_schemas": (HIDDEN, replace(CODES, dtype="int32"))},
        {"key_schemas": (HIDDEN, replace(CODES, row_shape=(4, 4)))},
        {"key_schemas": (HIDDEN, replace(CODES, name="codes"))},
        {"dtype": "float16"},
        {"block_size": 32},
        {"tensor_parallel_size": 1},
    ],
    ids="-".join,
)
def test_any_difference_keeps_rows_apart(change: dict[str, object]) -> None:
    assert replace(BASE, **change).digest != BASE.digest  # type: ignore[arg-type]


def test_equal_namespaces_share_whatever_the_order_of_their_keys() -> None:
    assert replace(BASE, key_schemas=(CODES, HIDDEN)).digest == BASE.digest
    assert len(BASE.digest) == 32


@pytest.mark.parametrize("algorithm", ["xxhash", "xxhash_cbor", "builtin", ""])
def test_a_hash_that_can_collide_is_refused(algorithm: str) -> None:
    with pytest.raises(UnsupportedHash, match="set the engine's prefix_caching_hash_algo"):
        replace(BASE, hash_algorithm=algorithm)


def test_pickled_hashes_are_accepted_but_not_made() -> None:
    with pytest.raises(UnsupportedHash, match="sha256_cbor"):
        replace(BASE, hash_algorithm="sha256").hasher()


def test_the_hasher_follows_the_namespace() -> None:
    tokens = list(range(40))
    made = replace(BASE, hash_seed="7").hasher().hash_blocks(tokens)
    assert made == BlockHasher(16, "7").hash_blocks(tokens)


def test_a_key_has_one_schema() -> None:
    with pytest.raises(ValueError, match="one schema"):
        replace(BASE, key_schemas=(HIDDEN, replace(HIDDEN, dtype="float32")))


@pytest.mark.parametrize("change", [{"block_size": 0}, {"tensor_parallel_size": 0}])
def test_sizes_are_positive(change: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        replace(BASE, **change)  # type: ignore[arg-type]
