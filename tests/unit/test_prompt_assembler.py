"""A prompt's rows are put together over the steps of its prefill, once and without a gap."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from stagecache.errors import StageCacheError  # noqa: E402
from stagecache.shim.assemble import IncompleteRowsError, PromptAssembler, PromptRows  # noqa: E402
from stagecache.shim.steps import StepHidden, StepRows, external_id  # noqa: E402

PROMPT = 10


def rows(first: int, end: int) -> torch.Tensor:
    """Row of position p is (p, p + 0.5)."""
    position = torch.arange(first, end, dtype=torch.float32)
    return torch.stack((position, position + 0.5), dim=1)


def step(req_id: str, first: int, computed: int, count: int, *, finished: tuple[str, ...] = ()) -> StepRows:
    """Rows [first, computed + count) were handed out; [computed, computed + count) were computed."""
    return StepRows(
        step=0,
        req_ids=(req_id,),
        hidden=StepHidden({req_id: rows(first, computed + count)}, {}),
        num_computed={req_id: computed},
        num_scheduled={req_id: count},
        prompt_len={req_id: PROMPT},
        finished=finished,
    )


def failed(req_id: str, error: StageCacheError) -> StepRows:
    return StepRows(0, (req_id,), StepHidden({}, {req_id: error}), {req_id: error}, {req_id: 4}, {req_id: 6})


@pytest.fixture
def got() -> list[PromptRows]:
    return []


def test_a_prompt_in_one_step_is_handed_out_at_once_with_its_cached_rows_counted(got: list[PromptRows]) -> None:
    assemble = PromptAssembler(got.append)
    assemble(step("a", 0, 8, 2))
    assert [(p.req_id, p.from_cache, p.steps) for p in got] == [("a", 8, 1)]
    assert torch.equal(got[0].hidden, rows(0, PROMPT))


def test_a_chunked_prefill_is_joined_in_position_order(got: list[PromptRows]) -> None:
    assemble = PromptAssembler(got.append)
    assemble(step("a", 0, 4, 3))
    assemble(step("a", 7, 7, 2))
    assert not got
    assemble(step("a", 9, 9, 1))
    assert torch.equal(got[0].hidden, rows(0, PROMPT))
    assert (got[0].from_cache, got[0].steps) == (4, 3)


def test_decoded_rows_are_left_out_and_the_prompt_comes_only_once(got: list[PromptRows]) -> None:
    assemble = PromptAssembler(got.append)
    assemble(step("a", 0, 0, 10))
    assemble(step("a", 10, 10, 1))
    assemble(step("a", 0, 8, 4))  # preempted while decoding, and computed again
    assert [p.hidden.shape[0] for p in got] == [PROMPT]


def test_a_prefill_that_starts_over_replaces_what_was_there(got: list[PromptRows]) -> None:
    """R3: a preempted request comes back with fewer positions."""
    assemble = PromptAssembler(got.append)
    assemble(step("a", 0, 0, 6))
    assemble(step("a", 4, 4, 6))
    assert torch.equal(got[0].hidden, rows(0, PROMPT))


def test_an_id_may_be_used_again_once_it_finished(got: list[PromptRows]) -> None:
    assemble = PromptAssembler(got.append)
    assemble(step("a", 0, 0, 10))
    assemble(step("a", 0, 8, 2, finished=("a",)))
    assert [p.from_cache for p in got] == [0, 8]


def test_missing_rows_are_an_error_and_never_a_shorter_prompt(got: list[PromptRows]) -> None:
    errors: list[tuple[str, StageCacheError]] = []
    assemble = PromptAssembler(got.append, lambda req_id, error: errors.append((req_id, error)))
    assemble(step("a", 0, 0, 4))
    assemble(step("a", 6, 6, 4))
    assert not got
    assert [(req_id, type(error)) for req_id, error in errors] == [("a", IncompleteRowsError)]
    assert "positions 4 to 5" in str(errors[0][1])


def test_a_step_error_is_reported_once_and_the_rest_of_the_request_is_left_alone(got: list[PromptRows]) -> None:
    errors: list[StageCacheError] = []
    assemble = PromptAssembler(got.append, lambda req_id, error: errors.append(error))
    cause = StageCacheError("no rows")
    assemble(failed("a", cause))
    assemble(step("a", 10, 10, 1))
    assert errors == [cause]


def test_without_an_error_consumer_the_error_is_raised(got: list[PromptRows]) -> None:
    with pytest.raises(StageCacheError, match="no rows"):
        PromptAssembler(got.append)(failed("a", StageCacheError("no rows")))


def test_asking_for_rows_that_could_not_be_had_raises_their_error() -> None:
    hidden = failed("a", StageCacheError("no rows")).hidden
    assert list(hidden) == ["a"]
    with pytest.raises(StageCacheError, match="no rows"):
        hidden["a"]


@pytest.mark.parametrize(
    ("inside", "outside"), [("0-80a704cb", "0"), ("a-deadbeef-80a704cb", "a-deadbeef"), ("plain", "plain")]
)
def test_the_engines_suffix_is_taken_off(inside: str, outside: str) -> None:
    assert external_id(inside) == outside
