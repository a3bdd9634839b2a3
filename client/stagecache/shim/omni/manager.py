"""``SidecarPrefixCacheManager``: vLLM-Omni's ``OmniPrefixCacheManager``, with the rows in the node's daemon.

The calls of a step, in vLLM-Omni's words:

    register_policy(policy)        once, at load_model
    new_step_starts(output)        engine thread, before finished requests leave the batch
    step_id = save_outputs(...)    engine thread, after the forward
    materialize(step_id, ids)      any thread, once; or discard_step(step_id)
    shutdown()                     when the runner ends

It composes ``stagecache.StageCache`` and adds nothing to a step but translation: the batch (``view``), the step's form
(``steps``), the result's type and the errors' family (``errors``). Both releases' signatures are served: 0.30.0 gives a
view, 0.32.0rc1 a ``write_layout=`` with each save.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from stagecache.cache import StageCache
from stagecache.device import CpuDevice
from stagecache.errors import AttachError, FailedWriteError, StageCacheError, UnknownRequestError
from stagecache.outputs import StageCacheOutputs
from stagecache.policy import ModelCachePolicy
from stagecache.requests import RequestTable
from stagecache.session import Session
from stagecache.sharing import Namespace
from stagecache.shim.omni.errors import as_omni
from stagecache.shim.omni.keys import keys_from_env
from stagecache.shim.omni.steps import StepReader
from stagecache.shim.omni.view import OmniBatchView
from stagecache_wire.geometry import Geometry, KeySchema

DEFAULT_STAGE = "stage0"


def _outputs_class() -> Any:
    """vLLM-Omni's result type, ours where it is not installed; both are tuples of the same two fields."""
    try:
        from vllm_omni.core.prefix_cache.interface import StageCacheOutputs as OmniOutputs
    except ImportError:
        return StageCacheOutputs
    return OmniOutputs


logger = logging.getLogger("vllm.stagecache")


def attach_session(
    config: Any,
    *,
    socket: str | None,
    model: str,
    stage: str | None,
    rank: int,
    expected: Sequence[KeySchema] = (),
    arena_bytes: int = 0,
    engine: str = "",
) -> Session:
    """A session for vLLM-Omni's ``PrefixCacheConfig``; arguments and errors as of ``SidecarPrefixCacheManager``."""
    socket = socket or os.environ.get("STAGECACHE_SOCKET")
    if not socket:
        raise AttachError("no socket is named.", remedy="Set STAGECACHE_SOCKET to the daemon's socket.")
    declared = keys_from_env()
    names = {key.name for key in declared}
    return Session.attach(
        socket,
        model=model,
        stage=stage or os.environ.get("STAGECACHE_STAGE") or DEFAULT_STAGE,
        geometry=geometry_of(config, arena_bytes),
        keys=[*declared, *(key for key in expected if key.name not in names)],
        rank=rank,
        engine=engine,
        open_remembered_keys=True,
    )


def geometry_of(config: Any, arena_bytes: int = 0) -> Geometry:
    """The geometry that a ``PrefixCacheConfig`` names."""
    return Geometry(
        num_blocks=int(config.num_blocks),
        block_size=int(config.block_size),
        staging_capacity_tokens=int(config.staging_capacity_tokens),
        staging_depth=int(config.staging_depth),
        arena_bytes=arena_bytes,
    )


class SidecarPrefixCacheManager:
    """Drop-in for vLLM-Omni's manager. Attaches to the daemon when it is made.

    Args:
        config: vLLM-Omni's ``PrefixCacheConfig``: sizes, staging depth, time-outs, ``gpu_staging_bytes``.
        view: its group view; may be bound later (``bind``), and 0.32.0rc1 passes none.
        eager: taken for compatibility; copies are the daemon's.
        socket: the daemon's socket; STAGECACHE_SOCKET by default.
        model, stage, rank: whose session this is. stage: STAGECACHE_STAGE by default.
        expected: keys to open at once, besides those of STAGECACHE_KEYS and those remembered for (model, stage). As
            remembered ones they are hints: one that the model's rows do not fit gives way to them.
        policy: what the model wants cached, if known already.
        arena_bytes: size of the merge arena; 0 is the client's default.
        device: where the outputs are; host memory by default (``stagecache.cuda.device_for``).
        engine: a name that this engine's scheduler gives too, where it holds leases on shared blocks.
        session: one that was attached already (``attach_session``), in place of another.
        requests, first_step_id: as for ``StageCache``.

    Raises:
        DaemonUnavailableError: nobody answers at the socket.
        AttachError: refused; the text says why and what to change.
    """

    def __init__(
        self,
        config: Any,
        view: Any = None,
        *,
        eager: bool | None = None,
        socket: str | None = None,
        model: str = "model",
        stage: str | None = None,
        rank: int = 0,
        expected: Sequence[KeySchema] = (),
        policy: Any = None,
        arena_bytes: int = 0,
        device: CpuDevice | None = None,
        engine: str = "",
        session: Session | None = None,
        requests: RequestTable | None = None,
        first_step_id: int = 1,
    ) -> None:
        self.config = config
        self.key_roles: dict[str, Any] = {}
        self._view = OmniBatchView(config.block_size, view)
        self._steps = StepReader()
        self._outputs = _outputs_class()
        self._policy = self._own_policy(policy)
        self._namespace: Namespace | None = None
        """To be joined."""
        try:
            session = session or attach_session(
                config,
                socket=socket,
                model=model,
                stage=stage,
                rank=rank,
                expected=expected,
                arena_bytes=arena_bytes,
                engine=engine,
            )
        except StageCacheError as error:
            as_omni(error)
            raise
        self.cache = StageCache(
            session,
            self._view,
            self._policy,
            declared=frozenset(key.name for key in keys_from_env()),
            staging_claim_timeout_s=float(config.staging_claim_timeout_s),
            merge_timeout_s=float(config.staging_claim_timeout_s),
            gpu_staging_bytes=int(config.gpu_staging_bytes),
            split_lists=False,
            device=device,
            requests=requests,
            first_step_id=first_step_id,
        )

    def share(self, namespace: Namespace) -> None:
        """Share full blocks with the replicas of this stage on the node, once the first steps have shown its keys: they
        are part of the namespace, and few stages have told all of theirs before.
        """
        self._namespace = namespace

    def bind(self, view: Any) -> None:
        """Read this group view; where the manager was attached before the input batch was there."""
        self._view.bind(view)

    def register_policy(self, policy: Any) -> None:
        """Set what the model wants cached: vLLM-Omni's ``ModelCachePolicy``, or ours with key roles."""
        self._policy = self._own_policy(policy)
        self.cache.register_policy(self._policy)

    def _own_policy(self, policy: Any) -> ModelCachePolicy:
        if policy is None:
            return ModelCachePolicy(key_roles=self.key_roles)
        self.key_roles.update(getattr(policy, "key_roles", None) or {})
        return ModelCachePolicy(
            bool(policy.needs_full_hidden_states), frozenset(policy.deferred_keys), dict(self.key_roles)
        )

    def new_step_starts(self, step: Any) -> None:
        """A step begins: a scheduler output, or 0.32.0rc1's step. Once a real step, on the engine thread.

        Raises:
            OmniPrefixCacheUnmatchError: a hit without blocks or not at a block's end (H3). A deferred write that
                failed (W5) is logged: its rows alone are unknown, and the cache goes on.
        """
        output: Any = None
        try:
            output = self._steps.read(step)
            self._view.begin(output)
            self.cache.new_step_starts(output)
        except FailedWriteError as error:
            logger.error("stagecache: %s", error)  # The runner would not save this step, whose rows are good.
        except StageCacheError as error:
            as_omni(error)
            raise
        except BaseException:  # An interrupt: the engine goes on behind this step.
            with contextlib.suppress(Exception):
                self.cache.miss_step(self._steps.read(step) if output is None else output)
            raise

    def save_outputs(
        self,
        hidden_states: torch.Tensor | None,
        mm_outputs: Mapping[str, Any] | None,
        *,
        num_tokens_unpadded: int,
        num_tokens_padded: int,
        write_layout: Any = None,
    ) -> int:
        """Keep the step's outputs; the id must be consumed exactly once. Engine thread, after the forward.

        Raises:
            OmniPrefixCacheUnmatchError: refused before anything was copied (W6).
            OmniPrefixCacheStagingTimeoutError: no page became free (W2).
        """
        try:
            if write_layout is not None:
                self._view.use_layout(write_layout)
            step_id = self.cache.save_outputs(
                hidden_states,
                mm_outputs,
                num_tokens_unpadded=num_tokens_unpadded,
                num_tokens_padded=num_tokens_padded,
            )
        except StageCacheError as error:
            as_omni(error)
            raise
        if self._namespace is not None and self.cache.keys_settled:
            self.cache.join_later(self._namespace)
            self._namespace = None
        return step_id

    def materialize(self, step_id: int, req_ids: list[str]) -> Any:
        """Merged outputs of a saved step for some or all of its requests, as vLLM-Omni's ``StageCacheOutputs``.

        Raises:
            OmniPrefixCacheUnmatchError: unknown or consumed id (S1), a request that was not in the batch (S2), rows
                of a hit that are not there (H4), a key refused at save (K3). The step is consumed.
        """
        try:
            hidden, mm = self.cache.materialize(step_id, req_ids)
        except UnknownRequestError as error:
            self.cache.discard_step(step_id)  # vLLM-Omni's manager consumes the step here too
            as_omni(error)
            raise
        except StageCacheError as error:
            as_omni(error)
            raise
        return self._outputs(hidden or None, mm)

    def discard_step(self, step_id: int) -> None:
        """Consume a step that nobody wants; its rows are kept all the same.

        Raises:
            OmniPrefixCacheUnmatchError: unknown or consumed id (S1).
        """
        try:
            self.cache.discard_step(step_id)
        except StageCacheError as error:
            as_omni(error)
            raise

    def shutdown(self) -> None:
        """Detach; the daemon frees the session's memory. Rows handed out stay good. Twice does nothing."""
        self.cache.close()
