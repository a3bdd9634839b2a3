"""Settings of a diffusion stage: defaults, and every refusal with what to change."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from examples.small_dit import MODEL_NAME, SmallDiT
from stagecache.diffusion import DiffusionConfig, DiffusionConfigError, DiffusionKVMode, DiffusionStage
from stagecache.gates import GateRefusal
from tests.unit.diffusion.kit import SIZES, IndexInProcess

PAGED = {"diffusion_kv_mode": "paged_scheduler", "enable_prefix_caching": True}


def test_dense_legacy_without_prefix_caching_is_the_default() -> None:
    """G4"""
    config = DiffusionConfig("any model")
    assert config.diffusion_kv_mode is DiffusionKVMode.DENSE_LEGACY
    assert config.enable_prefix_caching is False


def test_prefix_caching_of_a_model_with_a_hook_is_served() -> None:
    """G4"""
    config = DiffusionConfig(MODEL_NAME, **PAGED)  # type: ignore[arg-type]
    assert config.diffusion_kv_mode is DiffusionKVMode.PAGED_SCHEDULER


@pytest.mark.parametrize(
    ("settings", "found", "change"),
    [
        ({"diffusion_kv_mode": "dense_legacy"}, "diffusion_kv_mode=dense_legacy", "diffusion_kv_mode=paged_scheduler"),
        ({"model": "unhooked"}, "'unhooked', which has no prefix hook", "register_prefix_hook"),
        ({"kv_transfer_config": {"kv_connector": "SomeConnector"}}, "kv_transfer_config", "Remove kv_transfer_config"),
        ({"enable_sleep_mode": True}, "enable_sleep_mode", "Turn one of the two off"),
    ],
)
def test_what_prefix_caching_cannot_be_combined_with_is_refused(
    settings: dict[str, Any], found: str, change: str
) -> None:
    """G4"""
    with pytest.raises(DiffusionConfigError, match=found) as refused:
        DiffusionConfig(**{"model": MODEL_NAME, **PAGED, **settings})
    assert change in str(refused.value)
    assert refused.value.rule == "G4"
    assert isinstance(refused.value, GateRefusal)
    # The control: without prefix caching the very same settings serve.
    DiffusionConfig(**{"model": MODEL_NAME, **PAGED, **settings, "enable_prefix_caching": False})


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({"diffusion_kv_mode": "paged_worker_local"}, "dense_legacy, paged_scheduler"),
        ({"enable_prefix_caching": "yes"}, "true or false"),
        ({"block_size": 0}, "at least 1"),
        ({"num_kv_blocks": 0}, "at least 1"),
    ],
)
def test_a_value_that_is_none_is_refused(settings: dict[str, Any], found: str) -> None:
    with pytest.raises(DiffusionConfigError, match=found):
        DiffusionConfig(**{"model": MODEL_NAME, **PAGED, **settings})


def test_prefix_caching_needs_a_node_and_a_node_needs_prefix_caching() -> None:
    """G4"""
    model = SmallDiT(SIZES)
    with pytest.raises(DiffusionConfigError, match=r"NodeStore\.attach"):
        DiffusionStage(DiffusionConfig(MODEL_NAME, **PAGED), model)  # type: ignore[arg-type]
    with pytest.raises(DiffusionConfigError, match="pass no store"):
        DiffusionStage(DiffusionConfig(MODEL_NAME), model, IndexInProcess())


def test_a_refusal_reaches_another_process_whole() -> None:
    with pytest.raises(DiffusionConfigError) as refused:
        DiffusionConfig("unhooked", **PAGED)  # type: ignore[arg-type]
    copy = pickle.loads(pickle.dumps(refused.value))  # noqa: S301  what engines do with errors
    assert (str(copy), copy.rule, copy.remedy) == (str(refused.value), "G4", refused.value.remedy)
