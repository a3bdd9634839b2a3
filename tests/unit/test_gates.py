"""G1, G2, G3: one function decides which stages may have a row cache, and each refusal says what to change."""

from __future__ import annotations

import dataclasses
import pickle
from types import SimpleNamespace

import pytest

from stagecache.errors import StageCacheError
from stagecache.gates import REFUSALS, GateRefusal, StageFacts, check_facts, check_stage, no_cache_reason

ORDINARY = StageFacts(kernel_block_size=16)

REFUSED = {
    "v2 runner": ({"v2_runner": True}, "G3", "VLLM_USE_V2_MODEL_RUNNER=0"),
    "kv connector": ({"kv_consumer": True}, "G2", "kv_producer"),
    "kv connector without shared blocks": ({"kv_consumer": True}, "G2", "STAGECACHE_SHARED_BLOCKS=1"),
    "failed loads computed later": (
        {"kv_consumer": True, "shared_blocks": True, "recomputes_failed_loads": True},
        "G2",
        "policy=fail",
    ),
    "speculative decoding": ({"speculative": "ngram"}, "G3", "speculative_config"),
    "matching inside blocks": ({"prefix_match_unit": 8}, "G3", "prefix_match_unit"),
    "two groups": ({"kv_groups": (("full", 16), ("SlidingWindowSpec", 16))}, "G3", "full attention in every layer"),
    "no group": ({"kv_groups": ()}, "G3", "full attention in every layer"),
    "sliding window": ({"kv_groups": (("SlidingWindowSpec", 16),)}, "G3", "full attention in every layer"),
    "other block size": ({"kv_groups": (("full", 32),)}, "G3", "--block-size to 32"),
    "kernel blocks": ({"kernel_block_size": 8}, "G3", "--block-size to 8"),
    "decode context parallelism": ({"decode_context_parallel": 2}, "G3", "decode_context_parallel_size=1"),
    "prefill context parallelism": ({"prefill_context_parallel": 2}, "G3", "prefill_context_parallel_size=1"),
    "fast prefill": ({"fast_prefill": True}, "G3", "kv_sharing_fast_prefill=False"),
    "priority": ({"policy": "priority"}, "G3", "scheduling_policy=fcfs"),
}


def test_an_ordinary_stage_gets_its_facts_back() -> None:
    assert check_facts(ORDINARY) == ORDINARY


def test_a_prefix_match_unit_of_one_block_is_no_refusal() -> None:
    facts = dataclasses.replace(ORDINARY, prefix_match_unit=16)
    assert check_facts(facts) == facts


@pytest.mark.parametrize("change", [{"prefix_caching": False}, {"pooling": True}])
def test_a_stage_without_a_cache_is_off_and_not_refused(change: dict[str, bool]) -> None:
    """G1, also where another gate would refuse."""
    facts = dataclasses.replace(ORDINARY, policy="priority", **change)
    assert check_facts(facts) is None
    assert no_cache_reason(facts)


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_names_its_rule_and_what_to_change(name: str) -> None:
    """G2, G3."""
    change, rule, remedy = REFUSED[name]
    with pytest.raises(GateRefusal) as caught:
        check_facts(dataclasses.replace(ORDINARY, **change))
    assert isinstance(caught.value, StageCacheError)
    assert caught.value.rule == rule
    assert remedy in caught.value.remedy
    assert caught.value.remedy in str(caught.value)
    assert caught.value.found in str(caught.value)


def test_every_reason_of_the_table_is_tested() -> None:
    facts = [dataclasses.replace(ORDINARY, **change) for change, _, _ in REFUSED.values()]
    for reason in REFUSALS:
        assert any(f.kv_groups and reason.applies(f) for f in facts), reason.remedy


def test_a_refusal_survives_the_way_between_processes() -> None:
    """vLLM's workers send their errors to the parent."""
    error = GateRefusal("G3", "what was found", "what to change")
    again = pickle.loads(pickle.dumps(error))  # noqa: S301  what vLLM does with it
    assert (str(again), again.rule, again.found, again.remedy) == (str(error), error.rule, error.found, error.remedy)


class FullAttentionSpec:
    block_size = 16


class SinkFullAttentionSpec(FullAttentionSpec):
    pass


class ChunkedLocalAttentionSpec:
    block_size = 16


def stage(spec: object, **cache: object) -> tuple[SimpleNamespace, SimpleNamespace]:
    """Objects with the attributes that a VllmConfig and a KVCacheConfig have."""
    config = SimpleNamespace(
        cache_config=SimpleNamespace(**({"enable_prefix_caching": True, "block_size": 16} | cache)),
        model_config=SimpleNamespace(runner_type="generate"),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1, prefill_context_parallel_size=1),
        scheduler_config=SimpleNamespace(policy="fcfs"),
        kv_transfer_config=None,
        speculative_config=None,
    )
    return config, SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec)])


def test_specs_that_derive_from_full_attention_are_full_attention() -> None:
    config, kv = stage(SinkFullAttentionSpec())
    assert check_stage(config, kv) == StageFacts()


def test_another_attention_is_named_in_the_refusal() -> None:
    config, kv = stage(ChunkedLocalAttentionSpec())
    with pytest.raises(GateRefusal, match="ChunkedLocalAttentionSpec"):
        check_stage(config, kv)


def test_the_block_table_tells_the_kernels_block_size_and_striping() -> None:
    config, kv = stage(FullAttentionSpec())
    with pytest.raises(GateRefusal, match="blocks of 4"):
        check_stage(config, kv, block_table=SimpleNamespace(blocks_per_kv_block=4, dcp_world_size=1))
    with pytest.raises(GateRefusal, match="decode context parallelism"):
        check_stage(config, kv, block_table=SimpleNamespace(blocks_per_kv_block=1, dcp_world_size=2))


def test_a_stage_that_shares_its_blocks_may_get_kv_from_a_connector(monkeypatch: pytest.MonkeyPatch) -> None:
    """G2: only where the scheduler-side shim is there to cut what the connector offers."""
    facts = dataclasses.replace(ORDINARY, kv_consumer=True, shared_blocks=True)
    assert check_facts(facts) == facts
    config, _ = stage(FullAttentionSpec())
    config.kv_transfer_config = SimpleNamespace(is_kv_consumer=True)
    monkeypatch.setenv("STAGECACHE_SHARED_BLOCKS", "1")
    with pytest.raises(GateRefusal, match="kv_consumer"):
        check_stage(config, None)
    config.scheduler_config.get_scheduler_cls = lambda: type("Patched", (), {"_stagecache_patched": True})
    assert check_stage(config, None) is not None


def test_a_producer_is_not_refused_and_a_consumer_is() -> None:
    """G2: kv_both counts as a consumer."""
    config, kv = stage(FullAttentionSpec())
    config.kv_transfer_config = SimpleNamespace(is_kv_consumer=False)
    assert check_stage(config, kv) is not None
    config.kv_transfer_config = SimpleNamespace(is_kv_consumer=True)
    with pytest.raises(GateRefusal, match="G2"):
        check_stage(config, kv)


def test_groups_are_not_judged_before_the_kv_cache_is_laid_out() -> None:
    """The V2 runner is refused before its model is loaded."""
    config, _ = stage(FullAttentionSpec())
    assert check_stage(config, None) is not None
    with pytest.raises(GateRefusal, match="VLLM_USE_V2_MODEL_RUNNER=0"):
        check_stage(config, None, v2_runner=True)


def test_the_v2_runner_without_prefix_caching_is_left_alone() -> None:
    config, _ = stage(FullAttentionSpec(), enable_prefix_caching=False)
    assert check_stage(config, None, v2_runner=True) is None
