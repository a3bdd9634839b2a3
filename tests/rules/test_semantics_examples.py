"""The examples of docs/semantics.md, word for word."""

from __future__ import annotations

from tests.rules.builder import Stage, spelled


def test_notation_of_a_hit(stage: Stage) -> None:
    """H2, H3: `a:[0,1]@8+2 hit 8` is request a with blocks 0 and 1, first position 8, 2 tokens, 8 from the cache."""
    stage.step("w:[0,1]@0+8")
    assert stage.step("a:[0,1,2]@8+2", finished="w")["a"] == spelled("w", 0, 8) + " a8 a9"


def test_positions_whose_tenant_did_not_write_the_key_read_zeros(stage: Stage) -> None:
    """H5: `a:[0] writes k=5; b takes block 0, no k; c:[0,1]@4+2 hit 4, k=9` gives k of c = 0,0,0,0,9,9."""
    stage.step("a:[0]@0+4", k=5)
    stage.step("b:[0]@0+4", finished="a")
    assert stage.step("c:[0,1]@4+2", finished="b", k=9).numbers("c") == "0 0 0 0 9 9"


def test_deferred_keys_read_zeros_too_where_the_tenant_did_not_write_them(make_stage) -> None:
    """H5: the same with a deferred key."""
    stage = make_stage(deferred=frozenset({"k"}))
    stage.step("a:[0]@0+4", k=5)
    stage.step("b:[0]@0+4", finished="a")
    assert stage.step("c:[0,1]@4+2", finished="b", k=9).numbers("c") == "0 0 0 0 9 9"


def test_continuation_below_what_was_delivered_replays_from_its_first_position(stage: Stage) -> None:
    """R3: `a@0+8 delivered, again @8+4` gives 8..11."""
    assert stage.step("a:[0,1]@0+8")["a"] == spelled("a", 0, 8)
    assert stage.step("a:[0,1,2]@8+4 again")["a"] == spelled("a", 8, 12)


def test_resume_with_a_peers_rows_hands_out_what_is_missing(stage: Stage) -> None:
    """R3: `a@0+6 delivered, blocks filled to 12 by a peer, resumed hit 12 @12+2` gives 6..13."""
    assert stage.step("a:[0,1]@0+6")["a"] == spelled("a", 0, 6)
    stage.step("p:[4,5,6]@0+12", preempted="a")
    assert stage.step("a:[4,5,6,7]@12+2 resumed")["a"] == spelled("p", 6, 12) + " a12 a13"


def test_resume_after_delivery_hands_out_only_the_new_and_saves_all(stage: Stage) -> None:
    """R3: `a@0+8 delivered, preempted, resumed hit 4 @4+6` gives 8, 9 and saves 4..9."""
    assert stage.step("a:[0,1]@0+8")["a"] == spelled("a", 0, 8)
    stage.step("b:[1]@0+4", preempted="a")
    assert stage.step("a:[0,2,3]@4+6 resumed")["a"] == "a8 a9"
    reader = stage.step("r:[0,2,3,4]@8+2")
    assert reader["r"] == "a0 a1 a2 a3 a4' a5' a6' a7' r8 r9"


def test_discarded_rows_come_with_the_resume(stage: Stage) -> None:
    """R3: `a@0+8 discarded, resumed hit 8 @8+2` gives 0..9."""
    stage.saved("a:[0,1]@0+8").discard()
    stage.step("b:[5]@0+1", preempted="a")
    assert stage.step("a:[0,1,2]@8+2 resumed")["a"] == spelled("a", 0, 10)
