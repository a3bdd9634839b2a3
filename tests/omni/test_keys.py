"""Which outputs are rows and which are passed on, as every manager of vLLM-Omni decides it (docs/semantics.md, K)."""

from __future__ import annotations

import pytest
import torch

from tests.model.steps import HIDDEN, Outputs, Schema, Tensor
from tests.omni.conftest import MakeStage
from tests.omni.values import column, read
from tests.rules.builder import HIDDEN_SCHEMA, Stage, rows_of, spelled


def test_a_tensor_of_the_steps_token_count_becomes_a_key(stage: Stage) -> None:
    """K1, K2"""
    out = stage.step("a:[0]@0+3", "b:[1]@0+2", k=column("1 2 3 4 5"))
    assert (read(out.merged["k"]["a"]), read(out.merged["k"]["b"])) == ("1 2 3", "4 5")


def test_rows_beyond_the_step_are_cut(stage: Stage) -> None:
    """K1: hidden padded to the CUDA-graph size, k not."""
    out = stage.step("a:[0,1]@0+5", padded=8, k=column(1, 5))
    assert (out["a"], read(out.merged["k"]["a"])) == (spelled("a", 0, 5), "1 1 1 1 1")
    assert stage.step("b:[0,2]@4+1", padded=4, k=column(2))["b"] == "a0 a1 a2 a3 b4"


def test_a_key_may_be_padded_where_hidden_is_not(stage: Stage) -> None:
    """K1"""
    stage.begin("a:[0]@0+3")
    out = stage.save_raw(Outputs(rows_of(HIDDEN_SCHEMA, 1, 3), {"k": column("7 8 9 99")}, 3, 4)).materialize()
    assert (read(out.merged["k"]["a"]), len(out.merged[HIDDEN]["a"].rows)) == ("7 8 9", 3)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "int32", "int64", "uint8"])
def test_rows_keep_dtype_and_every_bit(stage: Stage, dtype: str) -> None:
    """K2, H2"""
    size = {"bfloat16": 2, "float16": 2, "float32": 4, "int32": 4, "int64": 8, "uint8": 1}[dtype] * 5
    rows = tuple(bytes((token * 31 + byte * 7) % 251 for byte in range(size)) for token in range(8))
    stage.step("a:[0,1]@0+8", k=Tensor(dtype, (5,), rows))
    tail = Tensor(dtype, (5,), rows[:1])
    assert stage.step("b:[0,1,2]@8+1", k=tail).merged["k"]["b"] == Tensor(dtype, (5,), rows + rows[:1])


def test_hidden_states_may_be_the_models_dtype(make_stage: MakeStage) -> None:
    """K2"""
    stage = make_stage()
    bf16 = Schema("bfloat16", (16,))
    stage.step("a:[0]@0+4", hidden=bf16)
    out = stage.step("b:[0,1]@4+1", hidden=bf16)
    assert (out.merged[HIDDEN]["b"].dtype, len(out.merged[HIDDEN]["b"].rows)) == ("bfloat16", 5)


def test_a_tensor_of_another_first_dimension_goes_whole_to_every_request(stage: Stage) -> None:
    """K4"""
    out = stage.step("a:[0]@0+3", "b:[1]@0+2", ref=column("1 2 3 4 5 6 7"))
    assert [read(out.merged["ref"][req_id]) for req_id in "ab"] == ["1 2 3 4 5 6 7"] * 2


def test_a_leftover_is_never_in_a_hit(stage: Stage) -> None:
    """K4"""
    stage.step("a:[0]@0+4", ref=column("1 2"))
    out = stage.step("b:[0,1]@4+1", ref=column("3 4"))
    assert (out["b"], read(out.merged["ref"]["b"])) == ("a0 a1 a2 a3 b4", "3 4")


def test_a_list_goes_whole_to_every_request(stage: Stage) -> None:
    """K4: also one with an entry a request, which vLLM-Omni's runner splits later."""
    entries = [column("1 2"), column("3"), "text", 7]
    out = stage.step("a:[0]@0+2", "b:[1]@0+2", parts=entries[:2], mixed=entries)
    for req_id in "ab":
        assert [read(entry) for entry in out.merged["parts"][req_id]] == ["1 2", "3"]
        assert out.merged["mixed"][req_id][2:] == ["text", 7]


def test_plain_values_are_passed_on(stage: Stage) -> None:
    """K4"""
    stage.begin("a:[0]@0+2", "b:[1]@0+1")
    out = stage.save_raw(Outputs(None, {"sr": 24000, "name": "x"}, 3, 3)).materialize()
    assert [out.merged[key]["b"] for key in ("sr", "name")] == [24000, "x"]


def test_nested_values_are_copied_at_save(stage: Stage) -> None:
    """K4"""
    out = stage.step("a:[0]@0+2", nested={"ref": column("1 2 3"), "n": 1})
    assert (read(out.merged["nested"]["a"]["ref"]), out.merged["nested"]["a"]["n"]) == ("1 2 3", 1)


def test_leftovers_of_one_request_are_its_own(make_stage: MakeStage) -> None:
    """K4: changing one's copy changes no other's."""
    stage = make_stage()
    stage.step("a:[0]@0+2", "b:[1]@0+2", ref=column("1 2 3"), parts=[column("5"), column("6")])
    out = stage.cache.last.mm_outputs  # type: ignore[attr-defined]
    with torch.inference_mode():
        out["ref"]["a"].fill_(0)
        out["parts"]["a"][0].fill_(0)
    assert (out["ref"]["b"].flatten().tolist(), out["parts"]["b"][0].flatten().tolist()) == ([1, 2, 3], [5])
    stage.cache.held.clear()  # type: ignore[attr-defined]


def test_a_key_that_a_step_does_not_emit_is_not_handed_out_by_it(stage: Stage) -> None:
    """H2"""
    stage.step("a:[0]@0+4", k=column(1, 4))
    assert "k" not in stage.step("b:[0,1]@4+1").merged


def test_without_full_hidden_states_only_keys_are_kept(make_stage: MakeStage) -> None:
    """K5"""
    stage = make_stage(needs_hidden=False)
    stage.step("a:[0]@0+4", k=column("1 2 3 4"))
    out = stage.step("b:[0,1]@4+2", k=column("5 6"))
    assert (out.merged.keys(), read(out.merged["k"]["b"])) == ({"k"}, "1 2 3 4 5 6")
    assert stage.cache.last.hidden_states is None  # type: ignore[attr-defined]


def test_the_reserved_name_is_not_taken_from_the_outputs(stage: Stage) -> None:
    """K2"""
    out = stage.step("a:[0]@0+2", **{HIDDEN: column("8 9")})
    assert out["a"] == "a0 a1"
    assert stage.cache.last.mm_outputs == {}  # type: ignore[attr-defined]


def test_hidden_states_may_be_missing_in_a_step(stage: Stage) -> None:
    """H1"""
    out = stage.step("a:[0]@0+2", hidden=False, k=column("1 2"))
    assert (out["a"], read(out.merged["k"]["a"])) == ("", "1 2")
    assert stage.cache.last.hidden_states is None  # type: ignore[attr-defined]
