"""What random sequences found in the real client, shrunk: each failed there once."""

from __future__ import annotations

from tests.model.steps import HIDDEN
from tests.rules.builder import Stage, kinds, numbers, refusal, spelled


def test_a_step_without_hidden_states_hands_out_none_beside_a_hit(stage: Stage) -> None:
    """H2, H4: the tail of the hit's extent held old bytes."""
    stage.step("w:[0]@0+4", k=1)
    out = stage.step("c:[0,1]@4+2", hidden=False, k=2)
    assert (HIDDEN in out.merged, out.numbers("c")) == (False, "1 1 1 1 2 2")


def test_an_unreadable_hit_below_what_a_comeback_handed_out_is_no_error(stage: Stage) -> None:
    """R3, H4: nothing of the older step is to be handed out any more."""
    older = stage.saved("c:[3,4]@4+2", "d:[6]@0+1")
    stage.step("w:[7]@0+1", preempted="c")
    assert stage.step("c:[5]@0+3 resumed")["c"] == "c0 c1 c2"
    out = older.materialize()
    assert (out["c"], out["d"]) == ("", "d0")


def test_an_unreadable_hit_below_what_was_delivered_is_no_error(stage: Stage) -> None:
    """R3, H4"""
    stage.step("a:[0,1]@0+8")
    stage.begin("x:[0]@0+4", preempted="a")
    assert stage.step("a:[0,1,2]@8+2 resumed", finished="x")["a"] == "a8 a9"


def test_an_unreadable_hit_of_an_open_step_is_no_error_once_that_is_handed_out(stage: Stage) -> None:
    """R3, H4: planned while the first step was open, its slots lost since, its own rows taken from its page."""
    first = stage.saved("a:[0,1]@0+8")
    stage.begin("x:[1]@0+4", preempted="a")
    second = stage.saved("a:[0,1,2]@8+2 resumed", finished="x")
    assert first.materialize()["a"] == spelled("a", 0, 8)
    assert second.materialize()["a"] == "a8 a9"


def test_a_request_without_tokens_does_not_move_what_was_delivered(stage: Stage) -> None:
    """R3, S4"""
    stage.saved("a:[0,1]@0+8").discard()
    assert stage.step("a@8+0 idle", "w:[7]@0+1")["a"] == ""
    stage.step("w@1+1", preempted="a")
    assert stage.step("a:[0,1,2]@8+2 resumed")["a"] == spelled("a", 0, 10)


def test_a_key_may_be_demoted_in_a_step_with_hits(stage: Stage) -> None:
    """K1: the daemon ended the session, since a gather still named the closed key."""
    stage.step("a:[0]@0+4")
    stage.step("a:[0,1]@4+1", per_request="7")
    out = stage.step("b:[0,2]@4+3", "c:[0,3]@4+1", per_request="8 9")
    assert (out["b"], out.key("per_request", "b")) == ("a0 a1 a2 a3 b4 b5 b6", "8 9")
    assert out["c"] == "a0 a1 a2 a3 c4"
    assert stage.step("d:[0,4]@4+1")["d"] == "a0 a1 a2 a3 d4"


def test_a_step_without_tokens_demotes_nothing(stage: Stage) -> None:
    """K1, S4: it says nothing about the shape of a key."""
    stage.step("a:[0]@0+3")
    stage.step("a@3+1", k=1)
    stage.step("a@4+0 idle", hidden=False, k=numbers([5]))
    assert stage.step("b:[0,1]@4+2", k=2).numbers("b") == "0 0 0 1 2 2"


def test_the_engine_may_lose_and_rewrite_a_block_between_two_hits_on_it(stage: Stage) -> None:
    """W8, W9"""
    stage.step("a:[0]@0+4")
    stage.begin("b:[0]@0+4", finished="a")
    assert kinds(refusal(stage.saved("c:[0,1]@4+1").materialize)) == {"UnreadableHitError"}
    stage.step("d:[0]@0+4", finished="b c")
    assert stage.step("e:[0,1]@4+1")["e"] == "d0 d1 d2 d3 e4"
