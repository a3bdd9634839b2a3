"""Calls of the engine after which its KV cache no longer belongs to its weights: each asks the scheduler for a reset.

vLLM resets its prefix cache in ``sleep(1)`` and in a pause that clears caches; those count by themselves. After
``wake_up``, ``sleep(0)``, an adapter loaded in place, and weights changed by ``collective_rpc`` it does not, and the
next request hits KV of the old weights. The workers' methods are named by their callers, so what changes weights is
told by name (``changes_weights``).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from types import ModuleType
from typing import Any, Final

from stagecache.shim.scheduler import shim_of

_PATCHED: Final = "_stagecache_patched"
_CHANGES: Final = re.compile(
    r"(re)?load|update|sync|set|put|push|pull|recv|receive|broadcast|copy|swap|merge|apply|restore|start|finish"
)
_OF_WEIGHTS: Final = re.compile(r"weight|param|state_dict|load_model|checkpoint_restore")
_BY_NAME: Final = frozenset({"sleep", "wake_up", "handle_sleep_task", "handle_wake_task"})


def changes_weights(name: str) -> bool:
    """Whether a worker's method of this name changes weights, or drops and restores memory.

    ``reload_weights``, ``update_weights``, ``finish_weight_update``, ``update_named_param`` and the like, ``sleep``;
    not ``get_weight_version`` nor ``init_weight_transfer_engine``. A reset too many costs time; one too few, KV of
    other weights: so an unknown name counts when it reads as a change of weights or parameters.
    """
    return name in _BY_NAME or bool(_OF_WEIGHTS.search(name) and _CHANGES.search(name))


def _cause_of_rpc(method: Any, args: Any = (), *_: Any, **__: Any) -> str:
    """Why this ``collective_rpc`` asks for a reset; empty when it does not."""
    called = [method if isinstance(method, str) else getattr(method, "__name__", "")]
    called += [getattr(given, "__name__", "") for given in args or () if callable(given)]  # apply_model(function)
    return next((f"collective_rpc({name})" for name in called if changes_weights(name)), "")


def _cause_of_lora(request: Any) -> str:
    """Hashes name an adapter, not its content."""
    return f"LoRA {request.lora_name} loaded in place" if getattr(request, "load_inplace", False) else ""


def patch_engine_core(module: ModuleType) -> None:
    """Wrap the calls of the engine core that make its KV cache stale; idempotent. module: ``vllm.v1.engine.core``."""
    core = module.EngineCore
    if vars(core).get(_PATCHED, False):
        return
    _wrap(core, "sleep", lambda self, *args, **kwargs: "sleep")
    _wrap(core, "wake_up", lambda self, *args, **kwargs: "wake_up")
    _wrap(core, "add_lora", lambda self, request: _cause_of_lora(request))
    _wrap(core, "collective_rpc", _rpc_cause)
    setattr(core, _PATCHED, True)


def _rpc_cause(
    self: Any, method: Any, timeout: float | None = None, args: tuple[Any, ...] = (), kwargs: Any = None
) -> str:
    """Arguments as of ``EngineCore.collective_rpc``."""
    if method == "add_lora":
        return next(filter(None, map(_cause_of_lora, args)), "")
    return _cause_of_rpc(method, args)


def _wrap(core: Any, name: str, cause_of: Callable[..., str]) -> None:
    """After ``core.name``, also when it failed half-way, ask its scheduler for a reset where ``cause_of`` names one."""
    method = getattr(core, name, None)
    if method is None:
        return

    @functools.wraps(method)
    def stagecache_call(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        finally:
            shim = shim_of(getattr(self, "scheduler", None))
            cause = "" if shim is None else cause_of(self, *args, **kwargs)
            if shim is not None and cause:
                shim.request_reset(cause)

    setattr(core, name, stagecache_call)
