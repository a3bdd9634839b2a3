"""The shim for plain vLLM: full-prompt hidden states of every request, although prefix caching skips part of them.

It wraps two methods of vLLM's V1 ``GPUModelRunner`` (which the CPU runner inherits): ``initialize_kv_cache``, where
the worker attaches to the daemon, and ``execute_model``. Around each step it calls the cache in this order:
``new_step_starts`` before the forward, while finished requests are still in the batch; ``save_outputs`` of the
step's hidden states after it; then ``materialize`` and the consumers (:func:`on_step`), or ``discard_step`` where
nobody consumes rows, so that rows of later hits are there all the same.

A cache that fails costs rows, never the engine: requests without a hit get the rows that the engine just computed,
requests with one get the error, and only who asks for their rows sees it.
"""

from __future__ import annotations

import functools
import logging
import os
import time
import weakref
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

from stagecache.errors import AttachError, FailedWriteError, GeometryError, StageCacheError
from stagecache.gates import check_stage, no_cache_reason, read_facts
from stagecache.shim.identity import engine_name, namespace_of
from stagecache.shim.scheduler import stage_name
from stagecache.shim.shared_blocks import shared_blocks_wanted
from stagecache.shim.sinks import consumers_from_env
from stagecache.shim.steps import StepConsumers, StepHidden, StepRows, consumers, external_id, on_step

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

    from stagecache import StageCache
    from stagecache.latecache import LateCache
    from stagecache.sharing import Namespace

__all__ = ["MissingRowsError", "StepRows", "external_id", "on_step", "patch_v1_runner", "refuse_v2_runner"]

logger = logging.getLogger("vllm.stagecache")

_ATTRIBUTE = "_stagecache_shim"
_PATCHED = "_stagecache_patched"


class MissingRowsError(StageCacheError):
    """A request hit the prefix cache, and the rows of its prefix cannot be had because no cache holds them.

    Attributes:
        req_id: the request.
        hit_end: positions [0, hit_end) were not computed.
    """

    def __init__(self, req_id: str, hit_end: int, why: str) -> None:
        super().__init__(
            f"request {req_id} hit the prefix cache for positions 0 to {hit_end - 1}, and there are no rows for them: "
            f"{why}.",
            remedy="Start the daemon, best before the engine (STAGECACHE_REQUIRED=1 makes the engine insist), or turn "
            "prefix caching off",
        )
        self.req_id = req_id
        self.hit_end = hit_end


class RunnerBatch:
    """The cache's view of the runner's live batch; engine thread only."""

    def __init__(self, runner: Any, block_size: int) -> None:
        self._runner = weakref.ref(runner)
        self.block_size = block_size

    def _batch(self) -> Any:
        runner = self._runner()
        if runner is None:
            raise ReferenceError("the model runner is gone")
        return runner.input_batch

    def req_ids(self) -> list[str]:
        return list(self._batch().req_ids)

    def num_computed(self) -> npt.NDArray[np.int32]:
        """First position of this step, by batch index: int32 [max_reqs]."""
        computed: npt.NDArray[np.int32] = self._batch().num_computed_tokens_cpu
        return computed

    def block_table(self) -> npt.NDArray[np.int32]:
        """Block ids by batch index: int32 [max_reqs, max_blocks]."""
        table: npt.NDArray[np.int32] = self._batch().block_table[0].get_numpy_array()
        return table


class RunnerShim:
    """What the shim keeps for one model runner.

    Args:
        runner: the model runner.
        cache: the attached cache, or None.
        without: why there is no cache, for error texts; empty when there is one.
        consumers: who gets the rows.
        late: the cache of a worker that could not attach yet.
    """

    def __init__(
        self,
        runner: Any,
        cache: StageCache | None,
        without: str,
        consumers: StepConsumers,
        late: LateCache | None = None,
    ) -> None:
        self.cache = cache
        self.without = without
        self.late = late
        self.consumers = consumers
        self._runner = weakref.ref(runner)
        self._step = -1
        self._tp_rank = _tp_rank()
        self._warned: set[type[StageCacheError]] = set()

    def run_step(self, forward: Callable[[], Any], scheduler_output: Any) -> Any:
        """One engine step: begin, ``forward()``, save, hand out. Returns what ``forward()`` returned."""
        try:
            self._step += 1
            runner = self._runner()
            started = time.perf_counter()
            if self.late is not None:
                self._join(self.late)
            failed = self._begin(scheduler_output)
        except BaseException:  # An interrupt: the engine goes on behind this output.
            if self.cache is not None:
                self.cache.miss_step(scheduler_output)
            raise
        begun = time.perf_counter()
        result = forward()
        computed = time.perf_counter()
        state = runner.execute_model_state if runner is not None else None
        tokens = int(scheduler_output.total_num_scheduled_tokens)
        hidden = None if state is None or not tokens else state.hidden_states
        req_ids = tuple(runner.input_batch.req_ids) if hidden is not None and runner is not None else ()
        merged: Mapping[str, torch.Tensor] | None = None
        if hidden is not None and failed is None and self.cache is not None:
            try:
                merged = self._save(self.cache, hidden, tokens, req_ids)
            except StageCacheError as error:
                failed = self._note(error)
        if self.consumers:
            assert runner is not None
            rows, errors = self._hand_out(scheduler_output, hidden, tokens, req_ids, merged, failed)
            batch = runner.input_batch
            self.consumers(
                StepRows(
                    step=self._step,
                    req_ids=req_ids,
                    hidden=StepHidden(rows, errors),
                    errors=errors,
                    num_computed={r: int(batch.num_computed_tokens_cpu[i]) for i, r in enumerate(req_ids)},
                    num_scheduled={r: int(scheduler_output.num_scheduled_tokens[r]) for r in req_ids},
                    prompt_len={r: int(runner.requests[r].num_prompt_tokens) for r in req_ids},
                    finished=tuple(scheduler_output.finished_req_ids),
                    step_s=computed - begun,
                    shim_s=begun - started + time.perf_counter() - computed,
                    tp_rank=self._tp_rank,
                )
            )
        return result

    def _join(self, late: LateCache) -> None:
        """Go on with the cache that was attached in the background, where there is one."""
        cache = late.take()
        if cache is not None:
            self.cache, self.late, self.without = cache, None, ""
            logger.info(
                "stagecache: stage %s attached late, as session %s", cache.session.stage, cache.session.session_id
            )

    def _begin(self, scheduler_output: Any) -> StageCacheError | None:
        if self.cache is None:
            return None
        try:
            self.cache.new_step_starts(scheduler_output)
        except FailedWriteError as error:
            self._note(error)  # An earlier step's rows: this one is saved like any other.
        except StageCacheError as error:
            return self._note(error)
        return None

    def _save(
        self, cache: StageCache, hidden: torch.Tensor, tokens: int, req_ids: tuple[str, ...]
    ) -> Mapping[str, torch.Tensor] | None:
        """Save the step's rows ([tokens or more, hidden_size]); merged rows by request where somebody consumes them."""
        step_id = cache.save_outputs(hidden, None, num_tokens_unpadded=tokens, num_tokens_padded=int(hidden.shape[0]))
        if not self.consumers:
            cache.discard_step(step_id)
            return None
        outputs = cache.materialize(step_id, list(req_ids))
        return outputs.hidden_states

    def _hand_out(
        self,
        scheduler_output: Any,
        hidden: torch.Tensor | None,
        tokens: int,
        req_ids: tuple[str, ...],
        merged: Mapping[str, torch.Tensor] | None,
        failed: StageCacheError | None,
    ) -> tuple[Mapping[str, torch.Tensor], dict[str, StageCacheError]]:
        """Rows by request and, for requests whose rows cannot be had, errors by request."""
        if merged is not None:
            return merged, {}
        if hidden is None:
            return {}, {}
        hits = _hit_ends(scheduler_output)
        copy = hidden[:tokens].clone()
        rows: dict[str, torch.Tensor] = {}
        errors: dict[str, StageCacheError] = {}
        at = 0
        for req_id in req_ids:
            count = int(scheduler_output.num_scheduled_tokens[req_id])
            if req_id not in hits:
                rows[req_id] = copy[at : at + count]
            else:
                errors[req_id] = failed or MissingRowsError(req_id, hits[req_id], self.without)
            at += count
        return rows, errors

    def _note(self, error: StageCacheError) -> StageCacheError:
        """Log an error of the cache, each kind once."""
        if type(error) not in self._warned:
            self._warned.add(type(error))
            logger.warning("stagecache: step %d lost its cached rows (%s): %s", self._step, type(error).__name__, error)
        return error

    def close(self) -> None:
        cache, self.cache = self.cache, None
        self.without = "the engine was shut down"
        late, self.late = self.late, None
        if late is not None:
            late.stop()
        if cache is not None:
            try:
                cache.close()
            except StageCacheError as error:
                logger.warning("stagecache: detaching failed: %s", error)


def _hit_ends(scheduler_output: Any) -> dict[str, int]:
    """Requests whose first positions came from the prefix cache in this step: one past the last such position."""
    hits = {new.req_id: int(new.num_computed_tokens) for new in scheduler_output.scheduled_new_reqs}
    cached = scheduler_output.scheduled_cached_reqs
    for req_id, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
        if req_id in cached.resumed_req_ids:
            hits[req_id] = int(computed)
    return {req_id: end for req_id, end in hits.items() if end > 0}


def _tp_rank() -> int:
    from vllm.distributed.parallel_state import get_tp_group

    return int(get_tp_group().rank_in_group)


def attach_runner(runner: Any, kv_cache_config: Any) -> None:
    """Decide, attach and remember; called when the runner's KV cache has been laid out.

    Raises:
        GateRefusal: the stage's settings cannot be served.
        AttachError: the daemon cannot be had and STAGECACHE_REQUIRED is 1.
        SinkConfigError: the environment names a consumer that cannot be used.
    """
    from vllm.distributed.parallel_state import get_pp_group

    previous = getattr(runner, _ATTRIBUTE, None)
    if previous is not None:
        previous.close()
        setattr(runner, _ATTRIBUTE, None)
    if not os.environ.get("STAGECACHE_SOCKET") or not get_pp_group().is_last_rank or _is_omni(runner):
        return
    config = runner.vllm_config
    facts = check_stage(config, kv_cache_config, block_table=runner.input_batch.block_table[0])
    if facts is None:
        why = no_cache_reason(read_facts(config, kv_cache_config))
        logger.info("stagecache: no cache for this stage: %s", why)
        shim = RunnerShim(runner, None, str(why), consumers)
    else:
        shim = RunnerShim(runner, *_attach(runner, config, kv_cache_config, facts.block_size))
    _subscribe_env_consumers()
    setattr(runner, _ATTRIBUTE, shim)
    weakref.finalize(runner, shim.close)


def _attach(
    runner: Any, config: Any, kv_cache_config: Any, block_size: int
) -> tuple[StageCache | None, str, StepConsumers, LateCache | None]:
    """The attached cache; or None, why not, and the one that may come later."""
    from stagecache import HIDDEN_KEY, Geometry, KeySchema, StageCache
    from stagecache.cuda import device_for
    from stagecache.latecache import LateCache

    socket = os.environ["STAGECACHE_SOCKET"]
    stage = stage_name(config)
    model = config.model_config
    dtype = str(model.dtype).removeprefix("torch.")
    hidden = KeySchema(HIDDEN_KEY, dtype, (int(model.get_hidden_size()),))
    asked: dict[str, Any] = {
        "socket": socket,
        "model": str(model.model),
        "stage": stage,
        "geometry": Geometry(
            num_blocks=int(kv_cache_config.num_blocks),
            block_size=block_size,
            staging_capacity_tokens=int(config.scheduler_config.max_num_batched_tokens),
        ),
        "view": RunnerBatch(runner, block_size),
        "keys": [hidden],
        "rank": _tp_rank(),
        "engine": engine_name(config),
        "device": device_for(getattr(runner, "device", None)),
    }
    namespace = namespace_of(config, stage) if shared_blocks_wanted() else None
    try:
        cache = StageCache.attach(**asked)
    except AttachError as error:
        if os.environ.get("STAGECACHE_REQUIRED") == "1":
            raise
        logger.warning(
            "stagecache: no row cache for stage %s yet: the engine runs on, and requests that hit the prefix cache "
            "have no rows for their prefix until the worker is attached, which goes on asking. Asked at %s: %s",
            stage,
            socket,
            error,
        )
        late = None if isinstance(error, GeometryError) else LateCache(error, **asked, namespace=namespace)
        return None, "the worker could not attach yet (" + str(error).rstrip(".") + ")", consumers, late
    blocks = int(kv_cache_config.num_blocks)
    logger.info("stagecache: stage %s attached at %s, %d blocks of %d tokens", stage, socket, blocks, block_size)
    if namespace is not None:
        _join(cache, namespace, stage)
    return cache, "", consumers, None


def _join(cache: StageCache, namespace: Namespace, stage: str) -> None:
    """Share blocks with the replicas of this stage, where the daemon does. Without, everything is computed here."""
    try:
        joined = cache.join_namespace(namespace)
    except StageCacheError as error:
        logger.warning("stagecache: stage %s shares no blocks: %s", stage, error)
        return
    if joined.on:
        logger.info("stagecache: stage %s shares %d blocks", stage, joined.num_blocks)
    else:
        logger.warning("stagecache: stage %s shares no blocks: %s", stage, joined.why)


_env_consumers_subscribed = False


def _subscribe_env_consumers() -> None:
    global _env_consumers_subscribed
    if _env_consumers_subscribed:
        return
    for callback in consumers_from_env():
        consumers.add(callback)
    _env_consumers_subscribed = True


def _is_omni(runner: Any) -> bool:
    """vLLM-Omni's runners bring a cache interface and an execute_model of their own; this shim is not for them."""
    return any(cls.__module__.partition(".")[0] == "vllm_omni" for cls in type(runner).__mro__)


def patch_v1_runner(module: ModuleType) -> None:
    """Wrap the V1 model runner's methods; idempotent."""
    runner_class = module.GPUModelRunner
    if getattr(runner_class, _PATCHED, False):
        return
    execute_model = runner_class.execute_model
    initialize_kv_cache = runner_class.initialize_kv_cache
    shutdown = runner_class.shutdown

    @functools.wraps(execute_model)
    def stagecache_execute_model(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        shim: RunnerShim | None = getattr(self, _ATTRIBUTE, None)
        if shim is None or (shim.cache is None and shim.late is None and not shim.consumers):
            return execute_model(self, scheduler_output, *args, **kwargs)
        return shim.run_step(lambda: execute_model(self, scheduler_output, *args, **kwargs), scheduler_output)

    @functools.wraps(initialize_kv_cache)
    def stagecache_initialize_kv_cache(
        self: Any, kv_cache_config: Any, is_profiling: bool = False, *args: Any, **kwargs: Any
    ) -> None:
        initialize_kv_cache(self, kv_cache_config, is_profiling, *args, **kwargs)
        if not is_profiling:
            attach_runner(self, kv_cache_config)

    @functools.wraps(shutdown)
    def stagecache_shutdown(self: Any) -> None:
        shim: RunnerShim | None = getattr(self, _ATTRIBUTE, None)
        if shim is not None:
            shim.close()
        shutdown(self)

    runner_class.execute_model = stagecache_execute_model
    runner_class.initialize_kv_cache = stagecache_initialize_kv_cache
    runner_class.shutdown = stagecache_shutdown
    setattr(runner_class, _PATCHED, True)


def refuse_v2_runner(module: ModuleType) -> None:
    """Make the V2 model runner refuse a stage that would need the cache, before it loads the model; idempotent."""
    runner_class = module.GPUModelRunner
    if getattr(runner_class, _PATCHED, False):
        return
    init = runner_class.__init__

    @functools.wraps(init)
    def stagecache_init(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        check_stage(vllm_config, None, v2_runner=True)
        init(self, vllm_config, *args, **kwargs)

    runner_class.__init__ = stagecache_init
    setattr(runner_class, _PATCHED, True)
