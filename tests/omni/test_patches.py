"""What is patched in vLLM-Omni: it applies, refuses what it does not know, and is absent where it is not asked for."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from types import ModuleType, SimpleNamespace

import pytest
import vllm_omni.worker.gpu_model_runner as gpu_runner
from vllm_omni.core.prefix_cache import OmniPrefixCacheUnmatchError, runner_mixin

from stagecache.shim import plugin
from stagecache.shim.omni import patch
from stagecache.shim.omni.errors import UnsupportedOmniError

WORKER = """
import json, sys
from vllm.plugins import load_general_plugins
load_general_plugins()
import vllm.v1.worker.cpu_worker
import vllm_omni.worker.gpu_ar_model_runner as ar
from vllm_omni.core.prefix_cache.runner_mixin import PrefixCacheRunnerMixin
ours = sorted(m for m in sys.modules if m.partition(".")[0] in ("stagecache", "stagecached", "stagecache_wire"))
print(json.dumps({
    "ours": ours,
    "ensure": PrefixCacheRunnerMixin._ensure_omni_prefix_cache.__name__,
    "module": PrefixCacheRunnerMixin._ensure_omni_prefix_cache.__code__.co_filename.split("site-packages")[-1],
    "kv": "initialize_kv_cache" in vars(ar.OmniGPUModelRunner),
}))
"""


def in_a_worker() -> dict[str, object]:
    """What a worker has loaded after its plugins and runner."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("STAGECACHE_")}
    done = subprocess.run([sys.executable, "-c", WORKER], env=env, capture_output=True, text=True, check=True)
    answer: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return answer


@pytest.mark.slow
def test_with_the_variable_unset_nothing_but_the_entry_point_is_loaded() -> None:
    found = in_a_worker()
    assert found["ours"] == ["stagecache", "stagecache.shim", "stagecache.shim.plugin"]
    assert str(found["module"]).startswith("/vllm_omni/")
    assert found["kv"] is False


def test_the_plugin_watches_what_is_patched() -> None:
    assert plugin.OMNI == (patch.RUNNER_MIXIN, patch.GPU_RUNNER, patch.NPU_RUNNER)


def test_patching_twice_changes_nothing() -> None:
    for module in (runner_mixin, gpu_runner):
        patch.apply(module)
    ensure = runner_mixin.PrefixCacheRunnerMixin._ensure_omni_prefix_cache
    init = gpu_runner.OmniGPUModelRunner.initialize_kv_cache
    for module in (runner_mixin, gpu_runner):
        patch.apply(module)
    assert runner_mixin.PrefixCacheRunnerMixin._ensure_omni_prefix_cache is ensure
    assert gpu_runner.OmniGPUModelRunner.initialize_kv_cache is init


def test_the_installed_release_is_one_that_works() -> None:
    assert patch.omni_version() in patch.SUPPORTED


@pytest.mark.parametrize("version", ["0.29.0", "0.30.1", "0.32.0", "1.0.0"])
def test_an_unknown_release_is_refused_with_those_that_work(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    with pytest.raises(UnsupportedOmniError) as error:
        patch.apply(runner_mixin)
    assert isinstance(error.value, OmniPrefixCacheUnmatchError)
    for named in (version, *patch.SUPPORTED):
        assert named in str(error.value)


def test_a_local_build_of_a_known_release_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.30.0+cpu")
    assert patch.omni_version() == "0.30.0"


def mixin_module(**changes: object) -> ModuleType:
    """A copy of the mixin's module, in parts."""
    module = ModuleType(patch.RUNNER_MIXIN)
    names = ("PrefixCacheRunnerMixin", "OmniPrefixCacheManager", "get_prefix_cache_group_view")
    found = {name: getattr(runner_mixin, name) for name in names}
    found["PrefixCacheSchedulerAdapter"] = getattr(runner_mixin, "PrefixCacheSchedulerAdapter", None)
    vars(module).update({**found, **changes})
    return module


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"PrefixCacheRunnerMixin": None}, "PrefixCacheRunnerMixin"),
        ({"PrefixCacheRunnerMixin": SimpleNamespace()}, "_snapshot_prefix_cache_model_policy"),
        ({"OmniPrefixCacheManager": None}, "OmniPrefixCacheManager"),
        ({"get_prefix_cache_group_view": None}, "get_prefix_cache_group_view"),
        ({"OmniPrefixCacheManager": SimpleNamespace(save_outputs=lambda *, other: None)}, "parameters"),
    ],
)
def test_a_patch_without_its_target_fails_loudly(changes: dict[str, object], named: str) -> None:
    version = patch.omni_version()
    if named == "parameters":
        version = "0.32.0rc1"  # whose saves take a write layout
    with pytest.raises(UnsupportedOmniError, match=f"runner_mixin.*{named}"):
        patch.patch_mixin(mixin_module(**changes), version)


def test_a_runner_module_without_its_class_fails_loudly(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnsupportedOmniError, match="OmniNPUModelRunner"):
        patch.apply(ModuleType(patch.NPU_RUNNER))
