"""Settings of a diffusion stage's KV, and what is refused when the stage is set up (docs/semantics.md, G4).

The names are those of vLLM-Omni's diffusion configuration, so that a stage's settings can be handed over as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from stagecache.gates import GateRefusal


class DiffusionConfigError(GateRefusal):
    """Settings of a diffusion stage that cannot be served; the text says what to change."""

    def __init__(self, found: str, remedy: str, rule: str = "G4") -> None:
        super().__init__(rule, found, remedy)

    def __reduce__(self) -> tuple[type[DiffusionConfigError], tuple[str, str, str]]:
        return type(self), (self.found, self.remedy, self.rule)


class DiffusionKVMode(str, Enum):
    """Where the KV of a request lies while it is denoised."""

    DENSE_LEGACY = "dense_legacy"
    """One contiguous buffer a row, of the request alone."""
    PAGED_SCHEDULER = "paged_scheduler"
    """Pages of the worker, which the scheduler gives out in block tables."""


@dataclass(frozen=True)
class DiffusionConfig:
    """One diffusion stage. The refusals are made here, before anything is allocated.

    model: name under which the model's prefix hook is registered.
    diffusion_kv_mode: dense_legacy (default) or paged_scheduler.
    enable_prefix_caching: keep prefix blocks on the node and reuse them; off, nothing is hashed and no daemon called.
    kv_transfer_config: the engine's native KV transfer, which brings KV of its own.
    enable_sleep_mode: the engine's sleep mode, which drops and reloads weights and pages.
    block_size: tokens a block, of the pages and of the identity.
    num_kv_blocks: pages of the worker.

    Raises:
        DiffusionConfigError: see above.
    """

    model: str
    diffusion_kv_mode: DiffusionKVMode = DiffusionKVMode.DENSE_LEGACY
    enable_prefix_caching: bool = False
    kv_transfer_config: Any = None
    enable_sleep_mode: bool = False
    block_size: int = 32
    num_kv_blocks: int = 256

    def __post_init__(self) -> None:
        object.__setattr__(self, "diffusion_kv_mode", _mode(self.diffusion_kv_mode))
        if not isinstance(self.enable_prefix_caching, bool):
            raise DiffusionConfigError(
                f"enable_prefix_caching is {self.enable_prefix_caching!r}", "Set it to true or false."
            )
        if self.block_size < 1 or self.num_kv_blocks < 1:
            raise DiffusionConfigError(
                f"block_size is {self.block_size} and num_kv_blocks {self.num_kv_blocks}", "Both must be at least 1."
            )
        if self.enable_prefix_caching:
            self._check_prefix_caching()

    def _check_prefix_caching(self) -> None:
        from stagecache.diffusion.model import prefix_hook_names

        if self.diffusion_kv_mode is not DiffusionKVMode.PAGED_SCHEDULER:
            raise DiffusionConfigError(
                f"enable_prefix_caching with diffusion_kv_mode={self.diffusion_kv_mode.value}, which has no blocks",
                "Set diffusion_kv_mode=paged_scheduler, or turn enable_prefix_caching off.",
            )
        if self.model not in prefix_hook_names():
            known = ", ".join(prefix_hook_names()) or "none"
            raise DiffusionConfigError(
                f"enable_prefix_caching for model {self.model!r}, which has no prefix hook (registered: {known})",
                "Register one with stagecache.diffusion.register_prefix_hook before the stage is set up, or turn "
                "enable_prefix_caching off.",
            )
        if self.kv_transfer_config is not None:
            raise DiffusionConfigError(
                "enable_prefix_caching with kv_transfer_config: KV that another stage computed has no identity here",
                "Remove kv_transfer_config to reuse this stage's own KV, or turn enable_prefix_caching off.",
            )
        if self.enable_sleep_mode:
            raise DiffusionConfigError(
                "enable_prefix_caching with enable_sleep_mode: KV would outlive the weights it was computed with",
                "Turn one of the two off.",
            )


def _mode(value: object) -> DiffusionKVMode:
    try:
        return DiffusionKVMode(value)
    except ValueError:
        raise DiffusionConfigError(
            f"diffusion_kv_mode is {value!r}", f"Set it to one of {', '.join(mode.value for mode in DiffusionKVMode)}."
        ) from None
