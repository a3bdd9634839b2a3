"""The calls of a step, as every manager of vLLM-Omni answers them (docs/semantics.md, S, W1, W2, W6, W7)."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from vllm_omni.core.prefix_cache import StageCacheOutputs

from tests.model.steps import HIDDEN, Outputs, Refused
from tests.omni.conftest import MakeStage
from tests.omni.values import column, read
from tests.rules.builder import HIDDEN_SCHEMA, Stage, refusal, rows_of, spelled

GENERAL = "OmniPrefixCacheUnmatchError"
TIMEOUT = "OmniPrefixCacheStagingTimeoutError"


def kinds(error: Refused | None) -> frozenset[str]:
    return error.kinds if error else frozenset()


def test_a_step_is_consumed_exactly_once(stage: Stage) -> None:
    """S1"""
    first, second = stage.saved("a:[0]@0+2"), stage.saved("a@2+1")
    first.materialize()
    second.discard()
    for consume in (first.materialize, first.discard, second.materialize, second.discard):
        assert GENERAL in kinds(refusal(consume))
    assert GENERAL in kinds(refusal(lambda: stage.cache.discard_step(10_000)))


def test_steps_are_consumed_in_any_order(stage: Stage) -> None:
    """S1"""
    steps = [stage.saved("a:[0]@0+2"), stage.saved("a@2+1"), stage.saved("a@3+1")]
    assert [steps[index].materialize()["a"] for index in (2, 0, 1)] == ["a3", "a0 a1", "a2"]


def test_step_ids_count_up(stage: Stage) -> None:
    """S1"""
    assert [stage.saved(f"a:[0,1]@{first}+1").step_id for first in range(4)] == [1, 2, 3, 4]


def test_an_id_outside_the_batch_is_an_error_that_consumes_the_step(make_stage: MakeStage) -> None:
    """S2"""
    stage = make_stage(depth=1)
    saved = stage.saved("a:[0]@0+2")
    assert GENERAL in kinds(refusal(lambda: saved.materialize("a", "b")))
    assert GENERAL in kinds(refusal(saved.materialize)), "consumed"
    assert stage.step("a@2+1")["a"] == "a2", "its page is free"


def test_the_batch_at_save_counts_not_the_live_one(stage: Stage) -> None:
    """S2"""
    saved = stage.saved("a:[0]@0+2")
    stage.step("a@2+1", "b:[1]@0+1")
    assert GENERAL in kinds(refusal(lambda: saved.materialize("b")))


def test_a_subset_gets_its_rows_and_frees_the_page(make_stage: MakeStage) -> None:
    """S2"""
    stage = make_stage({"staging_claim_timeout_s": 2.0}, depth=2)
    for first in range(8):
        saved = stage.saved(f"a:[0,1]@{first}+1", f"b:[2,3]@{first}+1")
        assert saved.materialize("b").merged.keys() == {HIDDEN}


def test_ids_come_in_the_order_asked_for(stage: Stage) -> None:
    """S2"""
    saved = stage.saved("a:[0]@0+2", "b:[1]@0+1", "c:[2]@0+1", k=column(1, 4))
    out = saved.materialize("c", "a")
    assert (out["a"], out["c"], out["b"]) == ("a0 a1", "c0", "")
    assert list(out.merged["k"]) == ["c", "a"]


def test_rows_of_a_discarded_step_are_kept(stage: Stage) -> None:
    """S1"""
    stage.saved("a:[0,1]@0+8", k=column(3, 8)).discard()
    out = stage.step("b:[0,1,2]@8+1", k=column(4))
    assert (out["b"], read(out.merged["k"]["b"])) == (spelled("a", 0, 8) + " b8", "3 3 3 3 3 3 3 3 4")


def test_a_step_without_tokens_is_legal(stage: Stage) -> None:
    """S4: leftovers of it are handed out, and there are no hidden states."""
    stage.step("a:[0]@0+2")
    stage.begin()
    saved = stage.save_raw(Outputs(None, {"ref": column("1 2")}, 0, 0))
    assert saved.materialize().merged == {}
    assert stage.cache.last.hidden_states is None
    assert stage.step("a@2+1")["a"] == "a2"


def test_a_request_with_no_tokens_gets_no_rows(stage: Stage) -> None:
    """S4"""
    stage.step("a:[0]@0+2")
    out = stage.step("a@2+0 idle", "b:[1]@0+3", k=column(1, 3))
    assert (out["a"], out["b"], read(out.merged["k"]["a"])) == ("", "b0 b1 b2", "")


def test_rows_are_copied_before_the_live_buffers_change(stage: Stage) -> None:
    """W1: the harness spoils every live buffer right after the save."""
    saved = [stage.saved(f"a:[0,1]@{first}+1", k=column(first + 1)) for first in range(3)]
    assert [step.materialize()["a"] for step in saved] == ["a0", "a1", "a2"]
    stage.step("a@3+1", "b:[2]@0+1", k=column("9 9"))
    assert read(stage.step("c:[0,3]@4+1", k=column(5)).merged["k"]["c"]) == "1 2 3 9 5"


def test_rows_handed_out_never_change(stage: Stage) -> None:
    """S3: the fixture looks at every tensor at its end; here everything is written over meanwhile."""
    late = stage.saved("a:[0,1]@0+8", k=column(3, 8))
    for turn in range(6):
        stage.step(f"b{turn}:[0,1,2]@0+8", finished=f"b{turn - 1}" if turn else "a", k=column(turn, 8))
    out = late.materialize()
    assert (out["a"], read(out.merged["k"]["a"])) == (spelled("a", 0, 8), " ".join("3" * 8))


def test_a_full_house_waits_then_names_what_is_open(make_stage: MakeStage) -> None:
    """W2"""
    stage = make_stage({"staging_claim_timeout_s": 0.2}, depth=2)
    kept = [stage.saved("a:[0]@0+1"), stage.saved("a@1+1")]
    started = time.monotonic()
    error = refusal(lambda: stage.saved("a@2+1"))
    assert {TIMEOUT, GENERAL} <= kinds(error)
    assert 0.15 < time.monotonic() - started < 5.0
    assert str([step.step_id for step in kept]) in str(error)
    assert [step.materialize()["a"] for step in kept] == ["a0", "a1"]
    assert stage.step("a@3+1")["a"] == "a3", "the next step works"


def test_a_waiting_save_goes_on_when_a_step_is_consumed(make_stage: MakeStage) -> None:
    """W2"""
    stage = make_stage({"staging_claim_timeout_s": 10.0}, depth=1)
    kept = stage.saved("a:[0]@0+1")
    timer = threading.Timer(0.2, kept.discard)
    timer.start()
    assert stage.step("a@1+1")["a"] == "a1"
    timer.join()


def test_a_step_with_only_leftovers_claims_a_page(make_stage: MakeStage) -> None:
    """W2"""
    stage = make_stage({"staging_claim_timeout_s": 0.1}, depth=1)
    kept = stage.saved(hidden=False, ref=column("1 2"))
    assert TIMEOUT in kinds(refusal(lambda: stage.saved("a:[0]@0+1")))
    kept.discard()
    assert stage.step("b:[1]@0+1")["b"] == "b0"


def test_a_step_larger_than_a_page_is_refused(make_stage: MakeStage) -> None:
    """W6, W7"""
    stage = make_stage({"staging_claim_timeout_s": 1.0}, capacity=8, depth=1)
    for turn in range(3):
        assert GENERAL in kinds(refusal(lambda turn=turn: stage.saved(f"a{turn}:[0,1,2]@0+9")))
    assert stage.step("d:[5]@0+2")["d"] == "d0 d1"


@pytest.mark.parametrize("claimed", [1, 3])
def test_slots_that_do_not_cover_the_step_are_refused(stage: Stage, claimed: int) -> None:
    """W6: the batch schedules 2 tokens."""
    stage.step("a:[0,1]@0+2")
    stage.begin("a@2+2")
    outputs = Outputs(rows_of(HIDDEN_SCHEMA, 1, claimed), {}, claimed, claimed)
    assert GENERAL in kinds(refusal(lambda: stage.save_raw(outputs)))
    assert stage.step("a@4+1")["a"] == "a4"


def test_a_position_beyond_the_block_table_is_refused(stage: Stage) -> None:
    """W6"""
    stage.begin("a:[0]@0+2")
    stage.cache.batch.num_computed_tokens_cpu[0] = 64 * 4 - 1  # type: ignore[attr-defined]
    outputs = Outputs(rows_of(HIDDEN_SCHEMA, 1, 2), {}, 2, 2)
    assert GENERAL in kinds(refusal(lambda: stage.save_raw(outputs)))


def test_results_are_of_vllm_omnis_type(stage: Stage) -> None:
    stage.step("a:[0]@0+2", k=column("1 2"))
    out: Any = stage.cache.last  # type: ignore[attr-defined]
    assert type(out) is StageCacheOutputs
    assert type(out.hidden_states) is dict
    assert out.hidden_states["a"].device.type == "cpu"
    assert out.hidden_states["a"].shape == (2, 3)
    assert out.mm_outputs["k"]["a"].dtype is torch.int64


def test_a_step_without_outputs_beside_hidden_has_none(stage: Stage) -> None:
    stage.begin("a:[0]@0+2")
    step_id = stage.save_raw(Outputs(rows_of(HIDDEN_SCHEMA, 1, 2), {}, 2, 2)).step_id
    assert stage.cache.materialize(step_id, ["a"]).keys() == {HIDDEN}
    assert stage.cache.last.mm_outputs == {}  # type: ignore[attr-defined]


def test_materialize_on_another_thread_while_the_engine_goes_on(make_stage: MakeStage) -> None:
    """W1, H8: one step behind, as with async output; each hit's slots get a new tenant meanwhile."""
    stage = make_stage(depth=4)
    stage.step("w:[0,1]@0+8", k=column(7, 8))
    wrong: list[str] = []
    previous: threading.Thread | None = None
    for turn in range(30):
        writer, reader = f"w{turn}", f"r{turn}"
        gone = f"w{turn - 1} r{turn - 1}" if turn else "w"
        saved = stage.saved(f"{writer}:[0,1]@0+8", f"{reader}:[0,1,2]@8+1", finished=gone, k=column(turn, 9))

        def consume(saved=saved, writer=writer, reader=reader) -> None:
            got = saved.materialize()[reader]
            if got != spelled(writer, 0, 8) + f" {reader}8":
                wrong.append(got)

        thread = threading.Thread(target=consume)
        thread.start()
        if previous is not None:
            previous.join()
        previous = thread
    assert previous is not None
    previous.join()
    assert wrong == []


def test_shutdown_twice_does_nothing(make_stage: MakeStage) -> None:
    stage = make_stage()
    stage.step("a:[0]@0+2")
    stage.cache.manager.shutdown()  # type: ignore[attr-defined]
    stage.cache.manager.shutdown()  # type: ignore[attr-defined]
