"""What is never shared although its token ids are equal: another salt, adapter, image or model."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
pytest.importorskip("vllm", reason="needs the engine: make venv")

from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from stagecache.shim.adapters import AdapterTags
from stagecache.shim.identity import FINGERPRINT_ENV, engine_name, model_fingerprint
from stagecache.shim.shared_blocks import SharedBlocks
from tests.unit.shim.kv_elsewhere import Node
from tests.unit.shim.scheduler_kit import BLOCK

pytestmark = pytest.mark.engine

TOKENS = [7] * 100
init_none_hash(sha256)


def request(**more: Any) -> Request:
    params = SamplingParams(max_tokens=2)
    params.update_from_generation_config({}, 2)
    return Request(
        request_id="r",
        prompt_token_ids=TOKENS,
        sampling_params=params,
        pooling_params=None,
        block_hasher=get_request_block_hasher(BLOCK, sha256),
        **more,
    )


def image(content: str, offset: int = 20) -> list[MultiModalFeatureSpec]:
    place = PlaceholderRange(offset=offset, length=24)
    return [MultiModalFeatureSpec(data=None, modality="image", identifier=content, mm_position=place)]


def adapter(folder: Path, name: str, content: str) -> LoRARequest:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_model.safetensors").write_text(content)
    return LoRARequest(name, 1, str(folder))


def shared_hashes(made: Request) -> list[bytes]:
    """As the scheduler's side names a request's blocks to the node."""
    return SharedBlocks(Node(), BLOCK)._hashes(made, 0, len(made.block_hashes))  # type: ignore[arg-type]


def test_a_salt_an_adapter_or_an_image_that_differs_is_never_shared(tmp_path: Path) -> None:
    makers: dict[str, dict[str, Any]] = {
        "plain": {},
        "salt a": {"cache_salt": "a"},
        "salt b": {"cache_salt": "b"},
        "adapter a": {"lora_request": adapter(tmp_path / "a", "a", "weights")},
        "adapter b": {"lora_request": adapter(tmp_path / "b", "b", "weights")},
        "another adapter of the same name": {"lora_request": adapter(tmp_path / "c", "a", "weights")},
        "image a": {"mm_features": image("a")},
        "image b": {"mm_features": image("b")},
        "image a elsewhere": {"mm_features": image("a", 24)},
    }
    found = {name: shared_hashes(request(**more)) for name, more in makers.items()}
    assert {len(hashes) for hashes in found.values()} == {len(TOKENS) // BLOCK}
    for name, more in makers.items():
        assert shared_hashes(request(**more)) == found[name], f"{name} is shared with itself"
    # From the first block that the difference reaches, no two have a hash in common; before an image they may.
    ends = [hashes[-1] for hashes in found.values()]
    assert len(set(ends)) == len(ends)
    assert len({hashes[0] for name, hashes in found.items() if not name.startswith("image")}) == len(ends) - 3
    assert found["image a"][0] == found["image b"][0] == found["plain"][0]
    assert found["image a"][1] != found["image b"][1]


def test_an_adapter_that_was_written_anew_is_another_one(tmp_path: Path) -> None:
    old = shared_hashes(request(lora_request=adapter(tmp_path / "a", "a", "weights")))
    os.utime(tmp_path / "a" / "adapter_model.safetensors", ns=(1, 1))
    assert shared_hashes(request(lora_request=LoRARequest("a", 1, str(tmp_path / "a")))) != old


def test_an_adapter_without_files_is_not_shared() -> None:
    assert AdapterTags().tagged(LoRARequest("a", 1, "organisation/adapter"), [b"h" * 32]) == []


def config_of(folder: Path, **changes: Any) -> Any:
    settings: dict[str, Any] = {"model": str(folder), "dtype": "float32", "revision": None, "hf_config": None}
    settings.update(changes)
    return SimpleNamespace(
        model_config=SimpleNamespace(**settings),
        cache_config=SimpleNamespace(block_size=BLOCK, cache_dtype="auto"),
        load_config=SimpleNamespace(load_format="auto"),
        parallel_config=SimpleNamespace(tensor_parallel_size=1, data_parallel_rank=2),
        instance_id="abc",
    )


def test_a_model_is_its_files_and_its_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"weights")
    config = config_of(tmp_path)
    first = model_fingerprint(config)
    assert first is not None
    assert model_fingerprint(config_of(tmp_path)) == first
    assert model_fingerprint(config_of(tmp_path, dtype="bfloat16")) != first
    os.utime(weights, ns=(1, 1))
    assert model_fingerprint(config) != first
    monkeypatch.setenv(FINGERPRINT_ENV, "mine")
    named = model_fingerprint(config)
    weights.write_bytes(b"other weights")
    assert model_fingerprint(config) == named
    monkeypatch.setenv(FINGERPRINT_ENV, "yours")
    assert model_fingerprint(config) != named


def test_a_model_whose_files_nobody_knows_is_not_shared(tmp_path: Path) -> None:
    assert model_fingerprint(config_of(tmp_path / "organisation" / "model")) is None
    assert model_fingerprint(config_of(tmp_path)) is None, "a folder without files"


def test_replicas_of_one_configuration_have_names_of_their_own(tmp_path: Path) -> None:
    assert engine_name(config_of(tmp_path)) == "abc-2"
