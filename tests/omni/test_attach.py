"""When a runner attaches, as what, and what happens where it cannot (gates, fallback, remembered keys)."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm.distributed.parallel_state as parallel_state
from vllm_omni.core.prefix_cache import (
    ModelCachePolicy,
    OmniPrefixCacheManager,
    OmniPrefixCacheUnmatchError,
    PrefixCacheConfig,
    group_view,
    runner_mixin,
)

from stagecache.errors import DaemonUnavailableError
from stagecache.policy import HIDDEN_KEY
from stagecache.shim import scheduler
from stagecache.shim.omni import SidecarPrefixCacheManager, attach, patch
from tests.daemon_process import DaemonProcess
from tests.model.steps import Scheduled, Step
from tests.omni.batch import InputBatch, SchedulerOutputs
from tests.omni.beyond import beyond
from tests.omni.managers import ADAPTER_API

BLOCK = 4
HIDDEN = 3


class FullAttentionSpec:
    """By its name, all that the gate asks of a KV group."""

    block_size = BLOCK


class Runner(runner_mixin.PrefixCacheRunnerMixin):
    """What the mixin and the gates read of a runner."""

    is_pooling_model = False
    omni_prefix_cache = None

    def __init__(self, model: str = "model", stage: str | None = "thinker", **model_attributes: Any) -> None:
        self.input_batch = InputBatch(BLOCK)
        self.model = SimpleNamespace(**model_attributes)
        self._snapshot_prefix_cache_model_policy(self.model)
        self.model_config = SimpleNamespace(
            model=model, dtype=torch.float32, get_hidden_size=lambda: HIDDEN, runner_type="generate"
        )
        if stage is not None:
            self.model_config.model_stage = stage
        self.vllm_config = SimpleNamespace(
            cache_config=SimpleNamespace(block_size=BLOCK, enable_prefix_caching=True),
            model_config=self.model_config,
            scheduler_config=SimpleNamespace(policy="fcfs"),
            parallel_config=SimpleNamespace(),
        )

    def lay_out(self, staged: bool = True) -> None:
        """What initialize_kv_cache leaves behind."""
        group = SimpleNamespace(kv_cache_spec=FullAttentionSpec())
        self.kv_cache_config = SimpleNamespace(num_blocks=16, kv_cache_groups=[group])
        config = PrefixCacheConfig(num_blocks=16, block_size=BLOCK, staging_capacity_tokens=64)
        self._omni_prefix_cache_cfg = config if staged else None


class KvRunner(Runner):
    """A runner with the method that the patch wraps."""

    def initialize_kv_cache(self, kv_cache_config: Any, is_profiling: bool = False) -> None:
        self.lay_out()


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A pipeline and tensor-parallel rank, and the mixin patched."""
    ranks = SimpleNamespace(is_last_rank=True, rank_in_group=0)
    monkeypatch.setattr(parallel_state, "get_pp_group", lambda: ranks)
    monkeypatch.setattr(parallel_state, "get_tp_group", lambda: ranks)
    # The group view of the fake batch; the real one asks vLLM for its spec classes.
    monkeypatch.setattr(
        runner_mixin,
        "get_prefix_cache_group_view",
        lambda batch, size, kv_cache_groups=None: runner_mixin_view(batch, size),
    )
    patch.apply(runner_mixin)
    return ranks


def runner_mixin_view(batch: InputBatch, size: int) -> Any:
    from vllm_omni.core.prefix_cache import FullAttentionGroupView

    return FullAttentionGroupView(batch, size)


@pytest.fixture
def socket(daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("STAGECACHE_SOCKET", str(daemon.socket))
    return str(daemon.socket)


@pytest.fixture
def running() -> Iterator[list[Runner]]:
    """Runners whose managers are shut down at the end."""
    runners: list[Runner] = []
    yield runners
    for runner in runners:
        prepared = runner.__dict__.get("_stagecache_prepared")
        for manager in {runner.omni_prefix_cache, prepared and prepared.manager} - {None}:
            manager.shutdown()


def first_step(runner: Runner) -> int | None:
    """A step of request a with 3 tokens, through the mixin; its id."""
    step = Step((Scheduled("a", (0,), 0, 3, "new"),))
    runner._prefix_cache_step_begin(SchedulerOutputs().of(step))
    runner.input_batch.show(step)
    return runner._prefix_cache_save_step(
        torch.ones(3, HIDDEN), {"k": torch.ones(3, 2)}, num_tokens_unpadded=3, num_tokens_padded=3
    )


def test_it_attaches_when_the_kv_cache_is_laid_out(socket: str, running: list[Runner]) -> None:
    runner = Runner("at-init")
    running.append(runner)
    runner.lay_out()
    prepared = attach.prepare(runner)
    assert prepared is not None
    assert runner.omni_prefix_cache is None, "the mixin takes it up at the first step, as it does its own"
    assert [key.schema.name for key in prepared.manager.cache.session.keys] == [HIDDEN_KEY]
    step_id = first_step(runner)
    assert runner.omni_prefix_cache is prepared.manager
    hidden, mm = runner._prefix_cache_materialize(step_id, ["a"])
    assert torch.equal(hidden["a"], torch.ones(3, HIDDEN))
    assert torch.equal(mm["k"]["a"], torch.ones(3, 2))


def test_an_interrupt_before_the_cache_hears_of_a_step_costs_no_finish(
    socket: str, running: list[Runner], monkeypatch: pytest.MonkeyPatch
) -> None:
    """R1: vLLM-Omni says once that a request has ended."""
    runner = Runner("interrupted")
    running.append(runner)
    runner.lay_out()
    first_step(runner)
    manager = runner.omni_prefix_cache
    outputs = SchedulerOutputs()

    def interrupted(_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(manager._view, "begin", interrupted)
        with pytest.raises(KeyboardInterrupt):
            runner._prefix_cache_step_begin(outputs.of(Step(finished=("a",))))
    assert list(manager.cache._requests.live) == ["a"]
    runner._prefix_cache_step_begin(outputs.of(Step()))
    assert not manager.cache._requests.live


def test_the_second_worker_of_a_stage_opens_all_its_keys_at_once(socket: str, running: list[Runner]) -> None:
    first = Runner("remembered")
    running.append(first)
    first.lay_out()
    first_step(first)
    first.omni_prefix_cache.shutdown()
    second = Runner("remembered")
    running.append(second)
    second.lay_out()
    manager = attach.prepare(second).manager
    assert [key.schema.name for key in manager.cache.session.keys] == [HIDDEN_KEY, "k"]
    calls = manager.cache.session.rpc.calls
    first_step(second)
    assert manager.cache.session.rpc.calls == calls, "the first real request makes no call"


def test_an_expected_key_that_is_wrong_gives_way(socket: str, running: list[Runner]) -> None:
    """The width in the model's configuration is a guess, and so is what another run of the model emitted."""
    runner = Runner("wider")
    running.append(runner)
    runner.model_config.get_hidden_size = lambda: 2 * HIDDEN
    runner.lay_out()
    hidden, _ = runner._prefix_cache_materialize(first_step(runner), ["a"])
    assert hidden["a"].shape == (3, HIDDEN)


def test_keys_may_be_declared(socket: str, running: list[Runner], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAGECACHE_KEYS", "k:float32:2, codes.audio:int64:16")
    runner = Runner("declared", requires_full_prefix_cached_hidden_states=False)
    running.append(runner)
    runner.lay_out()
    manager = attach.prepare(runner).manager
    assert [(key.schema.name, key.schema.row_shape) for key in manager.cache.session.keys] == [
        ("k", (2,)),
        ("codes.audio", (16,)),
    ]


def test_a_bad_declaration_stops_the_engine(
    socket: str, running: list[Runner], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is a mistake of the operator's, not an absent daemon: no fallback."""
    monkeypatch.setenv("STAGECACHE_KEYS", "k:float31:2")
    runner = Runner()
    runner.lay_out()
    with pytest.raises(OmniPrefixCacheUnmatchError, match="float31"):
        attach.prepare(runner)


@pytest.mark.parametrize(
    ("engine", "variable", "name"), [("talker", "x", "talker"), (None, "x", "x"), (None, None, "stage0")]
)
def test_the_engine_names_the_stage_else_the_variable(
    socket: str,
    running: list[Runner],
    monkeypatch: pytest.MonkeyPatch,
    engine: str | None,
    variable: str | None,
    name: str,
) -> None:
    if variable is None:
        monkeypatch.delenv("STAGECACHE_STAGE", raising=False)
    else:
        monkeypatch.setenv("STAGECACHE_STAGE", variable)
    runner = Runner(stage=engine)
    running.append(runner)
    runner.lay_out()
    assert attach.prepare(runner).manager.cache.session.stage == name


def test_a_stage_without_a_staged_cache_never_attaches(socket: str) -> None:
    """G1: vLLM-Omni's gate stages nothing for pooling stages, nor with prefix caching off."""
    runner = Runner()
    runner.lay_out(staged=False)
    assert attach.prepare(runner) is None
    assert first_step(runner) is None


def test_other_pipeline_ranks_never_attach(socket: str, one_rank: SimpleNamespace) -> None:
    """S5"""
    one_rank.is_last_rank = False
    runner = Runner()
    runner.lay_out()
    assert attach.prepare(runner) is None
    assert first_step(runner) is None
    assert runner.omni_prefix_cache is None


def test_each_tensor_parallel_rank_attaches(
    socket: str, daemon: DaemonProcess, running: list[Runner], one_rank: SimpleNamespace
) -> None:
    """S5: and the daemon's figures tell them apart."""
    from stagecache.control import Observer

    for rank in range(2):
        one_rank.rank_in_group = rank
        runner = Runner("parallel", stage="parallel")
        running.append(runner)
        runner.lay_out()
        attach.prepare(runner)
    with Observer(daemon.socket) as observer:
        sessions = [session for session in observer.stats().sessions if session.stage == "parallel"]
    assert sorted(session.rank for session in sessions) == [0, 1]


@beyond("G3")
@pytest.mark.parametrize(
    ("part", "name", "value", "named"),
    [
        ("cache_config", "kv_sharing_fast_prefill", True, "kv_sharing_fast_prefill"),
        ("parallel_config", "prefill_context_parallel_size", 2, "prefill_context_parallel_size"),
        ("parallel_config", "decode_context_parallel_size", 2, "decode_context_parallel_size"),
    ],
)
def test_our_gates_hold_beside_vllm_omnis(socket: str, part: str, name: str, value: Any, named: str) -> None:
    """G3: refused when the KV cache is laid out, with what to change; vLLM-Omni's manager starts."""
    runner = Runner()
    setattr(getattr(runner.vllm_config, part), name, value)
    runner.lay_out()
    with pytest.raises(OmniPrefixCacheUnmatchError, match=named) as error:
        attach.prepare(runner)
    assert error.value.rule == "G3"
    in_process = OmniPrefixCacheManager(runner._omni_prefix_cache_cfg, **({} if ADAPTER_API else {"view": None}))
    in_process.shutdown()


@pytest.fixture
def no_daemon(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("STAGECACHE_SOCKET", str(tmp_path / "nobody.sock"))
    monkeypatch.delenv("STAGECACHE_REQUIRED", raising=False)
    return str(tmp_path / "nobody.sock")


def test_without_a_daemon_the_stage_falls_back_with_one_warning(no_daemon: str, shim_log: list[str]) -> None:
    runner = Runner()
    runner.lay_out()
    attach.prepare(runner)
    step_id = first_step(runner)
    assert type(getattr(runner.omni_prefix_cache, "inner", runner.omni_prefix_cache)) is OmniPrefixCacheManager
    assert runner._prefix_cache_materialize(step_id, ["a"])[0]["a"].shape == (3, HIDDEN)
    [warning] = shim_log
    assert no_daemon in warning
    assert "in-process prefix cache" in warning
    runner.omni_prefix_cache.shutdown()


def test_kv_from_a_connector_needs_shared_blocks_and_a_daemon(no_daemon: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """G2: the in-process cache has no rows for it, so there is nothing to fall back to."""
    monkeypatch.setattr(scheduler, "guard_active", lambda config: True)
    monkeypatch.setattr(attach, "engine_name", lambda config: "engine")
    monkeypatch.setattr(attach, "namespace_of", lambda config, stage: None)
    transfer = SimpleNamespace(is_kv_consumer=True)
    check = group_view.check_prefix_cache_kv_transfer
    runner = Runner()
    runner.vllm_config.kv_transfer_config = transfer
    runner.lay_out()
    with pytest.raises(OmniPrefixCacheUnmatchError, match="kv_consumer"):
        check(transfer)
    with pytest.raises(OmniPrefixCacheUnmatchError, match="STAGECACHE_SHARED_BLOCKS=1"):
        attach.prepare(runner)
    monkeypatch.setenv("STAGECACHE_SHARED_BLOCKS", "1")
    check(transfer)
    with pytest.raises(DaemonUnavailableError, match=r"nobody\.sock"):
        attach.prepare(runner)


def test_a_required_daemon_that_is_not_there_stops_the_engine(no_daemon: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAGECACHE_REQUIRED", "1")
    runner = Runner()
    runner.lay_out()
    with pytest.raises(DaemonUnavailableError, match=r"nobody\.sock") as error:
        attach.prepare(runner)
    assert isinstance(error.value, OmniPrefixCacheUnmatchError)


def test_a_refused_attach_falls_back_too(socket: str, shim_log: list[str]) -> None:
    """Here: a pool that no /dev/shm holds."""
    runner = Runner()
    runner.lay_out()
    runner._omni_prefix_cache_cfg = PrefixCacheConfig(num_blocks=1 << 28, block_size=BLOCK)
    prepared = attach.prepare(runner)
    assert prepared is not None
    assert prepared.manager is None
    [warning] = shim_log
    assert "MiB" in warning


def test_with_the_variable_unset_a_patched_mixin_builds_vllm_omnis(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STAGECACHE_SOCKET", raising=False)
    runner = Runner()
    runner.lay_out()
    first_step(runner)
    assert type(runner.omni_prefix_cache) is OmniPrefixCacheManager
    runner.omni_prefix_cache.shutdown()


def test_a_kv_cache_laid_out_anew_gets_a_new_session(socket: str, running: list[Runner]) -> None:
    runner = Runner()
    running.append(runner)
    runner.lay_out()
    first_step(runner)
    old = runner.omni_prefix_cache
    runner.lay_out()
    new = attach.prepare(runner).manager
    assert new is not old
    assert runner.omni_prefix_cache is None
    first_step(runner)
    assert runner.omni_prefix_cache is new


def test_roles_that_the_model_declares_reach_the_cache(socket: str, running: list[Runner]) -> None:
    """K2"""
    runner = Runner("roles", prefix_cache_key_roles={"k": "global"}, deferred_prefix_cache_mm_keys={"codes.audio"})
    running.append(runner)
    runner.lay_out()
    step_id = first_step(runner)
    mm = runner._prefix_cache_materialize(step_id, ["a"])[1]
    assert mm["k"]["a"].shape == (3, 2)
    assert [key.schema.name for key in runner.omni_prefix_cache.cache.session.keys] == [HIDDEN_KEY]


def test_the_drop_in_constructor_reads_the_environment(socket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAGECACHE_STAGE", "from-env")
    config = PrefixCacheConfig(
        num_blocks=16, block_size=BLOCK, staging_depth=3, staging_capacity_tokens=8, staging_claim_timeout_s=0.1
    )
    manager = SidecarPrefixCacheManager(config, runner_mixin_view(InputBatch(BLOCK), BLOCK), eager=True)
    manager.register_policy(ModelCachePolicy())
    session = manager.cache.session
    assert session.stage == "from-env"
    assert (session.geometry.staging_depth, session.geometry.staging_capacity_tokens) == (3, 8)
    manager.shutdown()


@pytest.mark.parametrize("profiling", [True, False])
def test_profiling_never_attaches(socket: str, running: list[Runner], profiling: bool) -> None:
    """S4: the GPU worker lays a small KV cache out to measure memory."""

    class Profiled(KvRunner):
        pass

    patch.patch_kv_cache_init(Profiled)
    patch.patch_kv_cache_init(Profiled)
    runner = Profiled()
    running.append(runner)
    runner.initialize_kv_cache(None, is_profiling=profiling)
    assert ("_stagecache_prepared" in runner.__dict__) is not profiling


def test_an_inherited_initialize_kv_cache_is_wrapped_for_that_class_alone(socket: str, running: list[Runner]) -> None:
    """As of OmniGPUModelRunner, which has vLLM's: vLLM's own stays as it is."""

    class Gpu(KvRunner):
        pass

    class Npu(Gpu):
        def initialize_kv_cache(self, kv_cache_config: Any, kv_cache_allocation_context: Any = None) -> None:
            KvRunner.initialize_kv_cache(self, kv_cache_config)

    patch.patch_kv_cache_init(Gpu)
    patch.patch_kv_cache_init(Npu)
    for made, expected in ((Gpu(), True), (Npu(), True), (KvRunner(), False)):
        running.append(made)
        made.initialize_kv_cache(None)
        assert ("_stagecache_prepared" in made.__dict__) is expected
