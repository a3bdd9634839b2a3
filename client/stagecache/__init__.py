"""stagecache: the client of the node's cache daemon for stage outputs of vLLM and vLLM-Omni.

    cache = StageCache.attach(socket=path, model="m", stage="thinker", geometry=Geometry(...), view=view)
    cache.new_step_starts(scheduler_output)
    step = cache.save_outputs(hidden, {}, num_tokens_unpadded=n, num_tokens_padded=n)
    rows = cache.materialize(step, req_ids).hidden_states

Names are loaded when they are first used: importing this package imports neither torch nor grpc.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stagecache.cache import StageCache
    from stagecache.outputs import StageCacheOutputs
    from stagecache.policy import HIDDEN_KEY, ModelCachePolicy
    from stagecache_wire.geometry import Geometry, KeySchema

__version__ = "0.1.0"

__all__ = ["HIDDEN_KEY", "Geometry", "KeySchema", "ModelCachePolicy", "StageCache", "StageCacheOutputs"]

_HOMES = {
    "StageCache": "stagecache.cache",
    "StageCacheOutputs": "stagecache.outputs",
    "HIDDEN_KEY": "stagecache.policy",
    "ModelCachePolicy": "stagecache.policy",
    "Geometry": "stagecache_wire.geometry",
    "KeySchema": "stagecache_wire.geometry",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(home), name)
