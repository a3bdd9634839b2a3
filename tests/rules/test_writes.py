"""Rules W: how rows get into the pools, and what holds when they do not."""

from __future__ import annotations

import time

import pytest

from tests.model.steps import Outputs, Refused
from tests.rules.builder import HIDDEN_SCHEMA, WIDE, Stage, kinds, numbers, refusal, rows_of, spelled


def test_rows_are_copied_before_the_live_buffers_change(stage: Stage) -> None:
    """W1: the adapter spoils every live buffer right after save."""
    saved = [stage.saved(f"a:[0,1]@{first}+1", k=first + 1) for first in range(3)]
    assert [step.materialize()["a"] for step in saved] == ["a0", "a1", "a2"]
    assert stage.step("a@3+1", "b:[2]@0+1", k=9).numbers("a") == "9"
    assert stage.step("c:[0,3]@4+1", k=5).numbers("c") == "1 2 3 9 5"


def test_a_full_house_waits_and_then_names_what_is_open(make_stage) -> None:
    """W2"""
    stage = make_stage({"staging_claim_timeout_s": 0.2}, depth=2)
    kept = [stage.saved("a:[0]@0+1"), stage.saved("a@1+1")]
    started = time.monotonic()
    error = refusal(lambda: stage.saved("a@2+1"))
    assert kinds(error) == {"StagingTimeoutError"}
    if stage.real:
        assert 0.15 < time.monotonic() - started < 5.0
        assert error is not None
        assert sorted(error.__cause__.unconsumed) == [step.step_id for step in kept]  # type: ignore[union-attr]
        assert hasattr(error.__cause__, "outstanding")
    assert [step.materialize()["a"] for step in kept] == ["a0", "a1"]
    assert stage.step("a@3+1")["a"] == "a3", "the next step works"
    assert kinds(refusal(stage.saved("b:[0,1]@4+1").materialize)) == {"UnreadableHitError"}, "W8: slot 2 is lost"


def test_a_step_with_only_leftovers_claims_a_page(make_stage) -> None:
    """W2"""
    stage = make_stage({"staging_claim_timeout_s": 0.1}, depth=1)
    kept = stage.saved(hidden=False, ref=numbers([1, 2]))
    assert kinds(refusal(lambda: stage.saved("a:[0]@0+1"))) == {"StagingTimeoutError"}
    kept.discard()
    assert stage.step("b:[1]@0+1")["b"] == "b0"


def test_pages_are_used_again_and_again(stage: Stage) -> None:
    """W2"""
    for first in range(40):
        assert stage.step(f"a:[0,1,2,3,4,5,6,7,8,9]@{first}+1")["a"] == f"a{first}"


@pytest.mark.parametrize("budget", [1 << 20, 64])
def test_deferred_rows_are_flushed_by_a_hit_however_many_pieces_they_are_in(make_stage, budget: int) -> None:
    """W3: with a byte budget of 64 each step's rows push out those before, so a hit reads pool and clone."""
    stage = make_stage({"gpu_staging_bytes": budget}, deferred=frozenset({"k"}))
    for first in range(0, 12, 3):
        stage.step(f"a:[0,1,2]@{first}+3", k=f"{first} {first + 1} {first + 2}")
    out = stage.step("b:[0,1,2,3]@12+1", "a:[0,1,2,4]@12+1", k=77)
    assert out.numbers("b") == " ".join(map(str, range(12))) + " 77"
    stage.step("a@13+3", "b@13+1", k="1 2 3 4")
    assert stage.step("c:[0,1,2,4,5]@16+1", k=9).numbers("c") == " ".join(map(str, range(12))) + " 77 1 2 3 9"


def test_a_late_flush_never_overwrites_a_new_tenant(make_stage) -> None:
    """W3: a's rows are still open when b takes its block, in the step that carries the finish and after it."""
    stage = make_stage(deferred=frozenset({"k"}))
    stage.step("a:[0,1]@0+8", k=1)
    stage.step("b:[1]@0+4", finished="a", k=2)
    stage.step("c:[0]@0+4", finished="b", k=3)
    assert stage.step("d:[0,1,2]@8+1", k=4).numbers("d") == "3 3 3 3 2 2 2 2 4"


def test_a_late_flush_never_fills_a_tenant_without_the_key(make_stage) -> None:
    """W3, H5: the new tenant wrote no k, so it reads zeros."""
    stage = make_stage(deferred=frozenset({"k"}))
    stage.step("a:[0]@0+4", k=1)
    stage.step("b:[0]@0+4", preempted="a")
    assert stage.step("c:[0,1]@4+1", k=2).numbers("c") == "0 0 0 0 2"


def test_a_step_larger_than_a_page_is_refused(make_stage) -> None:
    """W6, W8: its slots are lost, the older tenant's rows do not show."""
    stage = make_stage(capacity=8)
    stage.step("a:[0,1,2]@0+8")
    assert kinds(refusal(lambda: stage.saved("b:[0,1,3]@0+9", finished="a"))) == {"StepTooLargeError"}
    assert kinds(refusal(stage.saved("c:[0,4]@4+1").materialize)) == {"UnreadableHitError"}
    assert stage.step("d:[5]@0+2")["d"] == "d0 d1"


@pytest.mark.parametrize("claimed", [1, 3])
def test_slots_that_do_not_cover_the_step_are_refused(stage: Stage, claimed: int) -> None:
    """W6: the batch schedules 2 tokens."""
    stage.step("a:[0,1]@0+2")
    stage.begin("a@2+2")
    outputs = Outputs(rows_of(HIDDEN_SCHEMA, 1, claimed), {}, claimed, claimed)
    assert kinds(refusal(lambda: stage.save_raw(outputs))) == {"SlotMismatchError"}
    assert kinds(refusal(stage.saved("b:[0,2]@4+1").materialize)) == {"UnreadableHitError"}
    assert stage.step("a@4+1")["a"] == "a4"


def test_a_refused_save_leaves_no_page_behind(make_stage) -> None:
    """W7"""
    stage = make_stage({"staging_claim_timeout_s": 2.0}, capacity=8, depth=2)
    for round_ in range(6):
        too_large = refusal(lambda r=round_: stage.saved(f"a{r}:[0,1,2]@0+9"))
        assert kinds(too_large) == {"StepTooLargeError"}
        bad = stage.saved("w:[5]@0+1", finished=f"a{round_} w", hidden=WIDE)
        assert kinds(refusal(bad.materialize)) == {"SchemaMismatchError"}
    kept = [stage.saved("b:[7]@0+1"), stage.saved("b@1+1")]
    assert [step.materialize()["b"] for step in kept] == ["b0", "b1"]


def test_a_step_that_was_not_saved_is_lost(stage: Stage) -> None:
    """W8: no save at all before the next new_step_starts; the older tenant wrote these slots."""
    stage.step("a:[0,1]@0+8", k=1)
    stage.begin("b:[0]@0+4", finished="a")
    assert kinds(refusal(stage.saved("c:[0,2]@4+1", k=2).materialize)) == {"UnreadableHitError"}
    assert stage.step("d:[1,0]@0+8", finished="c b", k=3)["d"] == spelled("d", 0, 8)
    assert stage.step("e:[1,0,3]@8+1", k=4)["e"] == spelled("d", 0, 8) + " e8"


def test_a_same_step_hit_of_a_step_that_was_not_saved_is_lost(stage: Stage) -> None:
    """W8, H6: the engine had published the hashes."""
    stage.step("old:[0,1]@0+8")
    stage.begin("a:[0,1]@0+8", "b:[0,1,2]@8+1", finished="old")
    assert kinds(refusal(stage.saved("c:[0,1,3]@8+1").materialize)) == {"UnreadableHitError"}


def test_a_lost_decode_token_is_missing_from_later_hits_only(stage: Stage) -> None:
    """W8: the request itself goes on."""
    stage.step("a:[0,1]@0+6")
    stage.begin("a@6+1")
    assert stage.step("a@7+1")["a"] == "a7"
    assert kinds(refusal(stage.saved("b:[0,1,2]@8+1").materialize)) == {"UnreadableHitError"}
    assert stage.step("c:[0,3]@4+1")["c"] == "a0 a1 a2 a3 c4"


def test_lost_slots_are_lost_for_every_key(stage: Stage) -> None:
    """W8, W9: also for a key that the lost step's tenant never wrote."""
    stage.step("a:[0]@0+4")
    stage.begin("b:[0]@0+4", finished="a")
    stage.step("w:[9]@0+4", k=1)
    assert kinds(refusal(stage.saved("c:[0,1]@4+1", hidden=False, k=2).materialize)) == {"UnreadableHitError"}


def test_a_lost_slot_is_readable_once_it_is_written_again(stage: Stage) -> None:
    """W8, W9"""
    stage.begin("a:[0]@0+4")
    stage.step("b:[0]@0+4", finished="a")
    assert stage.step("c:[0,1]@4+1")["c"] == "b0 b1 b2 b3 c4"


def test_a_refused_begin_loses_its_slots_too(stage: Stage) -> None:
    """W8, H3"""
    stage.step("a:[0]@0+4")
    with pytest.raises(Refused):
        stage.begin("c:[5]@0+2", "b:[0]@3+1", finished="a")
    assert kinds(refusal(stage.saved("d:[0,1]@4+1", finished="b c").materialize)) == {"UnreadableHitError"}


@pytest.mark.parametrize(
    ("last", "hidden", "other"),
    [
        ("never", "error", "error"),
        ("lost", "error", "error"),
        ("refused key", "row", "error"),
        ("without the key", "row", "0"),
        ("older epoch", "error", "error"),
        ("written", "row", "2"),
    ],
)
def test_presence_is_what_the_last_writer_left(stage: Stage, last: str, hidden: str, other: str) -> None:
    """W9: of slot 0, read by hidden and by key k; an older tenant wrote both, except where nobody did."""
    stage.step("w:[9]@0+3", k=1)
    if last != "never":
        stage.step("a:[0]@0+4", k=1)
    if last == "lost":
        stage.begin("b:[0]@0+4", finished="a")
    elif last == "refused key":
        refusal(stage.saved("b:[0]@0+4", finished="a", k=rows_of(WIDE, 1, 4)).materialize)
    elif last == "without the key":
        stage.step("b:[0]@0+4", finished="a")
    elif last == "older epoch":
        stage.cache.reset()
    elif last == "written":
        stage.step("b:[0]@0+4", finished="a", k=2)
    hidden_step = stage.saved("c:[0,1]@4+1")
    if hidden == "row":
        assert hidden_step.materialize()["c"].split()[0] in ("b0", "a0")
    else:
        assert kinds(refusal(hidden_step.materialize)) == {"UnreadableHitError"}
    key_step = stage.saved("d:[0,2]@4+1", hidden=False, k=5)
    if other == "error":
        assert kinds(refusal(key_step.materialize)) == {"UnreadableHitError"}
    else:
        assert key_step.materialize().numbers("d").split()[0] == other
