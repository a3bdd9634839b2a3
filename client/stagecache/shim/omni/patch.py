"""What is patched in vLLM-Omni, and for which releases.

    runner_mixin  PrefixCacheRunnerMixin._ensure_omni_prefix_cache   builds our manager, or vLLM-Omni's by the original
    gpu_runner    OmniGPUModelRunner.initialize_kv_cache             attaches once the KV cache is laid out
    npu_runner    OmniNPUModelRunner.initialize_kv_cache             the same, where that runner is imported
    kv_transfer   group_view.check_prefix_cache_kv_transfer          where blocks are shared, our gate decides (G2)

Nothing else is touched. Each patch looks for what it replaces and refuses to go on without it; so does an unknown
release. The plugin (``stagecache.shim.plugin``) calls ``apply`` when one of these modules has been imported.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import inspect
import os
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any, Final

from stagecache.shim.omni import attach
from stagecache.shim.omni.errors import UnsupportedOmniError, as_omni
from stagecache.shim.omni.late import LateManager, Waiting
from stagecache.shim.shared_blocks import shared_blocks_wanted

RUNNER_MIXIN: Final = "vllm_omni.core.prefix_cache.runner_mixin"
GROUP_VIEW: Final = "vllm_omni.core.prefix_cache.group_view"
GPU_RUNNER: Final = "vllm_omni.worker.gpu_model_runner"
NPU_RUNNER: Final = "vllm_omni.platforms.npu.worker.npu_model_runner"

SUPPORTED: Final = ("0.30.0", "0.32.0rc1")
"""Releases of vLLM-Omni that the tests run with."""

_MIXIN_METHODS: Final = (
    "_snapshot_prefix_cache_model_policy",
    "_ensure_omni_prefix_cache",
    "_prefix_cache_step_begin",
    "_prefix_cache_save_step",
    "_prefix_cache_materialize",
)
_PATCHED: Final = "_stagecache_patched"


def omni_version() -> str:
    """Release of the installed vLLM-Omni, without a local part.

    Raises:
        UnsupportedOmniError: its release is unknown, or none that works.
    """
    try:
        found = importlib.metadata.version("vllm-omni").partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        found = "unknown"
    if found not in SUPPORTED:
        raise as_omni(
            UnsupportedOmniError(
                f"vLLM-Omni {found} is not supported; releases that work are {' and '.join(SUPPORTED)}.",
                remedy="Install one of these, or unset STAGECACHE_SOCKET to run without stagecache.",
            )
        )
    return found


def apply(module: ModuleType) -> None:
    """Patch one of the modules above; idempotent.

    Raises:
        UnsupportedOmniError: an unknown release, or what a patch replaces is not there.
    """
    version = omni_version()
    patch_mixin(importlib.import_module(RUNNER_MIXIN), version)
    patch_kv_transfer(importlib.import_module(GROUP_VIEW), version)
    if module.__name__ == RUNNER_MIXIN:
        return
    if module.__name__ == GPU_RUNNER:
        patch_kv_cache_init(_target(module, "OmniGPUModelRunner", "gpu_runner", version))
    else:
        patch_kv_cache_init(_target(module, "OmniNPUModelRunner", "npu_runner", version))


def _target(module: ModuleType, name: str, patch: str, version: str) -> Any:
    found = getattr(module, name, None)
    if found is None:
        raise _missing(patch, f"{module.__name__}.{name}", version)
    return found


def _missing(patch: str, what: str, version: str) -> UnsupportedOmniError:
    error = UnsupportedOmniError(
        f"patch {patch}: vLLM-Omni {version} has no {what}.", remedy="Install an unchanged release of vLLM-Omni."
    )
    as_omni(error)
    return error


def patch_mixin(module: ModuleType, version: str) -> None:
    """Make the mixin build the sidecar manager."""
    mixin = _target(module, "PrefixCacheRunnerMixin", "runner_mixin", version)
    for name in _MIXIN_METHODS:
        if not callable(getattr(mixin, name, None)):
            raise _missing("runner_mixin", f"PrefixCacheRunnerMixin.{name}", version)
    manager = _target(module, "OmniPrefixCacheManager", "runner_mixin", version)
    adapter_api = "write_layout" in inspect.signature(manager.save_outputs).parameters
    if adapter_api is not version.startswith("0.32"):
        raise _missing("runner_mixin", "save_outputs with the parameters of that release", version)
    if adapter_api:
        _target(module, "PrefixCacheSchedulerAdapter", "runner_mixin", version)
    _target(module, "get_prefix_cache_group_view", "runner_mixin", version)
    if not hasattr(mixin, _PATCHED):
        mixin._ensure_omni_prefix_cache = _ensure(module, mixin._ensure_omni_prefix_cache, adapter_api)
        setattr(mixin, _PATCHED, True)


def patch_kv_transfer(module: ModuleType, version: str) -> None:
    """Let a stage whose KV may come from a connector have a cache where it shares blocks: what is asked of it then
    ``stagecache.gates`` asks when the worker attaches. Idempotent.
    """
    original = _target(module, "check_prefix_cache_kv_transfer", "kv_transfer", version)
    if getattr(original, _PATCHED, False):
        return

    @functools.wraps(original)
    def stagecache_check(kv_transfer_config: Any) -> None:
        if not (os.environ.get("STAGECACHE_SOCKET") and shared_blocks_wanted()):
            original(kv_transfer_config)

    setattr(stagecache_check, _PATCHED, True)
    module.check_prefix_cache_kv_transfer = stagecache_check  # type: ignore[attr-defined]


def _ensure(module: ModuleType, original: Callable[[Any], None], adapter_api: bool) -> Callable[[Any], None]:
    """The mixin's one-shot construction, with our manager where the stage has one."""

    @functools.wraps(original)
    def stagecache_ensure(self: Any) -> None:
        manager = attach.take(self)
        if manager is None or isinstance(manager, Waiting):
            config = self._omni_prefix_cache_cfg
            original(self)
            if manager is None:
                return
            if adapter_api or self.omni_prefix_cache is None:
                manager.stop()  # It cannot change: a session would hold memory of the node for nothing.
                return
            view = _group_view(module, self, config)
            late = self.omni_prefix_cache = LateManager(self, self.omni_prefix_cache, manager, view)
            weakref.finalize(self, late.shutdown)
            return
        config, self._omni_prefix_cache_cfg = self._omni_prefix_cache_cfg, None
        view = _group_view(module, self, config)
        if view is None:
            raise as_omni(
                UnsupportedOmniError(
                    "the runner's input batch has no block table.", remedy="Turn prefix caching off for this stage."
                )
            )
        manager.bind(view)
        manager.register_policy(self._omni_cache_policy)
        self.omni_prefix_cache = manager
        if adapter_api:
            from stagecache.shim.omni.adapter import SidecarSchedulerAdapter

            self._prefix_cache_adapter = SidecarSchedulerAdapter()
            self._prefix_cache_group_view = view

    return stagecache_ensure


def _group_view(module: ModuleType, runner: Any, config: Any) -> Any:
    """vLLM-Omni's view of a runner's batch; None where it has no block table."""
    groups = getattr(runner.kv_cache_config, "kv_cache_groups", None)
    return module.get_prefix_cache_group_view(runner.input_batch, config.block_size, kv_cache_groups=groups)


def patch_kv_cache_init(runner_class: Any) -> None:
    """Attach behind a runner's ``initialize_kv_cache``, unless that only profiles memory; idempotent."""
    own = vars(runner_class).get("initialize_kv_cache")
    if getattr(own, _PATCHED, False):
        return
    inherited = getattr(runner_class, "initialize_kv_cache", None)
    if inherited is None:
        raise _missing("initialize_kv_cache", f"{runner_class.__name__}.initialize_kv_cache", omni_version())

    @functools.wraps(inherited)
    def stagecache_initialize_kv_cache(self: Any, kv_cache_config: Any, *args: Any, **kwargs: Any) -> None:
        if own is None:
            super(runner_class, self).initialize_kv_cache(kv_cache_config, *args, **kwargs)
        else:
            own(self, kv_cache_config, *args, **kwargs)
        if not (kwargs.get("is_profiling") or (args and args[0] is True)):
            attach.prepare(self)

    setattr(stagecache_initialize_kv_cache, _PATCHED, True)
    runner_class.initialize_kv_cache = stagecache_initialize_kv_cache
