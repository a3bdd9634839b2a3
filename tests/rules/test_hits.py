"""Rules H: what a prefix hit gets."""

from __future__ import annotations

import pytest

from tests.model.steps import Refused
from tests.rules.builder import Stage, kinds, refusal, spelled

ZEROS = " ".join("0" * 4)


def test_a_miss_gets_exactly_this_steps_rows(stage: Stage) -> None:
    """H1"""
    stage.step("a:[0,1]@0+6")
    out = stage.step("a@6+1", "b:[2]@0+3")
    assert (out["a"], out["b"]) == ("a6", "b0 b1 b2")


def test_a_hit_gets_prefix_and_tail_in_position_order(stage: Stage) -> None:
    """H2: blocks in any order, hidden and each key."""
    stage.step("a:[6,1,4]@0+12", k=" ".join(map(str, range(12))))
    out = stage.step("b:[6,1,4,2]@12+3", "a:[6,1,4,3]@12+1", k="70 71 72 80")
    assert out["b"] == spelled("a", 0, 12) + " b12 b13 b14"
    assert out.numbers("b") == " ".join(map(str, range(12))) + " 70 71 72"
    assert (out["a"], out.numbers("a")) == ("a12", "80")


def test_chunks_of_one_prefill_make_one_prefix(stage: Stage) -> None:
    """H2"""
    for first, count in ((0, 3), (3, 2), (5, 6)):
        stage.step(f"a:[0,1,2]@{first}+{count}")
    assert stage.step("b:[0,1,3]@8+1")["b"] == spelled("a", 0, 8) + " b8"


def test_a_later_chunk_of_a_hit_request_gets_its_own_rows_alone(stage: Stage) -> None:
    """H1, H2"""
    stage.step("a:[0]@0+4")
    assert stage.step("b:[0,1,2]@4+2")["b"] == "a0 a1 a2 a3 b4 b5"
    assert stage.step("b@6+3")["b"] == "b6 b7 b8"


def test_many_hits_in_one_step(stage: Stage) -> None:
    """H2"""
    stage.step("a:[0,1]@0+8")
    terms = [f"r{i}:[0,{1 if i % 2 else i + 4},{i + 8}]@{8 if i % 2 else 4}+2" for i in range(6)]
    out = stage.step(*terms)
    for i in range(6):
        hit = 8 if i % 2 else 4
        assert out[f"r{i}"] == spelled("a", 0, hit) + f" r{i}{hit} r{i}{hit + 1}"


@pytest.mark.parametrize("term", ["b:[0,1]@3+2", "b:[0]@8+2", "b:[]@4+1"])
def test_a_hit_must_be_aligned_and_covered(stage: Stage, term: str) -> None:
    """H3"""
    stage.step("a:[0,1]@0+8")
    with pytest.raises(Refused) as error:
        stage.begin(term)
    assert error.value.kinds == {"HitNotCoveredError"}


@pytest.mark.parametrize("flavour", ["resumed", "again"])
def test_a_resumed_hit_must_be_aligned(stage: Stage, flavour: str) -> None:
    """H3: in both runners' ways to resume."""
    stage.step("a:[0,1]@0+8")
    stage.step("b:[5]@0+1", preempted="a")
    with pytest.raises(Refused) as error:
        stage.begin(f"a:[0,1]@6+2 {flavour}")
    assert error.value.kinds == {"HitNotCoveredError"}


def test_a_continuation_may_carry_any_number(stage: Stage) -> None:
    """H3"""
    stage.saved("a:[0,1]@0+7").discard()
    assert stage.step("a:[0,1,2]@7+3 again")["a"] == spelled("a", 0, 10)


def test_the_cache_goes_on_after_a_bad_hit(stage: Stage) -> None:
    """H3, W8"""
    stage.step("a:[0,1]@0+8")
    with pytest.raises(Refused):
        stage.begin("b:[0,1,5]@9+2")
    assert stage.step("c:[0,1,2]@8+1", finished="b")["c"] == spelled("a", 0, 8) + " c8"


def test_hidden_rows_that_nobody_wrote_are_fatal(stage: Stage) -> None:
    """H4"""
    saved = stage.saved("b:[3,4]@4+2")
    error = refusal(saved.materialize)
    assert kinds(error) == {"UnreadableHitError"}
    if stage.real:
        assert all(word in str(error) for word in ("request b", "__hidden_states__", "slots 12 to 15")), str(error)


def test_a_fatal_hit_frees_the_page(make_stage) -> None:
    """H4"""
    stage = make_stage({"staging_claim_timeout_s": 2.0}, depth=2)
    for _ in range(5):
        saved = stage.saved("b:[3,4]@4+2", finished="b")
        assert kinds(refusal(saved.materialize)) == {"UnreadableHitError"}
    assert stage.step("a:[0]@0+2")["a"] == "a0 a1"


def test_hidden_rows_of_a_tenant_without_hidden_are_fatal(stage: Stage) -> None:
    """H4: ABSENT"""
    stage.step("a:[0]@0+4")
    stage.step("b:[0]@0+4", finished="a", hidden=False, k=1)
    saved = stage.saved("c:[0,1]@4+2", k=2)
    assert kinds(refusal(saved.materialize)) == {"UnreadableHitError"}


def test_other_requests_of_the_step_may_be_taken_without_the_fatal_one(stage: Stage) -> None:
    """H4, S2: the error belongs to the request whose hit it is."""
    stage.step("a:[0]@0+4")
    saved = stage.saved("b:[3,4]@4+2", "c:[0,1]@4+1")
    assert saved.materialize("c")["c"] == "a0 a1 a2 a3 c4"


def test_a_key_that_is_younger_than_the_prefix_reads_zeros(stage: Stage) -> None:
    """H5"""
    stage.step("a:[0]@0+4")
    assert stage.step("b:[0,1]@4+2", k="6 7").numbers("b") == f"{ZEROS} 6 7"


def test_a_partly_written_key_reads_zeros_only_where_it_was_not(stage: Stage) -> None:
    """H5"""
    stage.step("a:[0,1]@0+2", k="1 2")
    stage.step("a@2+3")
    stage.step("a@5+3", k="6 7 8")
    assert stage.step("b:[0,1,2]@8+1", k=9).numbers("b") == "1 2 0 0 0 6 7 8 9"


def test_a_hit_on_blocks_that_the_step_itself_writes(stage: Stage) -> None:
    """H6"""
    stage.step("old:[0,1]@0+8", k=1)
    out = stage.step("a:[0,1]@0+8", "b:[0,1,2]@8+2", finished="old", k="2 2 2 2 2 2 2 2 3 3")
    assert (out["b"], out.numbers("b")) == (spelled("a", 0, 8) + " b8 b9", "2 2 2 2 2 2 2 2 3 3")


def test_a_hit_partly_of_old_and_partly_of_this_steps_rows(stage: Stage) -> None:
    """H6: whatever the order of the batch."""
    stage.step("w:[0]@0+4")
    out = stage.step("b:[0,1,2]@8+1", "a:[0,1]@4+4")
    assert out["b"] == "w0 w1 w2 w3 a4 a5 a6 a7 b8"
    assert out["a"] == "w0 w1 w2 w3 a4 a5 a6 a7"


def test_a_same_step_hit_on_a_deferred_key(make_stage) -> None:
    """H6, W3"""
    stage = make_stage(deferred=frozenset({"k"}))
    out = stage.step("a:[0,1]@0+8", "b:[0,1,2]@8+1", k="1 2 3 4 5 6 7 8 9")
    assert out.numbers("b") == "1 2 3 4 5 6 7 8 9"


def test_a_hit_without_computed_tokens_yields_its_span(stage: Stage) -> None:
    """H7: beside others, and alone in a step without tokens."""
    stage.step("a:[0,1]@0+8", k=1)
    out = stage.step("b:[0,1]@8+0", "a:[0,1,2]@8+1", k=2)
    assert (out["b"], out.numbers("b")) == (spelled("a", 0, 8), "1 1 1 1 1 1 1 1")
    assert stage.step("c:[0]@4+0", hidden=False)["c"] == spelled("a", 0, 4)
    assert stage.step("c:[0,3]@4+1")["c"] == "c4"


def test_late_materialize_gets_the_original_rows(stage: Stage) -> None:
    """H8: the slots of the hit have two new tenants by then."""
    stage.step("a:[0,1]@0+8", k=1)
    late = stage.saved("b:[0,1,2]@8+2", k=2)
    stage.step("c:[0,1]@0+8", finished="a b", k=3)
    stage.step("d:[1,0]@0+8", finished="c", k=4)
    out = late.materialize()
    assert (out["b"], out.numbers("b")) == (spelled("a", 0, 8) + " b8 b9", "1 1 1 1 1 1 1 1 2 2")


def test_late_same_step_hits_get_the_original_rows(stage: Stage) -> None:
    """H8, H6"""
    late = stage.saved("a:[0,1]@0+8", "b:[0,1,2]@8+1")
    stage.step("c:[0,1,2]@0+9", finished="a b")
    assert late.materialize()["b"] == spelled("a", 0, 8) + " b8"


def test_late_hits_on_deferred_keys_get_the_original_rows(make_stage) -> None:
    """H8, W3"""
    stage = make_stage(deferred=frozenset({"k"}))
    stage.step("a:[0,1]@0+8", k=1)
    late = stage.saved("b:[0,1,2]@8+1", k=2)
    stage.step("c:[0,1]@0+8", finished="a b", k=3)
    assert late.materialize().numbers("b") == "1 1 1 1 1 1 1 1 2"


def test_reuse_in_the_output_that_carries_the_finish(stage: Stage) -> None:
    """H9: finish, hit on the finished request's blocks, and their reuse, in one output."""
    stage.step("a:[0,1]@0+8")
    out = stage.step("c:[1,3]@0+5", "b:[0,2]@4+2", finished="a")
    assert out["b"] == "a0 a1 a2 a3 b4 b5"
    assert out["c"] == "c0 c1 c2 c3 c4"
    assert stage.step("d:[1,4]@4+1")["d"] == "c0 c1 c2 c3 d4"


def test_reuse_in_the_output_that_carries_the_preemption(make_stage) -> None:
    """H9: the preempted request's open deferred rows do not land on the new tenant."""
    stage = make_stage(deferred=frozenset({"k"}))
    stage.step("a:[0,1]@0+8", k=1)
    stage.step("b:[1]@0+4", preempted="a", k=2)
    assert stage.step("c:[0,1,2]@8+1", k=3).numbers("c") == "1 1 1 1 2 2 2 2 3"
