"""Keys that a stage declares: by STAGECACHE_KEYS, and what its model's configuration tells.

    STAGECACHE_KEYS="hidden_states.layer_24:bfloat16:2048 codes.audio:int64:16 meta.codec_streaming:int8"

Each is ``NAME:DTYPE`` or ``NAME:DTYPE:SHAPE``, separated by blanks, commas or semicolons. SHAPE is one token's row,
sizes joined by ``x``; without it a row is one number.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from stagecache.errors import StageCacheError
from stagecache.policy import HIDDEN_KEY
from stagecache.shim.omni.errors import StageKeysError, as_omni
from stagecache_wire.geometry import DTYPE_BYTES, BadGeometryError, KeySchema

_KEY = re.compile(r"(?P<name>.+?):(?P<dtype>[a-z]\w*)(:(?P<shape>\d+(x\d+)*))?")


def parse_keys(text: str) -> list[KeySchema]:
    """Keys of a STAGECACHE_KEYS value.

    Raises:
        StageKeysError: a part that names no key, a dtype that is not known, or a key named twice.
    """
    keys: dict[str, KeySchema] = {}
    for part in re.split(r"[\s,;]+", text.strip()):
        if not part:
            continue
        match = _KEY.fullmatch(part)
        if match is None or match["dtype"] not in DTYPE_BYTES:
            raise _refused(f"STAGECACHE_KEYS: {part!r} is not NAME:DTYPE or NAME:DTYPE:SHAPE.")
        if match["name"] in keys:
            raise _refused(f"STAGECACHE_KEYS names {match['name']} twice.")
        shape = tuple(int(size) for size in match["shape"].split("x")) if match["shape"] else ()
        try:
            keys[match["name"]] = KeySchema(match["name"], match["dtype"], shape).checked()
        except BadGeometryError as error:
            raise _refused(f"STAGECACHE_KEYS: {part!r}: {error}.") from error
    return list(keys.values())


def _refused(message: str) -> StageCacheError:
    known = ", ".join(DTYPE_BYTES)
    return as_omni(StageKeysError(message, remedy=f'Write it as in "codes.audio:int64:16"; dtypes are {known}.'))


def keys_from_env(environ: Mapping[str, str] = os.environ) -> list[KeySchema]:
    """Keys that STAGECACHE_KEYS declares, none where it is not set."""
    return parse_keys(environ.get("STAGECACHE_KEYS", ""))


def hidden_key_of(model_config: Any) -> KeySchema:
    """The key of a model's hidden states, as its configuration tells."""
    dtype = str(model_config.dtype).removeprefix("torch.")
    return KeySchema(HIDDEN_KEY, dtype, (int(model_config.get_hidden_size()),))
