"""A prefix in a file: token ids or block hashes, as the request that looks it up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from stagecache.errors import StageCacheError
from stagecache_wire.v1 import stagecache_pb2 as pb

MAX_TOKEN = (1 << 32) - 1
_FIELDS = {"tokens", "salt", "lora", "images"}


class PrefixFileError(StageCacheError):
    """A file that holds no token ids, or no hashes; the text says where."""


def read_tokens(path: Path, *, salt: str | None = None, lora: str | None = None) -> pb.LookupBlocksRequest:
    """A JSON list of ids, an object with ``tokens`` and what tells the request apart, or plain numbers.

    salt, lora: in place of the file's.

    Raises:
        PrefixFileError
    """
    text = _text(path)
    try:
        value: Any = json.loads(text)
    except RecursionError as error:
        raise PrefixFileError(f"{path} is nested too deeply to be token ids.") from error
    except ValueError:
        value = [_number(word, path) for word in text.replace(",", " ").split()]
    fields: dict[str, Any] = (
        value if isinstance(value, dict) else {"tokens": [value] if isinstance(value, int) else value}
    )
    if unknown := sorted(set(fields) - _FIELDS):
        raise PrefixFileError(f"{path} has a field {unknown[0]!r}; known are {', '.join(sorted(_FIELDS))}.")
    tokens = fields.get("tokens")
    if not isinstance(tokens, list) or not tokens:
        raise PrefixFileError(f"{path} holds no token ids: write [1, 2, 3], or one number a line.")
    for at, token in enumerate(tokens):
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token <= MAX_TOKEN:
            raise PrefixFileError(f"{path}: token {at} is {token!r}, no number from 0 to {MAX_TOKEN}.")
    identity = pb.SpanIdentity(
        cache_salt=_name(salt, fields, "salt", path), lora_name=_name(lora, fields, "lora", path)
    )
    for at, image in enumerate(fields.get("images") or ()):
        try:
            identity.mm_identifiers.append(image["identifier"])
            identity.mm_offsets.append(image["offset"])
            identity.mm_lengths.append(image["length"])
        except (KeyError, TypeError, ValueError) as error:
            raise PrefixFileError(
                f"{path}: image {at} needs an identifier (text), an offset and a length (numbers)."
            ) from error
    return pb.LookupBlocksRequest(token_ids=tokens, span_tokens=[len(tokens)], identities=[identity])


def read_hashes(path: Path) -> pb.LookupBlocksRequest:
    """64 hex digits a line, or a JSON list of such texts.

    Raises:
        PrefixFileError
    """
    text = _text(path)
    try:
        value: Any = json.loads(text)
    except RecursionError as error:
        raise PrefixFileError(f"{path} is nested too deeply to be hashes.") from error
    except ValueError:
        value = text.split()
    if not isinstance(value, list) or not value:
        raise PrefixFileError(f"{path} holds no hashes: write 64 hex digits a line.")
    raw = b""
    for at, word in enumerate(value):
        try:
            one = bytes.fromhex(word)
        except (TypeError, ValueError):
            one = b""
        if len(one) != 32:
            raise PrefixFileError(f"{path}: hash {at} is {str(word)[:80]!r}, no 64 hex digits.")
        raw += one
    return pb.LookupBlocksRequest(hashes=raw, span_blocks=[len(value)])


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PrefixFileError(f"{path} cannot be read: {error}.") from error


def _number(word: str, path: Path) -> int:
    try:
        return int(word)
    except ValueError:
        raise PrefixFileError(f"{path}: {word[:80]!r} is no token id.") from None


def _name(given: str | None, fields: dict[str, Any], what: str, path: Path) -> str:
    value = fields.get(what) if given is None else given
    if value is not None and not isinstance(value, str):
        raise PrefixFileError(f"{path}: {what} is {value!r}, no text.")
    try:
        (value or "").encode()
    except UnicodeEncodeError as error:
        raise PrefixFileError(f"{path}: {what} is {value!r}, no UTF-8.") from error
    return value or ""
