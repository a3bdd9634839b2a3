"""Rules S and K: the calls of a step, and what of its outputs is cached."""

from __future__ import annotations

import pytest

from tests.model.steps import HIDDEN, Outputs, Refused, Schema, Tensor
from tests.rules.builder import HIDDEN_SCHEMA, WIDE, Stage, kinds, numbers, refusal, rows_of, spelled


def test_a_step_is_consumed_exactly_once(stage: Stage) -> None:
    """S1"""
    first = stage.saved("a:[0]@0+2")
    second = stage.saved("a@2+1")
    first.materialize()
    second.discard()
    for consume in (first.materialize, first.discard, second.materialize, second.discard):
        assert kinds(refusal(consume)) == {"StepConsumedError"}
    assert kinds(refusal(lambda: stage.cache.discard_step(10_000))) == {"StepConsumedError"}


def test_steps_are_consumed_in_any_order(stage: Stage) -> None:
    """S1"""
    steps = [stage.saved("a:[0]@0+2"), stage.saved("a@2+1"), stage.saved("a@3+1")]
    assert [steps[i].materialize()["a"] for i in (2, 0, 1)] == ["a3", "a0 a1", "a2"]


def test_an_id_outside_the_batch_is_an_error(stage: Stage) -> None:
    """S2"""
    saved = stage.saved("a:[0]@0+2")
    assert kinds(refusal(lambda: saved.materialize("a", "b"))) == {"UnknownRequestError"}


def test_a_request_of_the_live_batch_alone_is_an_error(stage: Stage) -> None:
    """S2: the batch at save time counts, not the one of now."""
    saved = stage.saved("a:[0]@0+2")
    stage.step("a@2+1", "b:[1]@0+1")
    assert kinds(refusal(lambda: saved.materialize("b"))) == {"UnknownRequestError"}


def test_a_subset_frees_the_page(make_stage) -> None:
    """S2"""
    stage = make_stage({"staging_claim_timeout_s": 2.0}, depth=2)
    for first in range(8):
        saved = stage.saved(f"a:[0,1]@{first}+1", f"b:[2,3]@{first}+1")
        assert saved.materialize("b")["b"] == f"b{first}"


def test_rows_handed_out_never_change(stage: Stage) -> None:
    """S3: the fixture holds every tensor until its end; here everything is written over meanwhile."""
    late = stage.saved("a:[0,1]@0+8", k=3)
    for round_ in range(6):
        stage.step(f"b{round_}:[0,1,2]@0+8", finished=f"b{round_ - 1}" if round_ else "a", k=round_)
    out = late.materialize()
    assert (out["a"], out.numbers("a")) == (spelled("a", 0, 8), " ".join("3" * 8))


def test_a_step_without_tokens_is_legal(stage: Stage) -> None:
    """S4"""
    stage.step("a:[0]@0+2")
    assert stage.step(hidden=False).merged == {}
    assert stage.step("a@2+1")["a"] == "a2"


def test_a_request_with_no_tokens_gets_no_rows(stage: Stage) -> None:
    """S4"""
    stage.step("a:[0]@0+2")
    out = stage.step("a@2+0 idle", "b:[1]@0+3", k=1)
    assert (out["a"], out["b"], out.numbers("a")) == ("", "b0 b1 b2", "")


def test_a_negative_count_with_a_hit_is_an_error(stage: Stage) -> None:
    """S4"""
    stage.step("a:[0,1]@0+8")
    with pytest.raises(Refused):
        stage.saved("b:[0,1]@8+-1")


def test_a_negative_count_without_a_hit_counts_as_none(stage: Stage) -> None:
    """S4"""
    stage.step("a:[0]@0+2")
    out = stage.step("b:[1]@0+-1", "a@2+2")
    assert (out["a"], out["b"]) == ("a2 a3", "")


def test_rows_beyond_the_step_are_cut(stage: Stage) -> None:
    """K1: padded hidden states beside an unpadded key."""
    out = stage.step("a:[0,1]@0+5", padded=8, k=1)
    assert (out["a"], out.numbers("a")) == (spelled("a", 0, 5), "1 1 1 1 1")
    assert stage.step("b:[0,2]@4+1", padded=4, k=2)["b"] == "a0 a1 a2 a3 b4"


def test_a_key_may_be_padded_where_hidden_is_not(stage: Stage) -> None:
    """K1: n_pad is 4, hidden has 3 rows and k 4."""
    stage.begin("a:[0]@0+3")
    hidden = rows_of(HIDDEN_SCHEMA, 1, 3)
    out = stage.save_raw(Outputs(hidden, {"k": numbers([7, 8, 9, 99])}, 3, 4)).materialize()
    assert (out.numbers("a"), len(out.merged[HIDDEN]["a"].rows)) == ("7 8 9", 3)


def test_a_per_request_tensor_is_demoted_at_its_first_mismatch(stage: Stage) -> None:
    """K1: in pure decode it looks per-token; the prefill that follows shows that it is not."""
    stage.step("a:[0]@0+3", "b:[1]@0+3")
    out = stage.step("a@3+1", "b@3+1", k="5 6")
    assert (out.numbers("a"), out.numbers("b")) == ("5", "6")
    out = stage.step("a:[0,2]@4+1", "b:[1,3]@4+1", "c:[4]@0+4", k="7 8 9")
    assert [out.numbers(r) for r in "abc"] == ["7 8 9"] * 3
    out = stage.step("a@5+1", "b@5+1", "c:[4,5]@4+1", k="1 2 3")
    assert [out.numbers(r) for r in "abc"] == ["1 2 3"] * 3, "leftover for good, also where the shape fits again"


def test_a_demoted_key_is_not_in_hits(stage: Stage) -> None:
    """K1: its pool is gone."""
    stage.step("a:[0]@0+3")
    stage.step("a@3+1", k="5")
    stage.step("a:[0,1]@4+3", k="6")
    out = stage.step("b:[0,2]@4+2", k="7 8")
    assert (out["b"], out.numbers("b")) == ("a0 a1 a2 a3 b4 b5", "7 8")


def test_a_step_saved_before_the_demotion_keeps_its_result(stage: Stage) -> None:
    """K1: what comes out does not depend on when it is asked for."""
    stage.step("a:[0]@0+3", "b:[1]@0+3")
    late = stage.saved("a@3+1", "b@3+1", k="5 6")
    stage.step("c:[4]@0+4", "a:[0,2]@4+1", k="7 8")
    assert (late.materialize().numbers("a"),) == ("5",)


def test_a_provisional_key_is_confirmed_by_a_step_that_tells_them_apart(stage: Stage) -> None:
    """K1: from then on a mismatch is refused."""
    stage.step("a:[0]@0+3")
    stage.step("a@3+1", k=4)
    assert stage.step("b:[1]@0+3", k="5 6 7").numbers("b") == "5 6 7"
    saved = stage.saved("b:[1,2]@3+2", k="1 2 3 4")
    assert kinds(refusal(saved.materialize)) == {"SchemaMismatchError"}


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [("int64", ()), ("bool", ()), ("uint8", (5,)), ("float32", (2, 3)), ("bfloat16", (2, 2, 2)), ("bfloat16", (1,))],
)
def test_any_trailing_shape_and_dtype_is_cached(stage: Stage, dtype: str, shape: tuple[int, ...]) -> None:
    """K2: 1-D and 3-D too."""
    schema = Schema(dtype, shape)
    fill = 1
    stage.step("a:[0,1]@0+6", k=rows_of(schema, fill, 6))
    out = stage.step("b:[0,2]@4+2", k=rows_of(schema, 0, 2)).merged["k"]["b"]
    assert out == Tensor(dtype, shape, rows_of(schema, fill, 4).rows + rows_of(schema, 0, 2).rows)


def test_a_declared_global_key_is_never_cut(make_stage) -> None:
    """K2: although its first dimension equals the token count."""
    stage = make_stage(roles={"g": "global"})
    out = stage.step("a:[0]@0+2", "b:[1]@0+2", g="1 2 3 4")
    assert [out.key("g", r) for r in "ab"] == ["1 2 3 4"] * 2
    out = stage.step("c:[2]@0+3", g="1 2 3 4")
    assert out.key("g", "c") == "1 2 3 4"


def test_a_declared_token_key_is_not_provisional(make_stage) -> None:
    """K1, K2: first seen in decode, and still refused at a mismatch."""
    stage = make_stage(roles={"k": "token"})
    stage.step("a:[0]@0+3")
    stage.step("a@3+1", k=4)
    saved = stage.saved("a:[0,1]@4+3", k="1 2 3 4 5")
    assert kinds(refusal(saved.materialize)) == {"SchemaMismatchError"}


@pytest.mark.parametrize("schema", [WIDE, Schema("float16", (3,)), Schema("float32", (3, 1))])
def test_another_width_or_dtype_is_refused_for_that_key_alone(stage: Stage, schema: Schema) -> None:
    """K3: hidden is refused; k lands; the error comes at materialize; the next step works."""
    stage.step("a:[0]@0+4", k=1)
    saved = stage.saved("a:[0,1,2]@4+4", hidden=schema, k=2)
    error = refusal(saved.materialize)
    assert kinds(error) == {"SchemaMismatchError"}
    assert stage.step("a@8+2", k=3).numbers("a") == "3 3"
    unread = stage.saved("b:[0,1,3]@8+1", k=4)
    assert kinds(refusal(unread.materialize)) == {"UnreadableHitError"}
    assert stage.step("c:[0,4]@4+1", k=5)["c"] == "a0 a1 a2 a3 c4"


def test_a_refused_key_leaves_hidden_and_other_keys(stage: Stage) -> None:
    """K3"""
    stage.step("a:[0]@0+4", k=1, other=1)
    saved = stage.saved("a:[0,1]@4+4", k=rows_of(WIDE, 1, 4), other=2)
    assert kinds(refusal(saved.materialize)) == {"SchemaMismatchError"}
    out = stage.step("b:[0,1,2]@8+1", other=3)
    assert (out["b"], out.key("other", "b")) == (spelled("a", 0, 8) + " b8", "1 1 1 1 2 2 2 2 3")
    unread = stage.saved("c:[0,1,3]@8+1", k=4)
    assert kinds(refusal(unread.materialize)) == {"UnreadableHitError"}, "its slots are UNKNOWN"


def test_a_refused_key_never_shows_the_older_tenant(stage: Stage) -> None:
    """K3"""
    stage.step("a:[0]@0+4", k=1)
    saved = stage.saved("b:[0]@0+4", finished="a", k=rows_of(WIDE, 1, 4))
    refusal(saved.materialize)
    unread = stage.saved("c:[0,1]@4+1", k=4)
    assert kinds(refusal(unread.materialize)) == {"UnreadableHitError"}


def test_the_schema_error_names_both_shapes(stage: Stage) -> None:
    """K3"""
    stage.step("a:[0]@0+4")
    saved = stage.saved("a:[0,1]@4+2", hidden=WIDE)
    error = refusal(saved.materialize)
    assert error is not None
    if stage.real:
        assert all(word in str(error) for word in ("(3,)", "5", HIDDEN)), str(error)


def test_leftovers_reach_every_request_whole(stage: Stage) -> None:
    """K4: a tensor of another first dimension, a nested value, a plain value."""
    table = rows_of(Schema("float32", (2,)), 3, 9)
    nested = {"inner": table, "note": "x"}
    out = stage.step("a:[0]@0+2", "b:[1]@0+3", ref=table, nested=nested, rate=2.5).merged
    for req_id in "ab":
        assert out["ref"][req_id] == table
        assert out["nested"][req_id] == nested
        assert out["rate"][req_id] == 2.5


def test_a_list_with_an_entry_a_request_is_handed_out_by_batch_index(stage: Stage) -> None:
    """K4: a list of another length goes out whole."""
    entries = [numbers([1, 2]), numbers([3])]
    out = stage.step("a:[0]@0+2", "b:[1]@0+3", each=entries, all=[*entries, numbers([4])]).merged
    assert (out["each"]["a"], out["each"]["b"]) == (entries[0], entries[1])
    assert out["all"]["a"] == out["all"]["b"] == [*entries, numbers([4])]


def test_leftovers_are_not_merged_with_a_hit(stage: Stage) -> None:
    """K4: never in the pool."""
    stage.step("a:[0]@0+4", ref=numbers(range(9)))
    out = stage.step("b:[0,1]@4+2", ref=numbers(range(7)))
    assert (out["b"], out.key("ref", "b")) == ("a0 a1 a2 a3 b4 b5", "0 1 2 3 4 5 6")


def test_leftovers_are_copied_at_save(stage: Stage) -> None:
    """K4, S3: the adapter spoils the live buffers right after save."""
    late = stage.saved("a:[0]@0+2", ref=numbers([4, 5, 6]))
    stage.step("b:[1]@0+2", ref=numbers([7, 8, 9]))
    assert late.materialize().key("ref", "a") == "4 5 6"


def test_deferred_rows_are_handed_out_in_their_step(make_stage) -> None:
    """K4"""
    stage = make_stage(deferred=frozenset({"k"}))
    late = stage.saved("a:[0]@0+3", k="1 2 3")
    stage.step("a@3+1", k=4)
    assert late.materialize().numbers("a") == "1 2 3"


def test_a_policy_without_hidden_states_neither_saves_nor_merges_them(make_stage) -> None:
    """K5"""
    stage = make_stage(needs_hidden=False, schemas={})
    stage.step("a:[0]@0+4", k=1)
    out = stage.step("b:[0,1]@4+2", k=2)
    assert (HIDDEN in out.merged, out.numbers("b")) == (False, "1 1 1 1 2 2")
