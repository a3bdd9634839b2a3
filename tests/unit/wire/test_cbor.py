"""Canonical CBOR: the examples of RFC 8949, appendix A, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from stagecache_wire.cbor import Value, encode, encode_array_head, encode_token_blocks
from stagecache_wire.hash_errors import UnsupportedKey


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0, "00"),
        (10, "0a"),
        (23, "17"),
        (24, "1818"),
        (100, "1864"),
        (1000, "1903e8"),
        (1000000, "1a000f4240"),
        (1000000000000, "1b000000e8d4a51000"),
        (18446744073709551615, "1bffffffffffffffff"),
        (-1, "20"),
        (-100, "3863"),
        (-1000, "3903e7"),
        (-18446744073709551616, "3bffffffffffffffff"),
        (False, "f4"),
        (True, "f5"),
        (None, "f6"),
        (b"", "40"),
        (b"\x01\x02\x03\x04", "4401020304"),
        ("", "60"),
        ("IETF", "6449455446"),
        ("ü", "62c3bc"),
        ("水", "63e6b0b4"),
        ([], "80"),
        ((1, [2, 3], [4, 5]), "8301820203820405"),
        (list(range(1, 26)), "98190102030405060708090a0b0c0d0e0f101112131415161718181819"),
    ],
)
def test_the_examples_of_the_rfc(value: Value, expected: str) -> None:
    assert encode(value).hex() == expected


@pytest.mark.parametrize("value", [1.5, {1: 2}, 1 << 64, object(), "\ud800", (1, 2.0)])
def test_other_values_are_refused(value: object) -> None:
    with pytest.raises(UnsupportedKey):
        encode(value)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "token_ids",
    [
        [0, 23, 24, 255, 256, 65535, 65536, 2**32 - 1],
        [1, 2, 3, 4, 5, 6, 7, 8],
        [-1, 0, 2**40, 5, 6, 7, 8, 9],
        [n * 2654435761 % 2**32 >> n % 29 for n in range(400)],
        [n * 2654435761 % 2**32 >> n % 29 for n in range(399)] + [2**32],
    ],
    ids=["widths", "small", "beyond_32_bits", "many", "many_and_one_beyond_32_bits"],
)
def test_blocks_of_tokens_are_encoded_as_their_tuple(token_ids: list[int]) -> None:
    expected = [encode(tuple(token_ids[i : i + 4])) for i in range(0, len(token_ids), 4)]
    for ids in (token_ids, tuple(token_ids), np.array(token_ids), [*token_ids, 7, 7, 7]):
        assert [encode_array_head(4) + block for block in encode_token_blocks(ids, 4)] == expected


def test_only_full_blocks_are_encoded() -> None:
    assert encode_token_blocks([1, 2, 3], 4) == encode_token_blocks([], 4) == []


@pytest.mark.parametrize("token_ids", [[1.0, 2.0], ["a", "b"], np.zeros(4), np.zeros((2, 2), int), [1 << 63, 0]])
def test_token_ids_are_integers(token_ids: list[int]) -> None:
    with pytest.raises(UnsupportedKey):
        encode_token_blocks(token_ids, 2)
