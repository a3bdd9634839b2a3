"""The demo's parts: its conversations, its verdicts, its report. None of them needs an engine."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("tokenizers")

from stagecache.demo.checkpoint import ModelShape  # noqa: E402
from stagecache.demo.compare import Standard, compare  # noqa: E402
from stagecache.demo.engine import Recording, StepSample  # noqa: E402
from stagecache.demo.report import DemoOutcome, render  # noqa: E402
from stagecache.demo.workload import (  # noqa: E402
    DemoRequest,
    build_requests,
    parse_text,
    read_text,
    train_tokenizer,
)
from stagecache.shim.assemble import PromptRows  # noqa: E402

BLOCK = 32


@pytest.fixture(scope="module")
def tokenizer() -> object:
    return train_tokenizer(read_text(), 2048)


def shared(a: DemoRequest, b: DemoRequest) -> int:
    """Leading tokens that two prompts share."""
    pairs = zip(a.tokens, b.tokens, strict=False)
    return next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(a.tokens), len(b.tokens)))


def test_the_shipped_text_has_conversations_of_four_turns() -> None:
    system, conversations = parse_text(read_text())
    assert len(system.split()) > 100
    assert len(conversations) >= 6
    assert {len(conversation.turns) for conversation in conversations} == {4}
    assert all(turn.user and turn.assistant for conversation in conversations for turn in conversation.turns)


@pytest.mark.parametrize("count", [1, 5, 24, 32, 50, 130])
def test_as_many_requests_as_asked_for_with_ids_of_their_own(tokenizer: object, count: int) -> None:
    requests = [request for wave in build_requests(tokenizer, read_text(), count) for request in wave]
    assert len(requests) == count
    assert len({request.req_id for request in requests}) == count


def test_turns_share_the_system_prompt_and_what_was_said(tokenizer: object) -> None:
    waves = build_requests(tokenizer, read_text(), 24)
    first = waves[0][0]
    assert all(shared(first, request) > 4 * BLOCK for wave in waves for request in wave)
    for earlier, later in pairwise(waves):
        for a, b in zip(earlier, later, strict=True):
            assert shared(a, b) >= len(a.tokens) - 2  # the last token may join with what follows it


def test_some_conversations_repeat_and_some_diverge_inside_a_block(tokenizer: object) -> None:
    waves = build_requests(tokenizer, read_text(), 24)
    of_kind = {kind: [r for r in waves[3] if r.kind == kind] for kind in ("own", "identical", "diverging")}
    assert all(of_kind.values())
    [same] = of_kind["identical"]
    assert any(same.tokens == other.tokens for other in of_kind["own"])
    [different] = of_kind["diverging"]
    source = max(of_kind["own"], key=lambda other: shared(different, other))
    assert shared(different, source) % BLOCK
    assert len(waves[0][0].tokens) < shared(different, source) < len(different.tokens)


def request(name: str) -> DemoRequest:
    return DemoRequest(name, "a <topic>", 1, "own", tuple(range(12)))


def recordings(rows: torch.Tensor) -> tuple[Recording, Recording]:
    """The same 12 rows with 4 hits, and without."""
    step = StepSample(0.01, 0.001, 8, 4, 1)
    cached = Recording({"a": PromptRows("a", rows.clone(), 4, 1)}, {"a": 4}, [step], 0.1, 1.0)
    return cached, Recording({"a": PromptRows("a", rows.clone(), 0, 1)}, {"a": 0}, [step], 0.2, 1.0)


def outcome(cached: Recording, uncached: Recording, standard: Standard) -> DemoOutcome:
    results = compare([[request("a")]], cached, uncached, standard)
    return DemoOutcome(results, cached, uncached, standard, 3, "float32", BLOCK, 0.2, 9.0)


EXACT = Standard(exact=True, tolerance=1e-3)
ROWS = torch.randn(12, 3, generator=torch.Generator().manual_seed(1))


def test_equal_rows_are_right_and_the_control_is_noticed() -> None:
    done = outcome(*recordings(ROWS), EXACT)
    assert done.ok
    assert (done.wrong, done.controls) == (0, 1)
    [result] = done.results
    assert (result.from_cache, result.computed, result.verdict) == (4, 8, "equal")


def test_one_wrong_element_is_a_failure() -> None:
    cached, uncached = recordings(ROWS)
    cached.prompts["a"].hidden[3, 1] += 1e-6
    done = outcome(cached, uncached, EXACT)
    assert not done.ok
    assert done.results[0].verdict == "different"


def test_where_the_kernels_depend_on_the_batch_only_small_differences_pass() -> None:
    loose = Standard(exact=False, tolerance=1e-3)
    cached, uncached = recordings(ROWS)
    cached.prompts["a"].hidden[3, 1] += 1e-4
    assert outcome(cached, uncached, loose).results[0].verdict == "close"
    cached.prompts["a"].hidden[3, 1] += 1e-2
    assert not outcome(cached, uncached, loose).ok


def test_missing_rows_are_a_failure() -> None:
    cached, uncached = recordings(ROWS)
    del cached.prompts["a"]
    assert outcome(cached, uncached, EXACT).results[0].verdict == "missing"
    assert outcome(cached, uncached, EXACT).wrong == 1


def test_rows_that_did_not_come_from_the_pool_though_the_engine_hit_are_a_failure() -> None:
    cached, uncached = recordings(ROWS)
    cached.prompts["a"] = replace(cached.prompts["a"], from_cache=0)
    assert not outcome(cached, uncached, EXACT).ok


def test_rows_that_prove_nothing_are_a_failure() -> None:
    """All rows alike: shifting them changes nothing, so the comparison could not have noticed."""
    done = outcome(*recordings(torch.ones(12, 3)), EXACT)
    assert done.results[0].verdict == "equal"
    assert not done.ok
    assert "control" in render(done)


def test_float32_of_a_width_where_batches_do_not_matter_must_be_exact() -> None:
    assert Standard.of("float32", 256).exact
    assert not Standard.of("float32", 1024).exact
    assert not Standard.of("bfloat16", 256).exact


def test_the_report_needs_nothing_from_outside_and_escapes_its_texts() -> None:
    page = render(outcome(*recordings(ROWS), EXACT))
    assert page.count("<svg") == 3
    assert "a &lt;topic&gt;" in page
    assert "prefers-color-scheme: dark" in page
    assert not re.search(r"""(src|href)=["']|url\(|@import|https?://|@[A-Z]+@""", page)


@pytest.mark.parametrize("hidden", [64, 128, 192, 256, 2048])
def test_a_models_heads_divide_its_width(hidden: int) -> None:
    shape = ModelShape(hidden=hidden)
    assert shape.heads * shape.head_dim == hidden
    assert shape.heads % shape.kv_heads == 0


@pytest.mark.parametrize("hidden", [0, 32, 100])
def test_a_width_without_whole_heads_is_refused(hidden: int) -> None:
    with pytest.raises(ValueError, match="multiple of 64"):
        ModelShape(hidden=hidden)
