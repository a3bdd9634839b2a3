"""Rules R: requests over time."""

from __future__ import annotations

import pytest

from tests.rules.builder import Stage, kinds, refusal, spelled


@pytest.mark.parametrize("end", ["finished", "preempted"])
def test_open_writes_land_when_the_request_ends(make_stage, end: str) -> None:
    """R1: its hashes entered a batch, so others may hit its rows; finish and abort look alike."""
    stage = make_stage(deferred=frozenset({"k"}))
    stage.step("a:[0,1]@0+6", k=1)
    stage.step("a@6+2", k=2)
    stage.step("b:[2]@0+1", k=3, **{end: "a"})
    out = stage.step("c:[0,1,3]@8+1", k=4)
    assert (out["c"], out.numbers("c")) == (spelled("a", 0, 8) + " c8", "1 1 1 1 1 1 2 2 4")


def test_an_unconsumed_step_of_a_finished_request_is_still_handed_out(stage: Stage) -> None:
    """R1, S3"""
    late = stage.saved("a:[0]@0+3")
    stage.step("b:[0]@0+3", finished="a")
    assert late.materialize()["a"] == "a0 a1 a2"


def test_an_id_may_finish_and_start_anew_in_one_step(stage: Stage) -> None:
    """R2: the new request of that name hits the old one's rows and gets them all."""
    stage.step("a:[0,1]@0+6")
    assert stage.step("a:[0,2]@4+3", finished="a")["a"] == "a0 a1 a2 a3 a4' a5' a6"


def test_a_late_step_of_the_old_name_does_not_move_the_new_one(stage: Stage) -> None:
    """R2, R3"""
    old = stage.saved("a:[0,1]@0+8")
    new = stage.saved("a:[2]@0+2", finished="a")
    assert old.materialize()["a"] == spelled("a", 0, 8)
    assert new.materialize()["a"] == "a0' a1'"
    stage.step("b:[5]@0+1", preempted="a")
    assert stage.step("a:[2,3]@0+6 resumed")["a"] == "a2' a3' a4' a5'"


def test_ids_left_out_of_a_subset_do_not_move(stage: Stage) -> None:
    """R3"""
    stage.saved("a:[0]@0+4", "b:[1]@0+4").materialize("b")
    stage.step("c:[5]@0+1", preempted="a b")
    out = stage.step("a:[0,2]@4+1 resumed", "b:[1,3]@4+1 resumed")
    assert (out["a"], out["b"]) == ("a0 a1 a2 a3 a4", "b4")


def test_a_failed_materialize_hands_out_nothing(stage: Stage) -> None:
    """R3, H4: the other requests of the call keep what they had not been given."""
    saved = stage.saved("a:[0]@0+4", "b:[7,8]@4+1")
    assert kinds(refusal(saved.materialize)) == {"UnreadableHitError"}
    stage.step("c:[5]@0+1", preempted="a", finished="b")
    assert stage.step("a:[0,2]@4+1 resumed")["a"] == "a0 a1 a2 a3 a4"


def test_rows_computed_again_below_what_was_delivered_are_not_repeated(stage: Stage) -> None:
    """R3: a resume without any hit, in two chunks."""
    stage.step("a:[0,1]@0+6")
    stage.step("b:[2]@0+1", preempted="a")
    assert stage.step("a:[3,4]@0+4 resumed")["a"] == ""
    assert stage.step("a@4+4")["a"] == "a6 a7"
    assert stage.step("r:[3,4,5]@8+1")["r"] == "a0' a1' a2' a3' a4' a5' a6 a7 r8", "all of them are saved"


def test_a_resume_in_the_v2_runner_is_a_new_request_that_lives(stage: Stage) -> None:
    """R3: preempted_req_ids says so."""
    stage.step("a:[0,1]@0+8")
    stage.step("b:[2]@0+1", preempted="a")
    assert stage.step("a:[0,3,4]@4+6 again")["a"] == "a8 a9"


def test_without_preemption_positions_from_the_first_on_are_new(stage: Stage) -> None:
    """R3: delivered_upto becomes min(delivered_upto, c)."""
    stage.step("a:[0,1]@0+8")
    assert stage.step("a:[0,1,2]@4+6 again")["a"] == "a4' a5' a6' a7' a8 a9"


def test_exchanged_blocks_make_a_replaced_prompt(stage: Stage) -> None:
    """R3: delivered_upto becomes 0."""
    stage.step("w:[4,5]@0+8")
    stage.step("a:[0,1]@0+8")
    assert stage.step("a:[4,5,6]@8+1 again")["a"] == spelled("w", 0, 8) + " a8"


def test_exchanged_blocks_beyond_the_hit_do_not_matter(stage: Stage) -> None:
    """R3: only those within [0, c)."""
    stage.step("a:[0,1]@0+6")
    assert stage.step("a:[0,7]@4+3 again")["a"] == "a4' a5' a6"


def test_a_replaced_prompt_is_not_clipped_by_a_late_step_of_the_old(stage: Stage) -> None:
    """R3"""
    stage.step("w:[4,5]@0+8")
    old = stage.saved("a:[0,1]@0+8")
    new = stage.saved("a:[4,5,6]@8+1 again")
    assert old.materialize()["a"] == spelled("a", 0, 8)
    assert new.materialize()["a"] == spelled("w", 0, 8) + " a8"


def test_an_unconsumed_step_is_not_handed_out_twice(stage: Stage) -> None:
    """R3: planned while the first step was open, clipped when it is not any more."""
    first = stage.saved("a:[0,1]@0+8")
    stage.step("b:[5]@0+1", preempted="a")
    second = stage.saved("a:[0,1,2]@8+2 resumed")
    assert first.materialize()["a"] == spelled("a", 0, 8)
    assert second.materialize()["a"] == "a8 a9"


def test_an_unconsumed_step_that_is_discarded_comes_with_the_resume(stage: Stage) -> None:
    """R3: the plan covered the widest range."""
    first = stage.saved("a:[0,1]@0+8")
    stage.step("b:[5]@0+1", preempted="a")
    second = stage.saved("a:[0,1,2]@8+2 resumed")
    first.discard()
    assert second.materialize()["a"] == spelled("a", 0, 10)


def test_an_older_step_consumed_after_its_resume_gets_nothing_twice(stage: Stage) -> None:
    """R3, S1"""
    first = stage.saved("a:[0,1]@0+8")
    stage.step("b:[5]@0+1", preempted="a")
    second = stage.saved("a:[0,1,2]@8+2 resumed")
    assert second.materialize()["a"] == spelled("a", 0, 10)
    assert first.materialize()["a"] == ""


def test_an_ordinary_continuation_never_replays_what_was_discarded(stage: Stage) -> None:
    """R3"""
    stage.saved("a:[0]@0+3").discard()
    assert stage.step("a:[0,1]@3+2")["a"] == "a3 a4"
    stage.step("b:[5]@0+1", preempted="a")
    assert stage.step("a:[0,1]@4+2 resumed")["a"] == "a5", "delivered_upto is 5"


def test_delivery_is_of_the_request_not_of_a_key(stage: Stage) -> None:
    """R3, H5: a key that skipped steps reads zeros there, over the same positions."""
    stage.step("a:[0,1]@0+2", k=1)
    stage.saved("a@2+4").discard()
    stage.step("b:[5]@0+1", preempted="a")
    assert stage.step("a:[0,3]@4+3 resumed", k="7 8 9").numbers("a") == "0 0 7 8 9"


def test_many_preemptions_hand_out_every_position_once(stage: Stage) -> None:
    """R3"""
    got = [stage.step("a:[0,1,2]@0+5")["a"]]
    for hit, count in ((0, 7), (4, 6), (8, 4)):
        stage.step(f"b{hit}:[5]@0+1", preempted="a")
        got.append(stage.step(f"a:[0,1,2]@{hit}+{count} resumed")["a"])
    names = " ".join(got).replace("'", "").split()
    assert names == [f"a{position}" for position in range(12)]


def test_a_slot_written_twice_keeps_the_later_row(stage: Stage) -> None:
    """R4: one request after its preemption, on the same blocks."""
    stage.step("a:[0,1]@0+6")
    stage.step("b:[2]@0+1", preempted="a")
    stage.step("a:[0,1]@4+4 resumed")
    assert stage.step("c:[0,1,3]@8+1")["c"] == "a0 a1 a2 a3 a4' a5' a6 a7 c8"


def test_nothing_saved_before_a_reset_is_readable_after(stage: Stage) -> None:
    """R5"""
    stage.step("a:[0]@0+4", k=1)
    stage.cache.reset()
    assert kinds(refusal(stage.saved("b:[0,1]@4+1", k=2).materialize)) == {"UnreadableHitError"}
    stage.step("c:[0]@0+4", k=3)
    out = stage.step("d:[0,2]@4+1", k=4)
    assert (out["d"], out.numbers("d")) == ("c0 c1 c2 c3 d4", "3 3 3 3 4")


def test_an_epoch_that_travels_with_the_scheduler_output_counts_from_its_step_on(stage: Stage) -> None:
    """R5"""
    stage.step("a:[0]@0+4")
    stage.begin("b:[0,1]@4+1", new_epoch=True)
    assert kinds(refusal(stage.save().materialize)) == {"UnreadableHitError"}
    stage.step("c:[0]@0+4", finished="a b")
    assert stage.step("d:[0,1]@4+1")["d"] == "c0 c1 c2 c3 d4"


def test_steps_saved_before_a_reset_are_handed_out_as_they_were(stage: Stage) -> None:
    """R5, S3: with their hits."""
    stage.step("a:[0]@0+4")
    late = stage.saved("b:[0,1]@4+1")
    stage.cache.reset()
    assert late.materialize()["b"] == "a0 a1 a2 a3 b4"


def test_open_deferred_rows_do_not_survive_a_reset(make_stage) -> None:
    """R5, W3"""
    stage = make_stage(deferred=frozenset({"k"}))
    stage.step("a:[0]@0+4", k=1)
    stage.cache.reset()
    stage.step("w:[9]@0+1", finished="a", k=1)
    assert kinds(refusal(stage.saved("b:[0,1]@4+1", k=2).materialize)) == {"UnreadableHitError"}


def test_a_request_lives_through_a_reset(stage: Stage) -> None:
    """R5: what was delivered stays delivered; its rows from then on are readable."""
    stage.step("a:[0]@0+3")
    stage.cache.reset()
    assert stage.step("a@3+1")["a"] == "a3"
    assert kinds(refusal(stage.saved("b:[0,1]@4+1").materialize)) == {"UnreadableHitError"}
