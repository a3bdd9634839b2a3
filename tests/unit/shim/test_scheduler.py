"""The scheduler's side of the shim on a stand-in for the engine's scheduler: what it wraps, when it resets (R5)."""

from __future__ import annotations

import gc
import pickle
import threading
import timeit
import weakref
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from stagecache.shim import scheduler as shims
from stagecache.shim.scheduler import guard_active, install, patch_scheduler, shim_of, stage_name
from stagecache.step import CachedRequests, NewRequest, SchedulerStep


class Named:
    """A member of an enumeration."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.value = name.lower()


class KVCacheManager:
    """``held``: blocks that nothing gives back, so that a reset fails."""

    def __init__(self) -> None:
        self.held = 0
        self.resets = 0
        self.evicted: list[set[int]] = []
        self.block_pool = SimpleNamespace(
            num_gpu_blocks=8, blocks=[SimpleNamespace(block_hash=b"h" if n < 4 else None) for n in range(8)]
        )

    def reset_prefix_cache(self) -> bool:
        self.resets += not self.held
        return not self.held

    def evict_blocks(self, block_ids: set[int]) -> None:
        self.evicted.append(block_ids)

    def get_block_ids(self, request_id: str) -> tuple[list[int], ...]:
        return ([1, 2, 3, 4],)


class Scheduler:
    def __init__(self, policy: str = "FCFS", prefix_caching: bool = True) -> None:
        self.kv_cache_manager = KVCacheManager()
        self.hash_block_size = self.block_size = 16
        self.policy = Named(policy)
        self.pause_state = Named("UNPAUSED")
        self.requests: dict[str, Any] = {}
        self.running: list[Any] = []
        self.calls: list[str] = []
        self.next = SchedulerStep()
        scheduler_class = type(self)
        self.vllm_config = SimpleNamespace(
            cache_config=SimpleNamespace(block_size=16, enable_prefix_caching=prefix_caching),
            model_config=SimpleNamespace(runner_type="generate"),
            scheduler_config=SimpleNamespace(policy=policy.lower(), get_scheduler_cls=lambda: scheduler_class),
        )

    def schedule(self, throttle_prefills: bool = False) -> SchedulerStep:
        self.calls.append(f"schedule {throttle_prefills}")
        return self.next

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        if reset_running_requests:
            for request in self.running:
                self._preempt_request(request, 0.0, drop_stale_output=True)
            self.running = []
        done = self.kv_cache_manager.reset_prefix_cache()
        if reset_running_requests and not done:
            raise RuntimeError("blocks are held")
        return done

    def _preempt_request(self, request: Any, timestamp: float, drop_stale_output: bool = False) -> None:
        self.calls.append(f"preempt {request.request_id} {drop_stale_output}")

    def shutdown(self) -> None:
        self.calls.append("shutdown")


class OmniGenerationScheduler(Scheduler):
    def schedule(self, throttle_prefills: bool = False) -> SchedulerStep:
        return SchedulerStep()


def running(req_id: str, computed: int = 0, status: str = "RUNNING") -> Any:
    return SimpleNamespace(request_id=req_id, num_computed_tokens=computed, status=Named(status))


def test_a_step_carries_the_epoch_and_hashes_up_to_the_end_of_what_it_computes() -> None:
    scheduler = Scheduler()
    hashes = [bytes([n]) * 32 for n in range(9)]
    scheduler.requests = {name: SimpleNamespace(block_hashes=hashes) for name in ("new", "back", "goes on")}
    scheduler.next = SchedulerStep(
        num_scheduled_tokens={"new": 40, "back": 1, "goes on": 1},
        scheduled_new_reqs=[NewRequest("new", 16, [[1, 2, 3, 4]]), NewRequest("ended meanwhile", 0, [[]])],
        scheduled_cached_reqs=CachedRequests(["goes on", "back"], {"back"}, [None, [[5]]], [32, 79]),
    )
    install(scheduler)
    output: Any = pickle.loads(pickle.dumps(scheduler.schedule()))  # noqa: S301 - as the engine sends it
    assert output.stagecache_epoch == 0
    assert output.stagecache_block_hashes == {"new": hashes[:3], "back": hashes[:5], "ended meanwhile": []}


def test_arguments_and_the_outermost_override_are_kept() -> None:
    plain, omni = Scheduler(), OmniGenerationScheduler()
    install(plain)
    install(omni)
    plain.schedule(True)
    assert plain.calls == ["schedule True"]
    omni.schedule(throttle_prefills=True)
    assert omni.calls == []


def test_hashes_can_be_left_at_home() -> None:
    scheduler = Scheduler()
    install(scheduler, attach_hashes=False)
    output = scheduler.schedule()
    assert output.stagecache_epoch == 0  # type: ignore[attr-defined]
    assert not hasattr(output, "stagecache_block_hashes")


def test_only_a_reset_that_was_done_raises_the_epoch() -> None:
    """R5"""
    scheduler = Scheduler()
    shim = install(scheduler)
    scheduler.kv_cache_manager.held = 1
    assert not scheduler.reset_prefix_cache()
    assert shim.epoch == 0
    scheduler.kv_cache_manager.held = 0
    assert scheduler.reset_prefix_cache()
    assert shim.epoch == 1
    assert scheduler.schedule().stagecache_epoch == 1  # type: ignore[attr-defined]


def test_a_reset_asked_for_by_any_thread_is_done_before_the_next_schedule() -> None:
    """R5"""
    scheduler = Scheduler()
    shim = install(scheduler)
    scheduler.running = [running("a"), running("b")]
    thread = threading.Thread(target=lambda: [shim.request_reset("operator"), shim.request_reset("rows were lost")])
    thread.start()
    thread.join()
    assert shim.epoch == 0
    assert shim.pending
    assert scheduler.schedule().stagecache_epoch == 1  # type: ignore[attr-defined]
    assert scheduler.calls == ["preempt a True", "preempt b True", "schedule False"]
    assert not shim.pending
    assert scheduler.schedule().stagecache_epoch == 1  # type: ignore[attr-defined]


def test_a_schedule_that_is_cut_short_is_followed_by_a_reset_and_the_names_of_all_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """W8, R1: its hashes are of blocks that nobody computes, and nobody else names the requests that it let go."""
    scheduler = Scheduler()
    scheduler.requests = {"a": running("a"), "b": running("b")}
    shim = install(scheduler)
    scheduler.schedule()
    model = shim.model

    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shims, "first_hashes", interrupted)
        with pytest.raises(KeyboardInterrupt):
            scheduler.schedule()
    del scheduler.requests["a"]
    scheduler.next = SchedulerStep()
    output: Any = scheduler.schedule()
    assert (output.stagecache_epoch, output.stagecache_model) == (1, model)
    assert output.stagecache_requests == ["b"]
    scheduler.next = SchedulerStep()
    assert not hasattr(scheduler.schedule(), "stagecache_requests")


def test_a_reset_of_the_engine_itself_answers_what_was_asked_for_before() -> None:
    scheduler = Scheduler()
    shim = install(scheduler)
    shim.request_reset("collective_rpc(reload_weights)")
    assert scheduler.reset_prefix_cache()
    assert not shim.pending
    scheduler.schedule()
    assert shim.epoch == 1


def test_a_paused_scheduler_resets_when_it_goes_on() -> None:
    """Requests that a pause lets run out are not preempted; nobody is admitted, so nothing can hit."""
    scheduler = Scheduler()
    shim = install(scheduler)
    scheduler.running = [running("a")]
    scheduler.pause_state = Named("PAUSED_NEW")
    shim.request_reset("sleep")
    assert scheduler.schedule().stagecache_epoch == 0  # type: ignore[attr-defined]
    assert scheduler.calls == ["schedule False"]
    scheduler.pause_state = Named("UNPAUSED")
    assert scheduler.schedule().stagecache_epoch == 1  # type: ignore[attr-defined]


def test_where_blocks_are_held_all_hashes_go_and_the_epoch_rises_all_the_same() -> None:
    """A session that waits for input holds its blocks, and the engine's own reset fails."""
    scheduler = Scheduler()
    shim = install(scheduler)
    scheduler.kv_cache_manager.held = 1
    shim.request_reset("operator")
    assert scheduler.schedule().stagecache_epoch == 1  # type: ignore[attr-defined]
    assert scheduler.kv_cache_manager.evicted == [set(range(8))]
    assert not shim.pending


@pytest.mark.parametrize(
    ("scheduler_class", "status"),
    [(Scheduler, "FINISHED_ABORTED"), (Scheduler, "WAITING_FOR_CHUNK"), (OmniGenerationScheduler, "RUNNING")],
)
def test_requests_that_cannot_be_preempted_stay_and_the_hashes_go(
    scheduler_class: type[Scheduler], status: str
) -> None:
    scheduler = scheduler_class()
    shim = install(scheduler)
    scheduler.running = [running("a", status=status)]
    shim.request_reset("operator")
    scheduler.schedule()
    assert shim.epoch == 1
    assert scheduler.kv_cache_manager.evicted == [set(range(8))]
    assert len(scheduler.running) == 1


def test_the_guard_takes_back_hashes_of_blocks_that_nobody_will_compute() -> None:
    """G3: from the block on that holds the first position not computed; before the engine frees them."""
    scheduler = Scheduler("PRIORITY")
    shim = install(scheduler)
    assert shim.guarded
    scheduler._preempt_request(running("a", computed=40), 0.0)
    assert scheduler.kv_cache_manager.evicted == [{3, 4}]
    assert shim.taken_back == 1
    assert scheduler.calls == ["preempt a False"]


def test_other_policies_have_no_guard() -> None:
    scheduler = Scheduler()
    shim = install(scheduler)
    scheduler._preempt_request(running("a"), 0.0)
    assert not shim.guarded
    assert scheduler.kv_cache_manager.evicted == []


def test_installing_twice_wraps_once_and_nothing_keeps_a_scheduler_alive() -> None:
    scheduler = Scheduler()
    assert install(scheduler) is install(scheduler) is shim_of(scheduler)
    scheduler.schedule()
    reference = weakref.ref(scheduler)
    gc.collect()
    gc.disable()
    try:
        del scheduler
        assert reference() is None
    finally:
        gc.enable()


# --------------------------------------------------------------- the plugin


class SilentWatch:
    """A connection that only notes that it is wanted."""

    def __init__(self, socket: str, stage: str, on_reset: Any) -> None:
        self.asked = (socket, stage)
        self.state = "made"

    def start(self) -> None:
        self.state = "started"

    def stop(self) -> None:
        self.state = "stopped"


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module as the engine's, with classes of its own, patched twice."""
    monkeypatch.setattr(shims, "SchedulerWatch", SilentWatch)
    made = ModuleType("vllm.v1.core.sched.scheduler")
    made.Scheduler = type("Scheduler", (Scheduler,), {"__init__": Scheduler.__init__})  # type: ignore[attr-defined]
    made.KVCacheManager = KVCacheManager  # type: ignore[attr-defined]
    patch_scheduler(made)
    patch_scheduler(made)
    return made


def test_without_a_socket_a_scheduler_stays_as_it_is(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STAGECACHE_SOCKET", raising=False)
    scheduler = module.Scheduler()
    assert shim_of(scheduler) is None
    assert "schedule" not in vars(scheduler)


def test_with_a_socket_it_is_wrapped_and_connected_until_it_shuts_down(
    module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAGECACHE_SOCKET", "d.sock")
    monkeypatch.setenv("STAGECACHE_STAGE", "thinker")
    monkeypatch.setenv("STAGECACHE_BLOCK_HASHES", "0")
    scheduler = module.Scheduler()
    shim = shim_of(scheduler)
    assert shim is not None
    assert (shim.stage, shim.attach_hashes) == ("thinker", False)
    watch: Any = shim.watch
    assert (watch.asked, watch.state) == (("d.sock", "thinker"), "started")
    scheduler.shutdown()
    assert (scheduler.calls, watch.state) == (["shutdown"], "stopped")


def test_without_prefix_caching_nothing_is_wrapped(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """G1"""
    monkeypatch.setenv("STAGECACHE_SOCKET", "d.sock")
    assert shim_of(module.Scheduler(prefix_caching=False)) is None


def test_an_engine_that_lacks_a_method_is_left_alone_and_has_no_guard(caplog: pytest.LogCaptureFixture) -> None:
    made = ModuleType("vllm.v1.core.sched.scheduler")
    made.Scheduler = type("Other", (), {"schedule": Scheduler.schedule})  # type: ignore[attr-defined]
    with caplog.at_level("WARNING", logger="vllm.stagecache"):
        patch_scheduler(made)
    assert "Scheduler._preempt_request" in caplog.text
    config = SimpleNamespace(scheduler_config=SimpleNamespace(get_scheduler_cls=lambda: made.Scheduler))
    assert not guard_active(config)


def test_gates_hear_of_the_guard_before_there_is_a_scheduler(module: Any) -> None:
    """G3: also for a scheduler that derives from the engine's; not for one that does not."""
    for scheduler_class, guarded in (
        (module.Scheduler, True),
        (type("Omni", (module.Scheduler,), {}), True),
        (Scheduler, False),
    ):
        config = SimpleNamespace(scheduler_config=SimpleNamespace(get_scheduler_cls=lambda c=scheduler_class: c))
        assert guard_active(config) is guarded


def test_an_engine_of_several_stages_names_them_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAGECACHE_STAGE", "named")
    assert stage_name(SimpleNamespace(model_config=SimpleNamespace(model_stage="talker"))) == "talker"
    assert stage_name(SimpleNamespace(model_config=SimpleNamespace())) == "named"
    monkeypatch.delenv("STAGECACHE_STAGE")
    assert stage_name(SimpleNamespace(model_config=SimpleNamespace())) == "stage0"


# ------------------------------------------------------------------ the cost


def test_a_decode_step_of_256_requests_pays_less_than_20_microseconds() -> None:
    """And one with 8 new prompts of 512 tokens less than 50."""
    hashes = [bytes(32)] * 64
    names = [f"r{n}" for n in range(256)]
    decode = SchedulerStep(
        num_scheduled_tokens=dict.fromkeys(names, 1),
        scheduled_cached_reqs=CachedRequests(names, set(), [None] * 256, [100] * 256),
    )
    prefill = SchedulerStep(
        num_scheduled_tokens=dict.fromkeys(names[:8], 512),
        scheduled_new_reqs=[NewRequest(name, 0, [list(range(32))]) for name in names[:8]],
    )
    for step, limit_us in ((decode, 20.0), (prefill, 50.0)):
        plain, wrapped = Scheduler(), Scheduler()
        install(wrapped)
        for scheduler in (plain, wrapped):
            scheduler.next = step
            scheduler.requests.update({name: SimpleNamespace(block_hashes=hashes) for name in names})
        least = [min(timeit.repeat(one.schedule, number=200, repeat=20)) / 200 * 1e6 for one in (plain, wrapped)]
        print(f"{least[1] - least[0]:.2f} us")
        assert least[1] - least[0] < limit_us
