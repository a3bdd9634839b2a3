"""A runner of vLLM-Omni and its sidecar manager: when it attaches, under which name, and what happens where it cannot.

The worker attaches as soon as its KV cache is laid out, so that no request pays for it, and only where vLLM-Omni's own
gate (``stage_prefix_cache_config``) staged a cache and ours (``stagecache.gates``) agrees: pooling stages and other
pipeline ranks than the last never do. Each tensor-parallel rank of the last one attaches, since each postprocesses
merged rows; ``stagecache status`` shows the session, and its memory, of each.
"""

from __future__ import annotations

import logging
import os
import weakref
from dataclasses import dataclass
from functools import partial
from typing import Any

from stagecache.cuda import device_for
from stagecache.errors import GeometryError, StageCacheError
from stagecache.gates import check_stage
from stagecache.policy import ModelCachePolicy
from stagecache.requests import RequestTable
from stagecache.session import Session
from stagecache.sharing import Namespace
from stagecache.shim.identity import engine_name, namespace_of
from stagecache.shim.omni.errors import StageKeysError, as_omni
from stagecache.shim.omni.keys import hidden_key_of
from stagecache.shim.omni.late import LateManager, Waiting
from stagecache.shim.omni.manager import SidecarPrefixCacheManager, attach_session, geometry_of
from stagecache.shim.scheduler import stage_name
from stagecache.shim.shared_blocks import shared_blocks_wanted
from stagecache_wire.geometry import BadGeometryError, KeySchema

logger = logging.getLogger("vllm.stagecache")

_ATTRIBUTE = "_stagecache_prepared"


@dataclass
class Prepared:
    """What was decided for a runner when its KV cache was laid out.

    config: the staged ``PrefixCacheConfig`` that it was decided for. manager: None where the stage falls back; waiting:
    it may change to a daemon that comes later.
    """

    config: Any
    manager: SidecarPrefixCacheManager | None
    waiting: Waiting | None = None


def prepare(runner: Any) -> Prepared | None:
    """Attach a runner whose KV cache was laid out and whose cache is staged; None where it has no cache.

    Doing it again attaches anew where the staged configuration is another one.

    Raises:
        GateRefusal: the stage's settings cannot be served; an ``OmniPrefixCacheUnmatchError`` too.
        StageKeysError: STAGECACHE_KEYS lists no keys.
        StageCacheError: the daemon cannot be had, and STAGECACHE_REQUIRED is 1, or KV may come from a connector.
    """
    from vllm.distributed.parallel_state import get_pp_group

    config = getattr(runner, "_omni_prefix_cache_cfg", None)
    before: Prepared | None = runner.__dict__.get(_ATTRIBUTE)
    if before is not None and before.config is config:
        return before
    if before is not None:
        _let_go(runner, before)
    if config is None or not get_pp_group().is_last_rank or not os.environ.get("STAGECACHE_SOCKET"):
        return None
    try:
        facts = check_stage(runner.vllm_config, runner.kv_cache_config, block_table=_block_table(runner))
    except StageCacheError as error:
        as_omni(error)
        raise
    if facts is None:
        return None
    prepared = Prepared(config, *_attach(runner, config, may_fall_back=not facts.kv_consumer))
    runner.__dict__[_ATTRIBUTE] = prepared
    return prepared


def take(runner: Any) -> SidecarPrefixCacheManager | Waiting | None:
    """The manager that was made for a runner's staged cache, attached now where that was not done; None, or one that
    waits: fall back.
    """
    prepared = prepare(runner)
    return None if prepared is None else prepared.manager or prepared.waiting


def _let_go(runner: Any, prepared: Prepared) -> None:
    """The KV cache was laid out anew: whatever the old manager holds is void."""
    runner.__dict__.pop(_ATTRIBUTE, None)
    if prepared.waiting is not None:
        prepared.waiting.stop()
    used = getattr(runner, "omni_prefix_cache", None)
    ours = isinstance(used, (SidecarPrefixCacheManager, LateManager))
    if ours:
        runner.omni_prefix_cache = None
    for manager in {prepared.manager, used if ours else None}:
        if manager is not None:
            manager.shutdown()


def _block_table(runner: Any) -> Any:
    batch = getattr(runner, "input_batch", None)
    return None if batch is None else batch.block_table[0]


def _attach(
    runner: Any, config: Any, *, may_fall_back: bool
) -> tuple[SidecarPrefixCacheManager | None, Waiting | None]:
    """The attached manager; or what waits for a daemon, where one may come later. may_fall_back: the in-process cache
    can serve the stage; it cannot where KV comes from a connector.
    """
    model_config = runner.model_config
    policy = runner._omni_cache_policy
    stage, shares = stage_name(runner.vllm_config), shared_blocks_wanted()
    namespace = namespace_of(runner.vllm_config, stage) if shares else None
    asked: dict[str, Any] = {
        "socket": os.environ["STAGECACHE_SOCKET"],
        "model": str(model_config.model),
        "stage": stage,
        "rank": _tp_rank(),
        "engine": engine_name(runner.vllm_config) if shares else "",
        "expected": _expected_keys(model_config, policy),
    }
    make = partial(
        SidecarPrefixCacheManager,
        config,
        device=device_for(getattr(runner, "device", None)),
        policy=ModelCachePolicy(
            policy.needs_full_hidden_states,
            policy.deferred_keys,
            dict(getattr(runner.model, "prefix_cache_key_roles", None) or {}),
        ),
    )
    try:
        manager = make(**asked)
    except StageKeysError:
        raise
    except StageCacheError as error:
        if os.environ.get("STAGECACHE_REQUIRED") == "1" or not may_fall_back:
            raise
        logger.warning(
            "stagecache: stage %s falls back to vLLM-Omni's in-process prefix cache. Socket %s: %s",
            stage,
            asked["socket"],
            error,
        )
        never = isinstance(error, GeometryError)
        return None, None if never else _wait(runner, config, asked, make, namespace, error)
    weakref.finalize(runner, manager.shutdown)  # for a runner that ends before its first step
    _attached(manager, namespace)
    return manager, None


def _wait(
    runner: Any, config: Any, asked: dict[str, Any], make: Any, namespace: Namespace | None, error: Exception
) -> Waiting:
    """What asks for a session with the arguments that failed with ``error``. make: the manager, but for its session."""

    def make_late(session: Session, requests: RequestTable, first_step_id: int) -> SidecarPrefixCacheManager:
        manager: SidecarPrefixCacheManager = make(session=session, requests=requests, first_step_id=first_step_id)
        _attached(manager, namespace)
        return manager

    waiting = Waiting(partial(attach_session, config, **asked), make_late, asked["stage"], geometry_of(config), error)
    weakref.finalize(runner, waiting.stop)
    return waiting


def _attached(manager: SidecarPrefixCacheManager, namespace: Namespace | None) -> None:
    """A manager has its session: it shares blocks where a namespace is named, and the log says so."""
    if namespace is not None:
        manager.share(namespace)
    session = manager.cache.session
    logger.info(
        "stagecache: stage %s attached as session %s, %d blocks of %d, keys %s",
        session.stage,
        session.session_id,
        session.geometry.num_blocks,
        session.geometry.block_size,
        [key.schema.name for key in session.keys],
    )


def _expected_keys(model_config: Any, policy: Any) -> list[KeySchema]:
    """Keys that are likely before the first step: the hidden states, where the model wants them whole."""
    if not policy.needs_full_hidden_states:
        return []
    try:
        return [hidden_key_of(model_config).checked()]
    except (BadGeometryError, AttributeError, KeyError):
        return []


def _tp_rank() -> int:
    from vllm.distributed.parallel_state import get_tp_group

    return int(get_tp_group().rank_in_group)
