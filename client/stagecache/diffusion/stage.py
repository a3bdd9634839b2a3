"""One diffusion stage: a request goes through scheduler, worker and model."""

from __future__ import annotations

from typing import Any, Protocol

from stagecache.diffusion.config import DiffusionConfig, DiffusionConfigError, DiffusionKVMode
from stagecache.diffusion.counts import DiffusionCounts
from stagecache.diffusion.model import DiffusionModel, make_prefix_hook
from stagecache.diffusion.scheduler import DiffusionScheduler, PrefixIndex
from stagecache.diffusion.worker import DiffusionWorker, PrefixStore


class NodeBlocks(PrefixIndex, PrefixStore, Protocol):
    """The node's prefix blocks, seen from both sides of a stage. NodeStore is one."""

    def join(self, fingerprint: str) -> None:
        """Say what the model is; before anything else."""


class DiffusionStage:
    """Runs a DiT, one request at a time.

        config = DiffusionConfig("small_dit", "paged_scheduler", enable_prefix_caching=True)
        stage = DiffusionStage(config, model, node)
        image = stage.generate("r1", request)

    Attributes:
        counts: what was computed, hit and kept.
    """

    def __init__(self, config: DiffusionConfig, model: DiffusionModel, node: NodeBlocks | None = None) -> None:
        """node: the node's prefix blocks; needed exactly with prefix caching.

        Raises:
            DiffusionConfigError: prefix caching without a node, or a node without prefix caching.
        """
        if config.enable_prefix_caching and node is None:
            raise DiffusionConfigError(
                "enable_prefix_caching without a node store, which keeps the blocks",
                "Pass NodeStore.attach(...), or turn enable_prefix_caching off.",
            )
        if node is not None and not config.enable_prefix_caching:
            raise DiffusionConfigError(
                "a node store without enable_prefix_caching", "Turn enable_prefix_caching on, or pass no store."
            )
        self.config = config
        self.counts = DiffusionCounts()
        self._model = model
        self._hook = make_prefix_hook(config.model, model) if config.enable_prefix_caching else None
        self._scheduler: DiffusionScheduler | None = None
        if config.diffusion_kv_mode is DiffusionKVMode.PAGED_SCHEDULER:
            fingerprint = "" if self._hook is None else self._hook.fingerprint
            if node is not None:
                node.join(fingerprint)
            self._scheduler = DiffusionScheduler(
                config.num_kv_blocks, config.block_size, node, fingerprint, self.counts
            )
        self._worker = DiffusionWorker(config, model.kv_shape, node, self.counts)

    def generate(self, request_id: str, request: Any) -> Any:
        """Denoise a request to its end; returns the model's result.

        Raises:
            PageShortageError: it does not fit into the pages that are free; nothing was taken.
        """
        denoising = self._model.start(request)
        allocation = None
        if self._scheduler is not None:
            identities = () if self._hook is None else self._hook.identify(request)
            allocation = self._scheduler.admit(request_id, denoising.rows, identities)
        try:
            self._worker.run(denoising, allocation)
        finally:
            if self._scheduler is not None:
                self._scheduler.finish(request_id)
        self.counts.requests += 1
        return denoising.result()
