"""The engine's plugin entry point (group ``vllm.general_plugins``).

The engine calls :func:`register` in every process it has: the parent, the engine core, each worker, and the subprocess
that inspects model classes. So it costs nothing where nothing is to be done: without ``STAGECACHE_SOCKET`` it returns
at once; with it, it only leaves a hook on the import system. The runner shim is imported, and the runner patched, when
the engine itself first imports a model runner, or at once where it already has.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

#: Modules whose import is watched: the V1 model runner, which is wrapped, and the V2 one, which is refused; in the
#: engine core's process, the scheduler and the engine core itself.
V1_RUNNER = "vllm.v1.worker.gpu_model_runner"
V2_RUNNER = "vllm.v1.worker.gpu.model_runner"
SCHEDULER = "vllm.v1.core.sched.scheduler"
ENGINE_CORE = "vllm.v1.engine.core"
#: vLLM-Omni's: the mixin that builds its prefix cache, and the runners whose KV cache is laid out.
OMNI = (
    "vllm_omni.core.prefix_cache.runner_mixin",
    "vllm_omni.worker.gpu_model_runner",
    "vllm_omni.platforms.npu.worker.npu_model_runner",
)
WATCHED = (V1_RUNNER, V2_RUNNER, SCHEDULER, ENGINE_CORE, *OMNI)


def register() -> None:
    """Install the shim lazily; idempotent. Does nothing unless STAGECACHE_SOCKET is set."""
    if not os.environ.get("STAGECACHE_SOCKET"):
        return
    waiting = set()
    for name in WATCHED:
        module = sys.modules.get(name)
        if module is None or getattr(getattr(module, "__spec__", None), "_initializing", False):
            waiting.add(name)
        else:
            _patch(module)
    if waiting and not any(isinstance(finder, RunnerFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, RunnerFinder(waiting))


def _patch(module: ModuleType) -> None:
    if module.__name__ == SCHEDULER:
        from stagecache.shim.scheduler import patch_scheduler

        patch_scheduler(module)
    elif module.__name__ == ENGINE_CORE:
        from stagecache.shim.scheduler_engine import patch_engine_core

        patch_engine_core(module)
    elif module.__name__ == V1_RUNNER:
        from stagecache.shim.vllm import patch_v1_runner

        patch_v1_runner(module)
    elif module.__name__ in OMNI:
        from stagecache.shim.omni.patch import apply

        apply(module)
    else:
        from stagecache.shim.vllm import refuse_v2_runner

        refuse_v2_runner(module)


class RunnerFinder(MetaPathFinder):
    """Finds the watched modules as the other finders do, with a loader that patches each once it has run."""

    def __init__(self, waiting: set[str]) -> None:
        self.waiting = waiting

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self.waiting:
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = PatchingLoader(spec.loader, self)
                return spec
        return None


class PatchingLoader(Loader):
    """Loads as the wrapped loader does, then patches. Everything else about the module is the wrapped loader's."""

    def __init__(self, loader: Loader, finder: RunnerFinder) -> None:
        self._loader = loader
        self._finder = finder

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._finder.waiting.discard(module.__name__)
        _patch(module)

    def __getattr__(self, name: str) -> object:
        return getattr(self._loader, name)
