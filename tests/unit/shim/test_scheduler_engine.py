"""Engine calls after which the KV cache does not belong to the weights ask for a reset (R5)."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from stagecache.shim.scheduler import install, shim_of
from stagecache.shim.scheduler_engine import changes_weights, patch_engine_core
from tests.unit.shim.test_scheduler import Scheduler


class EngineCore:
    """Stands in for vLLM's: what it was asked, and whether that fails."""

    def __init__(self) -> None:
        self.scheduler = Scheduler()
        self.fails = False

    def collective_rpc(self, method: Any, timeout: Any = None, args: Any = (), kwargs: Any = None) -> list[Any]:
        if self.fails:
            raise RuntimeError("the worker failed half-way")
        return [method]

    def sleep(self, level: int = 1, mode: str = "abort") -> str:
        return f"sleeps {level} {mode}"

    def wake_up(self, tags: Any = None) -> str:
        return f"wakes {tags}"

    def add_lora(self, lora_request: Any) -> bool:
        return True


@pytest.fixture
def core() -> Any:
    module = ModuleType("vllm.v1.engine.core")
    module.EngineCore = type("EngineCore", (EngineCore,), {})  # type: ignore[attr-defined]
    patch_engine_core(module)
    patch_engine_core(module)
    made = module.EngineCore()
    install(made.scheduler)
    return made


def causes(core: Any) -> list[str]:
    shim = shim_of(core.scheduler)
    assert shim is not None
    return list(shim.pending)


@pytest.mark.parametrize(
    ("call", "cause"),
    [
        (lambda core: core.collective_rpc("reload_weights"), "collective_rpc(reload_weights)"),
        (
            lambda core: core.collective_rpc("update_weights", None, (), {"update_info": {}}),
            "collective_rpc(update_weights)",
        ),
        (lambda core: core.sleep(), "sleep"),
        (lambda core: core.sleep(0, mode="keep"), "sleep"),
        (lambda core: core.wake_up(["scheduling"]), "wake_up"),
        (lambda core: core.wake_up(tags=["weights"]), "wake_up"),
        (lambda core: core.add_lora(SimpleNamespace(lora_name="a", load_inplace=True)), "LoRA a loaded in place"),
        (
            lambda core: core.collective_rpc("add_lora", args=(SimpleNamespace(lora_name="b", load_inplace=True),)),
            "LoRA b loaded in place",
        ),
    ],
)
def test_a_call_that_leaves_stale_kv_asks_for_one_reset(core: Any, call: Any, cause: str) -> None:
    call(core)
    assert causes(core) == [cause]
    core.scheduler.schedule()
    assert shim_of(core.scheduler).epoch == 1  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "call",
    [
        lambda core: core.collective_rpc("get_weight_version"),
        lambda core: core.collective_rpc("profile", args=(True,)),
        lambda core: core.collective_rpc("apply_model", args=(lambda model: None,)),
        lambda core: core.add_lora(SimpleNamespace(lora_name="a", load_inplace=False)),
        lambda core: core.add_lora(SimpleNamespace(lora_name="a")),
    ],
)
def test_other_calls_ask_for_none(core: Any, call: Any) -> None:
    call(core)
    assert causes(core) == []


def test_answers_and_arguments_go_through(core: Any) -> None:
    assert core.sleep(2) == "sleeps 2 abort"
    assert core.wake_up(tags=["kv_cache"]) == "wakes ['kv_cache']"
    assert core.collective_rpc("reload_weights") == ["reload_weights"]


def test_a_call_that_failed_half_way_counts(core: Any) -> None:
    """Some weights may be new."""
    core.fails = True
    with pytest.raises(RuntimeError, match="half-way"):
        core.collective_rpc("reload_weights")
    assert causes(core) == ["collective_rpc(reload_weights)"]


def test_a_function_counts_by_its_name(core: Any) -> None:
    def load_new_weights(model: Any) -> None: ...

    core.collective_rpc(load_new_weights)
    core.collective_rpc("apply_model", args=(load_new_weights,))
    assert causes(core) == ["collective_rpc(load_new_weights)"] * 2


def test_an_engine_whose_scheduler_is_not_wrapped_is_left_alone(core: Any) -> None:
    core.scheduler = Scheduler()
    assert core.sleep() == "sleeps 1 abort"
    del core.scheduler
    assert core.collective_rpc("reload_weights") == ["reload_weights"]


CHANGE = """
reload_weights update_weights start_weight_update finish_weight_update load_weights load_model sleep wake_up
update_named_param reset_named_params receive_weights sync_model_weights update_weights_from_ipc_handles
handle_sleep_task handle_wake_task checkpoint_restore load_state_dict broadcast_parameters swap_weights
"""
KEEP = """
get_weight_version init_weight_transfer_engine profile check_health execute_dummy_batch encoder_loaded
update_max_model_len save_sharded_state remove_lora list_loras get_model_parameters count_params checkpoint_prepare
synchronize_device set_kv_cache_layout
"""


@pytest.mark.parametrize(("name", "changes"), [(n, True) for n in CHANGE.split()] + [(n, False) for n in KEEP.split()])
def test_methods_of_workers_count_by_their_names(name: str, changes: bool) -> None:
    assert changes_weights(name) is changes
