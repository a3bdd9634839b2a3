"""What a prefix hit gets, as every manager of vLLM-Omni answers it (docs/semantics.md, H, R1, R2, R4)."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.model.steps import HIDDEN, Outputs, Refused
from tests.omni.conftest import MakeStage
from tests.omni.test_calls import GENERAL, kinds
from tests.omni.values import column, read
from tests.rules.builder import HIDDEN_SCHEMA, Stage, refusal, rows_of, spelled


def test_a_miss_gets_exactly_this_steps_rows(stage: Stage) -> None:
    """H1"""
    stage.step("a:[0,1]@0+6")
    out = stage.step("a@6+1", "b:[2]@0+3")
    assert (out["a"], out["b"]) == ("a6", "b0 b1 b2")


def test_a_hit_gets_prefix_and_tail_in_position_order(stage: Stage) -> None:
    """H2: blocks in any order, hidden and each key."""
    stage.step("a:[6,1,4]@0+12", k=column(" ".join(map(str, range(12)))))
    out = stage.step("b:[6,1,4,2]@12+3", "a:[6,1,4,3]@12+1", k=column("70 71 72 80"))
    assert out["b"] == spelled("a", 0, 12) + " b12 b13 b14"
    assert read(out.merged["k"]["b"]) == " ".join(map(str, range(12))) + " 70 71 72"
    assert (out["a"], read(out.merged["k"]["a"])) == ("a12", "80")


def test_chunks_of_one_prefill_make_one_prefix(stage: Stage) -> None:
    """H2"""
    for first, count in ((0, 3), (3, 2), (5, 6)):
        stage.step(f"a:[0,1,2]@{first}+{count}", k=column(first, count))
    out = stage.step("b:[0,1,3]@8+1", k=column(9))
    assert (out["b"], read(out.merged["k"]["b"])) == (spelled("a", 0, 8) + " b8", "0 0 0 3 3 5 5 5 9")


def test_a_later_chunk_of_a_hit_request_gets_its_own_rows_alone(stage: Stage) -> None:
    """H1, H2"""
    stage.step("a:[0]@0+4")
    assert stage.step("b:[0,1,2]@4+2")["b"] == "a0 a1 a2 a3 b4 b5"
    assert stage.step("b@6+3")["b"] == "b6 b7 b8"


def test_hits_follow_each_other_through_many_owners(stage: Stage) -> None:
    """H2: each turn hits what the turn before wrote."""
    stage.step("t0:[0]@0+4", k=column(0, 4))
    for turn in range(1, 6):
        blocks = ",".join(map(str, range(turn + 1)))
        stage.step(f"t{turn}:[{blocks}]@{4 * turn}+4", finished=f"t{turn - 1}", k=column(turn, 4))
    out = stage.step("z:[0,1,2,3,4,5,6]@24+1", finished="t5", k=column(9))
    assert out["z"] == " ".join(spelled(f"t{turn}", 4 * turn, 4 * turn + 4) for turn in range(6)) + " z24"
    assert read(out.merged["k"]["z"]) == " ".join(str(turn) for turn in range(6) for _ in range(4)) + " 9"


def test_many_hits_in_one_step(stage: Stage) -> None:
    """H2"""
    stage.step("a:[0,1]@0+8")
    out = stage.step(*[f"r{i}:[0,{1 if i % 2 else i + 4},{i + 8}]@{8 if i % 2 else 4}+2" for i in range(6)])
    for i in range(6):
        hit = 8 if i % 2 else 4
        assert out[f"r{i}"] == spelled("a", 0, hit) + f" r{i}{hit} r{i}{hit + 1}"


@pytest.mark.parametrize("blocks", [[0, 1, 2], ([0, 1, 2],), [[0, 1, 2], [7, 7, 7]]])
def test_block_ids_may_be_flat_or_one_list_a_group(stage: Stage, blocks: object) -> None:
    """H2: of several groups the first counts."""
    stage.step("a:[0,1]@0+8")
    outputs = stage.cache.outputs  # type: ignore[attr-defined]
    made = outputs.of

    def of(step: object) -> SimpleNamespace:
        output = made(step)
        output.scheduled_new_reqs[0].block_ids = blocks
        return output

    outputs.of = of
    assert stage.step("b:[0,1,2]@8+1", finished="a")["b"] == spelled("a", 0, 8) + " b8"


@pytest.mark.parametrize("term", ["b:[0,1]@3+2", "b:[]@4+1"])
def test_a_hit_must_be_aligned_and_have_blocks(stage: Stage, term: str) -> None:
    """H3"""
    stage.step("a:[0,1]@0+8")
    with pytest.raises(Refused) as error:
        stage.begin(term)
    assert GENERAL in error.value.kinds


def test_the_next_step_works_after_a_bad_hit(stage: Stage) -> None:
    """H3"""
    stage.step("a:[0,1]@0+8")
    with pytest.raises(Refused):
        stage.begin("b:[0,1,5]@9+2")
    assert stage.step("c:[0,1,2]@8+1", finished="b")["c"] == spelled("a", 0, 8) + " c8"


def test_hidden_rows_that_nobody_wrote_are_fatal(stage: Stage) -> None:
    """H4"""
    saved = stage.saved("b:[3,4]@4+2")
    error = refusal(saved.materialize)
    assert GENERAL in kinds(error)
    assert "b" in str(error)
    assert HIDDEN in str(error)
    assert GENERAL in kinds(refusal(saved.materialize)), "it was consumed"


def test_a_fatal_hit_frees_the_page(make_stage: MakeStage) -> None:
    """H4"""
    stage = make_stage({"staging_claim_timeout_s": 2.0}, depth=2)
    for _ in range(5):
        assert GENERAL in kinds(refusal(stage.saved("b:[3,4]@4+2", finished="b").materialize))
    assert stage.step("a:[0]@0+2")["a"] == "a0 a1"


def test_others_may_be_taken_without_the_fatal_one(stage: Stage) -> None:
    """H4, S2"""
    stage.step("a:[0]@0+4")
    assert stage.saved("b:[3,4]@4+2", "c:[0,1]@4+1").materialize("c")["c"] == "a0 a1 a2 a3 c4"


def test_a_key_that_is_younger_than_the_prefix_reads_zeros(stage: Stage) -> None:
    """H5"""
    stage.step("a:[0]@0+4")
    assert read(stage.step("b:[0,1]@4+2", k=column("6 7")).merged["k"]["b"]) == "0 0 0 0 6 7"


def test_a_partly_written_key_reads_zeros_only_where_it_was_not(stage: Stage) -> None:
    """H5"""
    stage.step("a:[0,1]@0+2", k=column("1 2"))
    stage.step("a@2+3")
    stage.step("a@5+3", k=column("6 7 8"))
    assert read(stage.step("b:[0,1,2]@8+1", k=column(9)).merged["k"]["b"]) == "1 2 0 0 0 6 7 8 9"


def test_a_hit_on_blocks_that_the_step_itself_writes(stage: Stage) -> None:
    """H6: an older tenant's rows are there meanwhile."""
    stage.step("old:[0,1]@0+8", k=column(1, 8))
    out = stage.step("a:[0,1]@0+8", "b:[0,1,2]@8+2", finished="old", k=column("2 2 2 2 2 2 2 2 3 3"))
    assert (out["b"], read(out.merged["k"]["b"])) == (spelled("a", 0, 8) + " b8 b9", "2 2 2 2 2 2 2 2 3 3")


def test_a_hit_partly_of_old_and_partly_of_this_steps_rows(stage: Stage) -> None:
    """H6: whatever the order of the batch."""
    stage.step("w:[0]@0+4")
    out = stage.step("b:[0,1,2]@8+1", "a:[0,1]@4+4")
    assert (out["b"], out["a"]) == ("w0 w1 w2 w3 a4 a5 a6 a7 b8", "w0 w1 w2 w3 a4 a5 a6 a7")


def test_a_same_step_hit_on_a_key_seen_for_the_first_time(stage: Stage) -> None:
    """H6"""
    out = stage.step("a:[0,1]@0+8", "b:[0,1,2]@8+1", k=column("1 2 3 4 5 6 7 8 9"))
    assert read(out.merged["k"]["b"]) == "1 2 3 4 5 6 7 8 9"


def test_a_hit_without_computed_tokens_yields_its_span(stage: Stage) -> None:
    """H7"""
    stage.step("a:[0,1]@0+8", k=column(1, 8))
    out = stage.step("b:[0,1]@8+0", "a:[0,1,2]@8+1", k=column(2))
    assert (out["b"], read(out.merged["k"]["b"])) == (spelled("a", 0, 8), "1 1 1 1 1 1 1 1")


def test_late_materialize_gets_the_original_rows(stage: Stage) -> None:
    """H8: the slots of the hit have two new tenants by then."""
    stage.step("a:[0,1]@0+8", k=column(1, 8))
    late = stage.saved("b:[0,1,2]@8+2", k=column(2, 2))
    stage.step("c:[0,1]@0+8", finished="a b", k=column(3, 8))
    stage.step("d:[1,0]@0+8", finished="c", k=column(4, 8))
    out = late.materialize()
    assert (out["b"], read(out.merged["k"]["b"])) == (spelled("a", 0, 8) + " b8 b9", "1 1 1 1 1 1 1 1 2 2")


def test_late_same_step_hits_get_the_original_rows(stage: Stage) -> None:
    """H6, H8"""
    late = stage.saved("a:[0,1]@0+8", "b:[0,1,2]@8+1")
    stage.step("c:[0,1,2]@0+9", finished="a b")
    assert late.materialize()["b"] == spelled("a", 0, 8) + " b8"


def test_a_block_may_be_reused_in_the_step_that_carries_the_finish(stage: Stage) -> None:
    """H9"""
    stage.step("a:[0,1]@0+8")
    assert stage.step("b:[0,2]@4+3", "c:[1]@0+4", finished="a")["b"] == spelled("a", 0, 4) + " b4 b5 b6"
    assert stage.step("d:[1,3]@4+1", finished="b c")["d"] == spelled("c", 0, 4) + " d4"


def test_rows_of_an_aborted_request_are_kept(stage: Stage) -> None:
    """R1: finish and abort are told alike."""
    stage.saved("a:[0,1]@0+8").discard()
    stage.step(finished="a", hidden=False)
    assert stage.step("b:[0,1,2]@8+1")["b"] == spelled("a", 0, 8) + " b8"


def test_an_id_may_finish_and_start_again_in_one_step(stage: Stage) -> None:
    """R2: the new start hits what the old one wrote."""
    stage.step("a:[0,1]@0+8")
    stage.begin("a:[0,2]@4+2", finished="a")
    step_id = stage.save_raw(Outputs(rows_of(HIDDEN_SCHEMA, 1, 2), {}, 2, 2)).step_id
    rows = stage.cache.materialize(step_id, ["a"])[HIDDEN]["a"].rows
    assert [stage.names.get(row, "new") for row in rows] == ["a0", "a1", "a2", "a3", "new", "new"]


def test_a_slot_written_twice_keeps_the_later_row(stage: Stage) -> None:
    """R4"""
    stage.step("a:[0]@0+4", k=column(1, 4))
    stage.step("b:[0]@0+4", finished="a", k=column(2, 4))
    out = stage.step("c:[0,1]@4+1", finished="b", k=column(3))
    assert (out["c"], read(out.merged["k"]["c"])) == ("b0 b1 b2 b3 c4", "2 2 2 2 3")


def test_rows_of_the_shifted_prefix_would_be_seen(stage: Stage) -> None:
    """The control: what these tests compare is not equal by chance."""
    stage.step("a:[0,1]@0+8")
    assert stage.step("b:[0,1,2]@8+1")["b"] != spelled("a", 1, 9) + " b8"
