"""What is patched in vLLM-Omni: it applies, refuses what it does not know, and is absent where it is not asked for."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import vllm_omni.worker.gpu_model_runner as gpu_runner
from vllm_omni.core.prefix_cache import OmniPrefixCacheUnmatchError, runner_mixin

from stagecache.demo.checkpoint import ModelShape, write_checkpoint
from stagecache.local_engine import quiet_engine_environment
from stagecache.shim import plugin
from stagecache.shim.omni import patch
from stagecache.shim.omni.errors import UnsupportedOmniError

ROOT = Path(__file__).resolve().parents[2]

WORKER = """
import json, sys
from pathlib import Path
import vllm_omni
from vllm import LLM, SamplingParams
from tests.omni.engines import engine_arguments, tokens
llm = LLM(**engine_arguments(Path(sys.argv[1]), "thinker"))
params = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False, ignore_eos=True)
prompts = [{"prompt_token_ids": tokens(1, 150)}]
hits = [llm.generate(prompts, params, use_tqdm=False)[0].num_cached_tokens for _ in range(2)]
from tests.omni.ar_worker import RUNNERS, GPUARModelRunner
from vllm_omni.core.prefix_cache.runner_mixin import PrefixCacheRunnerMixin
print(json.dumps({
    "hits": hits,
    "manager": type(RUNNERS["thinker"].omni_prefix_cache).__name__,
    "ours": sorted(m for m in sys.modules if m.partition(".")[0] in ("stagecache", "stagecached", "stagecache_wire")),
    "hooks": [type(finder).__name__ for finder in sys.meta_path if "stagecache" in type(finder).__module__],
    "ensure": Path(PrefixCacheRunnerMixin._ensure_omni_prefix_cache.__code__.co_filename).name,
    "kv": [c.__name__ for c in GPUARModelRunner.__mro__ if "initialize_kv_cache" in vars(c)],
}))
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_with_the_variable_unset_an_engine_runs_with_nothing_of_ours_but_the_entry_point(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, ModelShape(hidden=128, vocab=1024, max_len=1024))
    env = {name: value for name, value in os.environ.items() if not name.startswith(("STAGECACHE_", "VLLM_"))}
    env |= quiet_engine_environment() | {"VLLM_PLUGINS": "stagecache,vllm_omni_register_models"}
    env |= {"PYTHONPATH": str(ROOT), "VLLM_CACHE_ROOT": str(tmp_path / "vllm")}
    command = [sys.executable, "-c", WORKER, str(tmp_path)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "hits": [0, 128],
        "manager": "OmniPrefixCacheManager",
        "ours": ["stagecache", "stagecache.shim", "stagecache.shim.plugin"],
        "hooks": [],
        "ensure": "runner_mixin.py",
        "kv": ["GPUModelRunner"],
    }


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
