"""Keys whose rows wait on the device until a request ends, as every manager of vLLM-Omni keeps them
(docs/semantics.md, W3).
"""

from __future__ import annotations

import pytest

from tests.omni.conftest import MakeStage
from tests.omni.values import column, read
from tests.rules.builder import Stage

DEFERRED = frozenset({"k"})


@pytest.fixture
def deferring(make_stage: MakeStage) -> Stage:
    return make_stage(deferred=DEFERRED)


def test_this_steps_rows_are_handed_out(deferring: Stage) -> None:
    """K4"""
    out = deferring.step("a:[0]@0+3", "b:[1]@0+2", k=column("1 2 3 4 5"))
    assert (read(out.merged["k"]["a"]), read(out.merged["k"]["b"])) == ("1 2 3", "4 5")


def test_a_hit_after_the_finish(deferring: Stage) -> None:
    """W3, R1"""
    deferring.step("a:[0,1]@0+8", k=column("1 2 3 4 5 6 7 8"))
    deferring.step("z:[9]@0+1", finished="a", k=column(0))
    assert read(deferring.step("b:[0,1,2]@8+1", k=column(9)).merged["k"]["b"]) == "1 2 3 4 5 6 7 8 9"


def test_a_hit_in_the_step_that_carries_the_finish(deferring: Stage) -> None:
    """W3, H9"""
    deferring.step("a:[0,1]@0+8", k=column("1 2 3 4 5 6 7 8"))
    out = deferring.step("b:[0,1,2]@8+1", finished="a", k=column(9))
    assert read(out.merged["k"]["b"]) == "1 2 3 4 5 6 7 8 9"


@pytest.mark.parametrize("budget", [1 << 20, 64])
def test_a_hit_on_rows_still_open(make_stage: MakeStage, budget: int) -> None:
    """W3: over several steps; with 64 bytes each step's rows push out those before."""
    stage = make_stage({"gpu_staging_bytes": budget}, deferred=DEFERRED)
    for first in range(0, 12, 3):
        stage.step(f"a:[0,1,2]@{first}+3", k=column(f"{first} {first + 1} {first + 2}"))
    out = stage.step("b:[0,1,2,3]@12+1", "a:[0,1,2,4]@12+1", k=column("77 77"))
    assert read(out.merged["k"]["b"]) == " ".join(map(str, range(12))) + " 77"
    stage.step("a@13+3", "b@13+1", k=column("1 2 3 4"))
    out = stage.step("c:[0,1,2,4,5]@16+1", k=column(9))
    assert read(out.merged["k"]["c"]) == " ".join(map(str, range(12))) + " 77 1 2 3 9"


def test_a_same_step_hit(deferring: Stage) -> None:
    """H6, W3"""
    out = deferring.step("a:[0,1]@0+8", "b:[0,1,2]@8+1", k=column("1 2 3 4 5 6 7 8 9"))
    assert read(out.merged["k"]["b"]) == "1 2 3 4 5 6 7 8 9"


def test_a_late_flush_never_overwrites_a_new_tenant(deferring: Stage) -> None:
    """W3: a's rows are open when b takes its block in the step that carries the finish."""
    deferring.step("a:[0,1]@0+8", k=column(1, 8))
    deferring.step("b:[1]@0+4", finished="a", k=column(2, 4))
    deferring.step("c:[0]@0+4", finished="b", k=column(3, 4))
    assert read(deferring.step("d:[0,1,2]@8+1", k=column(4)).merged["k"]["d"]) == "3 3 3 3 2 2 2 2 4"


def test_late_materialize_gets_the_original_rows(deferring: Stage) -> None:
    """H8, W3"""
    deferring.step("a:[0,1]@0+8", k=column(1, 8))
    late = deferring.saved("b:[0,1,2]@8+1", k=column(2))
    deferring.step("c:[0,1]@0+8", finished="a b", k=column(3, 8))
    assert read(late.materialize().merged["k"]["b"]) == "1 1 1 1 1 1 1 1 2"


def test_beside_immediate_keys(deferring: Stage) -> None:
    """W1, W3"""
    deferring.step("a:[0]@0+4", k=column("1 2 3 4"), j=column("5 6 7 8"))
    out = deferring.step("b:[0,1]@4+1", k=column(9), j=column(9))
    assert (out["b"], read(out.merged["k"]["b"]), read(out.merged["j"]["b"])) == (
        "a0 a1 a2 a3 b4",
        "1 2 3 4 9",
        "5 6 7 8 9",
    )


def test_without_full_hidden_states(make_stage: MakeStage) -> None:
    """K5: a talker's policy."""
    stage = make_stage(needs_hidden=False, deferred=DEFERRED)
    stage.step("a:[0,1]@0+8", k=column(1, 8))
    out = stage.step("b:[0,1,2]@8+2", finished="a", k=column("2 3"))
    assert (out.merged.keys(), read(out.merged["k"]["b"])) == ({"k"}, "1 1 1 1 1 1 1 1 2 3")


def test_a_list_under_a_deferred_key_is_passed_on(deferring: Stage) -> None:
    """K4: a list with an entry a request, as some talkers emit their codes."""
    out = deferring.step("a:[0]@0+2", "b:[1]@0+2", k=[column("1"), column("2 3")])
    assert [read(entry) for entry in out.merged["k"]["a"]] == ["1", "2 3"]
