"""Prefix caching for the KV of a diffusion transformer (DiT) stage (docs/diffusion.md).

A DiT that takes text and reference images into one self-attention sequence computes their KV once a request, in the
first denoise step, and reads it in all others. That prefix is the same for each request with the same content, so it
is kept by content on the node, for all workers. Layers look down only:

    stage                   one request through a worker: admit, load, denoise, save, finish
    scheduler, worker       block tables and hits;  pages and the model's forwards
    node_store              prefix blocks in the node's daemon
    model                   what a DiT must provide, and the registry of prefix hooks
    identity, config        what makes two blocks the same;  settings and their refusals
    pages, counts           where KV lies in the worker;  what was computed and what was not

Names are loaded when they are first used, and torch with them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stagecache.diffusion.config import DiffusionConfig, DiffusionConfigError, DiffusionKVMode
    from stagecache.diffusion.identity import LoraContext, PrefixIdentity, ReferenceImage
    from stagecache.diffusion.model import KVShape, RowLengths, RowQuery, register_prefix_hook
    from stagecache.diffusion.node_store import NodeStore
    from stagecache.diffusion.stage import DiffusionStage

__all__ = [
    "DiffusionConfig",
    "DiffusionConfigError",
    "DiffusionKVMode",
    "DiffusionStage",
    "KVShape",
    "LoraContext",
    "NodeStore",
    "PrefixIdentity",
    "ReferenceImage",
    "RowLengths",
    "RowQuery",
    "register_prefix_hook",
]

_HOMES = {
    "DiffusionConfig": "config",
    "DiffusionConfigError": "config",
    "DiffusionKVMode": "config",
    "DiffusionStage": "stage",
    "KVShape": "model",
    "LoraContext": "identity",
    "NodeStore": "node_store",
    "PrefixIdentity": "identity",
    "ReferenceImage": "identity",
    "RowLengths": "model",
    "RowQuery": "model",
    "register_prefix_hook": "model",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{home}"), name)
