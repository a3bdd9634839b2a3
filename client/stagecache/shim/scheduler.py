"""The scheduler's side of the shim: epochs, block hashes, resets, and the guard for policy ``priority``.

It wraps methods of one scheduler *instance*, so that it also holds where a subclass overrides them without calling
its parent (vLLM-Omni rebuilds the scheduler output in one). ``patch_scheduler`` makes every new scheduler install it.

    schedule()              resets that were asked for come first; then what the workers cannot know goes on the output
    reset_prefix_cache()    of the KV cache manager: a True result raises the epoch
    _preempt_request()      policy ``priority``: hashes of blocks that nobody will compute are taken back

On each scheduler output it sets attributes, which pickling keeps (those of shared blocks: ``shared_blocks``):

    stagecache_epoch         int; when it is higher than the last one, nothing saved before may be read (R5)
    stagecache_model         int; another one than before says that with it the model may have become another one
    stagecache_requests      only behind a schedule() that was cut short: ids of all requests that the scheduler knows
    stagecache_block_hashes  for each request that is new or resumed in this step, the hashes of its full blocks, from
                             block 0 up to the end of what this step computes: dict[str, list[bytes]]

An output that an interrupt kept from its workers is never made again: its hashes are of blocks that nobody computes,
and its finished ids are named nowhere else. So the next schedule() begins with a reset, and names all requests.

A reset asked for elsewhere (an engine call in ``scheduler_engine``, the daemon in ``scheduler_watch``, a worker that
lost rows) only leaves its cause; it is done on the engine's thread, before the next schedule(), which is before
anything can hit again.
"""

from __future__ import annotations

import functools
import logging
import os
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from types import ModuleType
from typing import Any, Final

from stagecache.gates import no_cache_reason, read_facts
from stagecache.reset_causes import SAME_MODEL, SCHEDULE_LOST
from stagecache.shim.block_leases import BlockLeases
from stagecache.shim.identity import engine_name
from stagecache.shim.methods import method_of
from stagecache.shim.scheduler_watch import SchedulerWatch
from stagecache.shim.shared_blocks import NEEDED, SharedBlocks, shared_blocks_wanted

logger = logging.getLogger("vllm.stagecache")

BLOCK_HASHES_ENV: Final = "STAGECACHE_BLOCK_HASHES"
"""Set to 0, no block hashes travel: for stages of which nothing reads them."""

_ATTRIBUTE: Final = "_stagecache_scheduler"
_PATCHED: Final = "_stagecache_patched"
_NEEDED: Final = {
    "Scheduler": ("schedule", "reset_prefix_cache", "_preempt_request", "shutdown"),
    "KVCacheManager": ("reset_prefix_cache", "evict_blocks", "get_block_ids"),
}
"""What is wrapped or called, by class; a vLLM without one of them is left alone."""


class SchedulerShim:
    """What the shim keeps for one scheduler. Everything but ``request_reset`` belongs to the engine's thread.

    Args:
        stage: name of the stage, as its workers attach by it.
        attach_hashes: send block hashes.
        shared: decides about node-shared blocks; None where the stage shares none.

    Attributes:
        epoch: rises with every reset, from 0.
        model: rises with every reset after which the model may compute other rows, from 0.
        guarded: preemption is guarded.
        taken_back: hashes that the guard took back.
        watch: the connection to the daemon, or None.
    """

    def __init__(self, stage: str = "", *, attach_hashes: bool = True, shared: SharedBlocks | None = None) -> None:
        self.stage = stage
        self.attach_hashes = attach_hashes
        self.shared = shared
        self.epoch = 0
        self.model = 0
        self.guarded = False
        self.taken_back = 0
        self.watch: SchedulerWatch | None = None
        self._causes: deque[str] = deque()
        self._resetting = False
        self._lost = False
        """A schedule() was cut short since the last output."""

    def request_reset(self, cause: str) -> None:
        """Have the engine forget its prefix cache before the next schedule(). Any thread; returns at once."""
        self._causes.append(cause)

    @property
    def pending(self) -> tuple[str, ...]:
        """Causes of the reset that the next schedule() will do."""
        return tuple(self._causes)

    # ------------------------------------------------------- wrapped methods

    def wrap(self, scheduler: Any, *, guard: bool) -> None:
        """Wrap the methods of ``scheduler`` and of its KV cache manager; ``guard``: its preemption too."""
        manager = scheduler.kv_cache_manager
        scheduler.schedule = self._schedule(scheduler)
        manager.reset_prefix_cache = self._reset_prefix_cache(manager)
        scheduler.shutdown = self._shutdown(scheduler)
        if self.shared is not None:
            self.shared.wrap(scheduler)
        if guard:
            scheduler._preempt_request = self._preempt_request(scheduler)
            self.guarded = True

    def _schedule(self, scheduler: Any) -> Callable[..., Any]:
        inner, owner, causes = method_of(scheduler, "schedule"), weakref.ref(scheduler), self._causes
        requests, manager, shared = scheduler.requests, scheduler.kv_cache_manager, self.shared
        tokens_per_hash = int(scheduler.hash_block_size)

        @functools.wraps(inner)
        def schedule(*args: Any, **kwargs: Any) -> Any:
            if causes:
                self._reset(owner())
            try:
                output = inner(*args, **kwargs)
                output.stagecache_epoch = self.epoch
                output.stagecache_model = self.model
                if self._lost:
                    output.stagecache_requests = list(requests)
                    if shared is not None:
                        shared.forget_all_but(requests)
                if shared is not None:
                    shared.put_on(output, requests, manager)
                if self.attach_hashes:
                    output.stagecache_block_hashes = first_hashes(output, requests, tokens_per_hash)
            except BaseException:
                self._lost = True
                causes.append(SCHEDULE_LOST)
                raise
            self._lost = False
            return output

        return schedule

    def _reset_prefix_cache(self, manager: Any) -> Callable[[], bool]:
        inner, causes = method_of(manager, "reset_prefix_cache"), self._causes

        @functools.wraps(inner)
        def reset_prefix_cache() -> bool:
            asked = len(causes)
            done = bool(inner())
            if done:
                self.epoch += 1
                for _ in range(asked):  # What was asked for until then has been done with it.
                    causes.popleft()
                if not self._resetting:  # Whoever called it may have changed the model.
                    self._model_changed()
            return done

        return reset_prefix_cache

    def _preempt_request(self, scheduler: Any) -> Callable[..., Any]:
        """Take back the hashes of blocks that nobody will compute.

        vLLM publishes a block's hash when it schedules it; under ``priority`` it may preempt the request later in the
        same schedule() call, and the hash would stay.
        """
        inner, manager = method_of(scheduler, "_preempt_request"), scheduler.kv_cache_manager
        block_size = int(scheduler.block_size)

        @functools.wraps(inner)
        def preempt_request(request: Any, *args: Any, **kwargs: Any) -> Any:
            computed = int(request.num_computed_tokens) // block_size
            never = {block for group in manager.get_block_ids(request.request_id) for block in group[computed:]}
            if never:
                blocks = manager.block_pool.blocks
                self.taken_back += sum(blocks[block].block_hash is not None for block in never)
                manager.evict_blocks(never)
            return inner(request, *args, **kwargs)

        return preempt_request

    def _shutdown(self, scheduler: Any) -> Callable[..., Any]:
        inner = method_of(scheduler, "shutdown")

        @functools.wraps(inner)
        def shutdown(*args: Any, **kwargs: Any) -> Any:
            if self.watch is not None:
                self.watch.stop()
            if self.shared is not None:
                self.shared.leases.close()
            return inner(*args, **kwargs)

        return shutdown

    # ----------------------------------------------------------------- reset

    def _reset(self, scheduler: Any) -> None:
        """Do what was asked for, and raise the epoch.

        While the scheduler is paused it admits nobody, so nothing can hit, and requests that a pause lets run out must
        not be preempted: then the reset waits until the scheduler goes on.
        """
        if scheduler.pause_state.name != "UNPAUSED":
            return
        wanted = [self._causes.popleft() for _ in range(len(self._causes))]
        before = self.epoch
        self._resetting = True
        if _may_preempt_all(scheduler):
            try:
                scheduler.reset_prefix_cache(reset_running_requests=True)
            except RuntimeError as error:
                logger.warning("stagecache: no reset of the prefix cache, only its hashes go: %s", error)
        self._resetting = False
        if self.epoch == before:
            manager = scheduler.kv_cache_manager
            manager.evict_blocks(set(range(manager.block_pool.num_gpu_blocks)))
            self.epoch += 1
        if not SAME_MODEL.issuperset(wanted):
            self._model_changed()
        causes = ", ".join(dict.fromkeys(wanted))
        logger.info("stagecache: stage %s forgot its prefix cache (%s), epoch %d", self.stage, causes, self.epoch)

    def _model_changed(self) -> None:
        self.model += 1
        if self.shared is not None:
            self.shared.leases.model_changed()


def first_hashes(output: Any, requests: Any, tokens_per_hash: int) -> dict[str, list[bytes]]:
    """Hashes of the full blocks that requests new or resumed in ``output`` have at its end, by request.

    requests: the scheduler's, by id. tokens_per_hash: tokens that one hash stands for.
    """
    found: dict[str, list[bytes]] = {}
    for new in output.scheduled_new_reqs:
        found[new.req_id] = _hashes(output, requests, new.req_id, new.num_computed_tokens, tokens_per_hash)
    cached = output.scheduled_cached_reqs
    if cached.resumed_req_ids:
        for req_id, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            if req_id in cached.resumed_req_ids:
                found[req_id] = _hashes(output, requests, req_id, computed, tokens_per_hash)
    return found


def _hashes(output: Any, requests: Any, req_id: str, computed: int, tokens_per_hash: int) -> list[bytes]:
    request = requests.get(req_id)
    if request is None:
        return []
    end = computed + output.num_scheduled_tokens.get(req_id, 0)
    return list(request.block_hashes[: end // tokens_per_hash])


def _may_preempt_all(scheduler: Any) -> bool:
    """Whether the engine's own reset may preempt what is running.

    vLLM-Omni's generation scheduler would give a preempted request to its worker as a new one, and its schedulers may
    keep requests in ``running`` that wait for input or were aborted, which the engine cannot preempt.
    """
    running = scheduler.running
    if running and any(cls.__name__ == "OmniGenerationScheduler" for cls in type(scheduler).__mro__):
        return False
    return all(request.status.name == "RUNNING" for request in running)


# ------------------------------------------------------------------- install


def install(
    scheduler: Any,
    *,
    stage: str = "",
    attach_hashes: bool = True,
    guard: bool | None = None,
    shared: SharedBlocks | None = None,
) -> SchedulerShim:
    """Wrap one scheduler; idempotent. ``guard``: guard its preemption; None: where its policy is ``priority``."""
    shim = shim_of(scheduler)
    if shim is None:
        shim = SchedulerShim(stage, attach_hashes=attach_hashes, shared=shared)
        shim.wrap(scheduler, guard=scheduler.policy.value == "priority" if guard is None else guard)
        setattr(scheduler, _ATTRIBUTE, shim)
    return shim


def shim_of(scheduler: Any) -> SchedulerShim | None:
    """The shim that ``install`` gave to this scheduler, or None."""
    return getattr(scheduler, _ATTRIBUTE, None)


def guard_active(vllm_config: Any) -> bool:
    """Whether the scheduler of this configuration has, or will have, this shim: the guard for policy ``priority`` (G3),
    and the cut of what a connector offers (G2).

    For the gates of a worker, which decide before the engine has made its scheduler, perhaps in another process: both
    load the same plugin by the same environment, and it wraps each scheduler that derives from vLLM's.
    """
    get_class = getattr(vllm_config.scheduler_config, "get_scheduler_cls", None)
    return get_class is not None and any(vars(cls).get(_PATCHED, False) for cls in get_class().__mro__)


def stage_name(vllm_config: Any) -> str:
    """The stage's name: the engine's own where it has several stages (vLLM-Omni), else STAGECACHE_STAGE."""
    named = getattr(vllm_config.model_config, "model_stage", None)
    return str(named) if named else os.environ.get("STAGECACHE_STAGE") or "stage0"


def _install_from_environment(scheduler: Any, can_share: bool) -> None:
    socket = os.environ.get("STAGECACHE_SOCKET")
    config = scheduler.vllm_config
    if not socket or no_cache_reason(read_facts(config, None)) is not None:
        return
    stage = stage_name(config)
    shared = None
    if can_share and shared_blocks_wanted():
        leases = BlockLeases(socket, stage, engine_name(config))
        shared = SharedBlocks(leases, int(scheduler.block_size))
        weakref.finalize(scheduler, leases.close)
    hashes = os.environ.get(BLOCK_HASHES_ENV, "1") != "0"
    shim = install(scheduler, stage=stage, attach_hashes=hashes, shared=shared)
    if shim.watch is None:
        shim.watch = SchedulerWatch(socket, stage, shim.request_reset)
        shim.watch.start()
        weakref.finalize(scheduler, shim.watch.stop)


def patch_scheduler(module: ModuleType) -> None:
    """Make every new scheduler wrap itself, where STAGECACHE_SOCKET is set; idempotent.

    module: ``vllm.v1.core.sched.scheduler``.
    """
    missing = list(_missing(module, _NEEDED))
    if missing:
        logger.warning("stagecache: this vLLM has no %s, so resets do not reach its scheduler", ", ".join(missing))
        return
    scheduler_class = module.Scheduler
    if vars(scheduler_class).get(_PATCHED, False):
        return
    lacking = list(_missing(module, NEEDED))
    if lacking and shared_blocks_wanted():
        logger.warning("stagecache: this vLLM has no %s, so this engine shares no blocks", ", ".join(lacking))
    init = scheduler_class.__init__

    @functools.wraps(init)
    def stagecache_init(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        _install_from_environment(self, can_share=not lacking)

    scheduler_class.__init__ = stagecache_init
    setattr(scheduler_class, _PATCHED, True)


def _missing(module: ModuleType, needed: Mapping[str, Iterable[str]]) -> Iterable[str]:
    for class_name, methods in needed.items():
        found = getattr(module, class_name, None)
        for method in methods:
            if not callable(getattr(found, method, None)):
                yield f"{class_name}.{method}"
