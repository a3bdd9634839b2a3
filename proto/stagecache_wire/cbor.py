"""Canonical CBOR (RFC 8949, section 4.2) of the values that block hashes are made of.

Only what `sha256_cbor` needs: integers of at most 64 bits, byte strings, text, sequences, True, False and None. The
bytes equal those of `cbor2.dumps(value, canonical=True)`, which vLLM hashes; the daemon's base install has no cbor2.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from stagecache_wire.hash_errors import UnsupportedKey

Value: TypeAlias = "int | bytes | str | bool | Sequence[Value] | None"
TokenIds: TypeAlias = "Sequence[int] | npt.NDArray[np.integer]"

_UNSIGNED, _NEGATIVE, _BYTES, _TEXT, _ARRAY = 0x00, 0x20, 0x40, 0x60, 0x80
_FALSE, _TRUE, _NULL = b"\xf4", b"\xf5", b"\xf6"

# Up to so many token ids, encoding one by one is faster than the numpy calls.
_FEW_TOKENS = 48

# Columns of the widest encoding of a token id below 2**32: one initial byte and four of the number.
_WIDTH = 5


def encode_head(major: int, number: int) -> bytes:
    """Initial byte and shortest form of `number`, 0 <= number < 2**64, under a major type (high three bits)."""
    if number < 24:
        return bytes((major | number,))
    for info, width in ((24, 1), (25, 2), (26, 4), (27, 8)):
        if number < 1 << 8 * width:
            return bytes((major | info,)) + number.to_bytes(width, "big")
    raise UnsupportedKey(f"the number {number} needs more than 64 bits; no token id, offset or length does")


def encode_array_head(length: int) -> bytes:
    """Head of an array of `length` items; the items' own encodings follow it."""
    return encode_head(_ARRAY, length)


def encode(value: Value) -> bytes:
    """The canonical encoding of `value`. Raises UnsupportedKey for any type not named in the module's docstring."""
    if value is None:
        return _NULL
    if isinstance(value, bool):
        return _TRUE if value else _FALSE
    if isinstance(value, int):
        return encode_head(_UNSIGNED, value) if value >= 0 else encode_head(_NEGATIVE, -1 - value)
    if isinstance(value, bytes):
        return encode_head(_BYTES, len(value)) + value
    if isinstance(value, str):
        try:
            text = value.encode()
        except UnicodeEncodeError as error:
            raise UnsupportedKey(f"the text {value!r} is not valid Unicode and has no encoding") from error
        return encode_head(_TEXT, len(text)) + text
    if isinstance(value, (tuple, list)):
        return encode_array_head(len(value)) + b"".join(map(encode, value))
    raise UnsupportedKey(f"{value!r} is a {type(value).__name__}; use int, bytes, str, tuple or None")


def encode_token_blocks(token_ids: TokenIds, block_size: int) -> list[bytes]:
    """The encodings of the token ids, a bytes object for each full block, without the array heads.

    token_ids: integers of 64 bits or less; what lies beyond the last full block is not encoded. All of a prompt is
    encoded in a few numpy calls: 32,768 ids take about 3 ms.
    """
    if block_size < 1:
        raise ValueError(f"a block of {block_size} tokens was asked for; give at least 1")
    num_blocks = len(token_ids) // block_size
    if num_blocks == 0:
        return []
    ids = _as_integers(token_ids)[: num_blocks * block_size]
    if len(ids) <= _FEW_TOKENS or int(ids.min()) < 0 or int(ids.max()) >= 1 << 32:
        encoded = [encode(token_id) for token_id in ids.tolist()]
        return [b"".join(encoded[i : i + block_size]) for i in range(0, len(encoded), block_size)]
    return _encode_uint32_blocks(ids.astype(np.uint32, copy=False), block_size)


def _as_integers(token_ids: TokenIds) -> npt.NDArray[np.integer]:
    if not isinstance(token_ids, np.ndarray):
        try:
            return np.frombuffer(array("q", token_ids), dtype=np.int64)
        except (TypeError, OverflowError) as error:
            raise UnsupportedKey(f"token ids must be integers of 64 bits: {error}") from error
    if token_ids.ndim != 1 or token_ids.dtype.kind not in "iu":
        raise UnsupportedKey(f"token ids must be 1-D integers, found {token_ids.dtype} of shape {token_ids.shape}")
    return token_ids


def _encode_uint32_blocks(ids: npt.NDArray[np.uint32], block_size: int) -> list[bytes]:
    """Each id is laid left-aligned into a row of _WIDTH bytes; the bytes in use, row by row, are the encoding."""
    number = np.empty((len(ids), 4), dtype=np.uint8)
    number.view(">u4")[:, 0] = ids
    widths = np.ones(len(ids), dtype=np.int64)
    rows = np.empty((len(ids), _WIDTH), dtype=np.uint8)
    rows[:, 0] = number[:, 3]
    for limit, initial, width in ((24, 24, 1), (1 << 8, 25, 2), (1 << 16, 26, 4)):
        at = np.flatnonzero(ids >= limit)
        if not len(at):
            break
        rows[at, 0] = initial
        rows[at, 1 : 1 + width] = number[at, 4 - width :]
        widths[at] = 1 + width
    data = rows[np.arange(_WIDTH) < widths[:, None]].tobytes()
    ends = np.cumsum(widths)[block_size - 1 :: block_size].tolist()
    return [data[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)]
