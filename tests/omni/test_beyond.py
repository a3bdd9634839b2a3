"""Every place where our manager does otherwise than vLLM-Omni's: each test shows both.

What vLLM-Omni's does is asserted too, so that a release which changes it is noticed. Everything else is in the tests
beside this file, which hold for both.
"""

from __future__ import annotations

import pytest
from vllm_omni.core.prefix_cache import ModelCachePolicy as OmniPolicy

from stagecache import ModelCachePolicy
from tests.model.steps import Outputs, Refused, Schema, Tensor
from tests.omni.beyond import beyond
from tests.omni.conftest import MakeStage
from tests.omni.managers import ADAPTER_API
from tests.omni.test_calls import GENERAL, kinds
from tests.omni.values import column, read
from tests.rules.builder import HIDDEN_SCHEMA, Stage, numbers, refusal, rows_of, spelled

WIDE = Schema("float32", (5,))


def bare_adapter(stage: Stage) -> bool:
    """Whether the manager is told only what 0.32.0rc1's own adapter translates."""
    return ADAPTER_API and stage.cache.kind == "slots"  # type: ignore[attr-defined]


@beyond("S4")
def test_a_negative_count_counts_as_none(stage: Stage, peer: bool) -> None:
    """S4: 0.30.0's manager shifts the rows of those behind it; 0.32.0rc1's does as ours."""
    stage.step("a:[0]@0+2")
    saved = stage.saved("b:[1]@0+-1", "a@2+2")
    if peer and not ADAPTER_API:
        assert saved.materialize()["a"] != "a2 a3"
    else:
        assert saved.materialize()["a"] == "a2 a3"


@beyond("S4")
def test_a_negative_count_with_a_hit_is_an_error(stage: Stage, peer: bool) -> None:
    """S4: at new_step_starts; 0.30.0's manager finds it at materialize, as an error of torch."""
    stage.step("a:[0,1]@0+8")
    if peer and not ADAPTER_API:
        saved = stage.saved("b:[0,1]@8+-1", "a@8+1")
        with pytest.raises(RuntimeError):
            saved.materialize()
    else:
        with pytest.raises(Refused):
            stage.begin("b:[0,1]@8+-1")


@beyond("K1")
def test_a_per_request_tensor_is_demoted_at_its_first_mismatch(stage: Stage, peer: bool) -> None:
    """K1: in pure decode it looks per-token; vLLM-Omni's manager then cuts it by tokens whatever its shape."""
    stage.step("a:[0]@0+3", "b:[1]@0+3")
    out = stage.step("a@3+1", "b@3+1", k=column("5 6"))
    assert (read(out.merged["k"]["a"]), read(out.merged["k"]["b"])) == ("5", "6")
    out = stage.step("a:[0,2]@4+1", "b:[1,3]@4+1", "c:[4]@0+4", k=column("7 8 9"))
    assert [read(out.merged["k"][req_id]) for req_id in "abc"] == (["7", "8", "9"] if peer else ["7 8 9"] * 3)
    out = stage.step("a@5+1", "b@5+1", "c:[4,5]@4+1", k=column("1 2 3"))
    assert [read(out.merged["k"][req_id]) for req_id in "abc"] == (["1", "2", "3"] if peer else ["1 2 3"] * 3)


@beyond("K1")
def test_a_confirmed_key_of_another_first_dimension_is_refused(stage: Stage, peer: bool) -> None:
    """K1, K3: vLLM-Omni's manager cuts it as if its rows were the step's tokens."""
    stage.step("a:[0,1]@0+4", k=column(1, 4))
    saved = stage.saved("a@4+2", k=column("1 2 3"))
    if peer:
        assert read(saved.materialize().merged["k"]["a"]) == "1 2"
    else:
        assert {"SchemaMismatchError", GENERAL} <= kinds(refusal(saved.materialize))
        assert stage.step("a@6+2", k=column("4 5"))["a"] == "a6 a7", "the next step works"


@beyond("K2")
def test_one_number_a_token_is_a_key(stage: Stage, peer: bool) -> None:
    """K2: vLLM-Omni's manager cuts a 1-D tensor to each request and never merges it."""
    stage.step("a:[0]@0+4", k=numbers([1, 2, 3, 4]))
    out = stage.step("b:[0,1]@4+2", k=numbers([5, 6]))
    assert out.numbers("b") == ("5 6" if peer else "1 2 3 4 5 6")


@beyond("K2")
def test_a_matrix_a_token_is_a_key(stage: Stage, peer: bool) -> None:
    """K2: vLLM-Omni's manager fails at the save, after it took a page."""
    rows = tuple(bytes([token]) * 24 for token in range(4))
    stage.begin("a:[0]@0+4")
    outputs = Outputs(None, {"k": Tensor("float32", (2, 3), rows)}, 4, 4)
    if peer:
        with pytest.raises(RuntimeError):
            stage.save_raw(outputs)
    else:
        stage.save_raw(outputs).materialize()
        stage.begin("b:[0,1]@4+1")
        out = stage.save_raw(Outputs(None, {"k": Tensor("float32", (2, 3), rows[:1])}, 1, 1)).materialize()
        assert out.merged["k"]["b"] == Tensor("float32", (2, 3), rows + rows[:1])


@beyond("K2")
def test_a_declared_role_beats_the_shape(stage: Stage, peer: bool) -> None:
    """K2: a global table that has as many rows as the step has tokens."""
    policy = OmniPolicy() if peer else ModelCachePolicy(key_roles={"table": "global"})
    stage.cache.manager.register_policy(policy)  # type: ignore[attr-defined]
    out = stage.step("a:[0]@0+1", "b:[1]@0+2", table=column("1 2 3"))
    assert read(out.merged["table"]["b"]) == ("2 3" if peer else "1 2 3")


@beyond("K3", "W5")
def test_a_key_that_changes_costs_that_key_in_that_step(make_stage: MakeStage) -> None:
    """K3, W5: in vLLM-Omni's manager the write fails, and every later call fails with it."""
    stage = make_stage()
    stage.step("a:[0]@0+4", k=column(1, 4))
    stage.begin("a:[0,1]@4+2")
    outputs = Outputs(None, {"k": rows_of(WIDE, 1, 2), "j": column("5 6")}, 2, 2)
    if stage.cache.kind == "peer":  # type: ignore[attr-defined]
        with pytest.raises(RuntimeError):
            stage.save_raw(outputs)
        for _ in range(2):
            assert GENERAL in kinds(refusal(lambda: stage.begin("a@6+1")))
    else:
        error = refusal(stage.save_raw(outputs).materialize)
        assert {"SchemaMismatchError", GENERAL} <= kinds(error)
        assert "(1,)" in str(error)
        assert "5" in str(error)
        out = stage.step("a@6+2", k=column("7 8"), j=column("7 8"))
        assert (out["a"], read(out.merged["k"]["a"])) == ("a6 a7", "7 8")


@beyond("K3")
def test_too_few_hidden_rows_cost_hidden_in_that_step(stage: Stage, peer: bool) -> None:
    """K3: vLLM-Omni's manager refuses the whole save."""
    stage.begin("a:[0]@0+2")
    outputs = Outputs(rows_of(HIDDEN_SCHEMA, 1, 1), {"k": column("1 2")}, 2, 2)
    if peer:
        assert GENERAL in kinds(refusal(lambda: stage.save_raw(outputs)))
    else:
        assert GENERAL in kinds(refusal(stage.save_raw(outputs).materialize))
    assert stage.step("a@2+2", k=column("3 4"))["a"] == "a2 a3"


@beyond("H3")
def test_a_hit_with_too_few_blocks_is_an_error(stage: Stage, peer: bool) -> None:
    """H3: 0.30.0's manager gives a shorter prefix; 0.32.0rc1's does as ours."""
    stage.step("a:[0,1]@0+8")
    if peer and not ADAPTER_API:
        stage.begin("b:[0]@8+1")
        stage.cache.batch.block_table[0].get_numpy_array()[0, :3] = (0, 1, 2)  # type: ignore[attr-defined]
        assert stage.save().materialize()["b"] == "a0 a1 a2 a3 b8"
    else:
        with pytest.raises(Refused) as error:
            stage.begin("b:[0]@8+1")
        assert GENERAL in error.value.kinds


@beyond("H5")
@pytest.mark.parametrize("deferred", [frozenset(), frozenset({"k"})])
def test_a_sparse_key_never_shows_an_older_tenants_rows(make_stage: MakeStage, deferred: frozenset[str]) -> None:
    """H5"""
    stage = make_stage(deferred=deferred)
    stage.step("a:[0]@0+4", k=column(5, 4))
    stage.step("b:[0]@0+4", finished="a")
    out = stage.step("c:[0,1]@4+2", finished="b", k=column("9 9"))
    leaked = stage.cache.kind == "peer"  # type: ignore[attr-defined]
    assert read(out.merged["k"]["c"]) == ("5 5 5 5 9 9" if leaked else "0 0 0 0 9 9")


@beyond("H4")
def test_hidden_of_a_tenant_that_wrote_none_is_an_error(stage: Stage, peer: bool) -> None:
    """H4: vLLM-Omni's manager gives the older tenant's."""
    stage.step("a:[0]@0+4")
    stage.step("b:[0]@0+4", finished="a", hidden=False, k=column(1, 4))
    saved = stage.saved("c:[0,1]@4+1", finished="b", k=column(2))
    if peer:
        assert saved.materialize()["c"] == "a0 a1 a2 a3 c4"
    else:
        assert {"UnreadableHitError", GENERAL} <= kinds(refusal(saved.materialize))


@beyond("H7")
def test_a_hit_in_a_step_without_tokens_yields_its_span(stage: Stage, peer: bool) -> None:
    """H7: vLLM-Omni's manager yields it only beside other requests' tokens."""
    stage.step("a:[0]@0+4")
    assert stage.step("c:[0]@4+0", hidden=False)["c"] == ("" if peer else spelled("a", 0, 4))


@beyond("R3")
def test_a_continuation_gets_what_was_not_handed_out(stage: Stage, peer: bool) -> None:
    """R3: an async_chunk continuation; vLLM-Omni's manager drops its prefix. So does ours where it is told as little
    as 0.32.0rc1's adapter tells."""
    stage.saved("a:[0,1]@0+8").discard()
    got = stage.step("a:[0,1,2]@8+2 again")["a"]
    assert got == (spelled("a", 8, 10) if peer or bare_adapter(stage) else spelled("a", 0, 10))


@beyond("R3")
def test_a_resumed_request_gets_what_was_not_handed_out(stage: Stage, peer: bool) -> None:
    """R3: its blocks were filled to 12 by a peer while it was preempted."""
    stage.step("a:[0,1]@0+6")
    stage.step("b:[0,2,3]@4+8", preempted="a")
    got = stage.step("a:[0,2,3,4]@12+2 resumed")["a"]
    assert got == (spelled("a", 12, 14) if peer else "b6 b7 b8 b9 b10 b11 a12 a13")


@beyond("R3")
def test_a_resumed_request_gets_no_row_twice(stage: Stage, peer: bool) -> None:
    """R3: 4 to 9 are computed again; 0 to 7 were handed out."""
    stage.step("a:[0,1]@0+8")
    stage.step("b:[5]@0+1", preempted="a")
    got = stage.step("a:[0,2,3]@4+6 resumed")["a"]
    assert got == ("a4' a5' a6' a7' a8 a9" if peer else "a8 a9")


@beyond("W8")
def test_a_refused_save_makes_its_slots_unreadable(make_stage: MakeStage) -> None:
    """W8: in vLLM-Omni's manager the next hit gets the older tenant's rows: another request's."""
    stage = make_stage(capacity=8)
    stage.step("a:[0,1,2]@0+8")
    assert GENERAL in kinds(refusal(lambda: stage.saved("b:[0,1,3]@0+9", finished="a")))
    saved = stage.saved("c:[0,4]@4+1", finished="b")
    if stage.cache.kind == "peer":  # type: ignore[attr-defined]
        assert saved.materialize()["c"] == "a0 a1 a2 a3 c4"
    elif bare_adapter(stage):
        refusal(saved.materialize)
    else:
        assert {"UnreadableHitError", GENERAL} <= kinds(refusal(saved.materialize))


@beyond("W8")
def test_a_step_that_was_never_saved_makes_its_slots_unreadable(stage: Stage, peer: bool) -> None:
    """W8"""
    stage.step("a:[0]@0+4")
    stage.begin("b:[0]@0+4", finished="a")
    saved = stage.saved("c:[0,1]@4+1", finished="b")
    if peer:
        assert saved.materialize()["c"] == "a0 a1 a2 a3 c4"
    elif bare_adapter(stage):
        refusal(saved.materialize)
    else:
        assert {"UnreadableHitError", GENERAL} <= kinds(refusal(saved.materialize))
