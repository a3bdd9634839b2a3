"""Keys that a stage declares by STAGECACHE_KEYS, and the one that its model's configuration tells.

    STAGECACHE_KEYS="hidden_states.layer_24:bfloat16:2048 codes.audio:int64:16 meta.codec_streaming:int8"

The parts, each in the form of ``stagecache.plan.parse_key``, are separated by blanks, commas or semicolons.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from stagecache.errors import StageCacheError
from stagecache.plan import parse_key
from stagecache.policy import HIDDEN_KEY
from stagecache.shim.omni.errors import StageKeysError, as_omni
from stagecache_wire.geometry import DTYPE_BYTES, KeySchema


def keys_from_env(environ: Mapping[str, str] = os.environ) -> list[KeySchema]:
    """Keys that STAGECACHE_KEYS declares, none where it is not set.

    Raises:
        StageKeysError: a part that is no key, or a key named twice.
    """
    keys: dict[str, KeySchema] = {}
    for part in re.split(r"[\s,;]+", environ.get("STAGECACHE_KEYS", "").strip()):
        if not part:
            continue
        try:
            key = parse_key(part)
        except ValueError as error:
            raise _refused(f"STAGECACHE_KEYS: {error}.") from error
        if key.name in keys:
            raise _refused(f"STAGECACHE_KEYS names {key.name} twice.")
        keys[key.name] = key
    return list(keys.values())


def _refused(message: str) -> StageCacheError:
    remedy = f'Write it as in "codes.audio:int64:16"; dtypes are {", ".join(DTYPE_BYTES)}.'
    return as_omni(StageKeysError(message, remedy=remedy))


def hidden_key_of(model_config: Any) -> KeySchema:
    """The key of a model's hidden states, as its configuration tells."""
    dtype = str(model_config.dtype).removeprefix("torch.")
    return KeySchema(HIDDEN_KEY, dtype, (int(model_config.get_hidden_size()),))
