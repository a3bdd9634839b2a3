"""The shim for vLLM-Omni: ``SidecarPrefixCacheManager`` in place of its in-process prefix cache.

Names are loaded when they are first used; the plugin imports ``stagecache.shim.omni.patch`` by name.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stagecache.shim.omni.manager import SidecarPrefixCacheManager

__all__ = ["SidecarPrefixCacheManager"]


def __getattr__(name: str) -> Any:
    if name == "SidecarPrefixCacheManager":
        return import_module("stagecache.shim.omni.manager").SidecarPrefixCacheManager
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
