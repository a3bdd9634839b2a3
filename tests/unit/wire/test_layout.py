"""Words of the control segment: each has its place, its writer and a cache line away from the others' words."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagecache_wire import layout
from stagecache_wire.geometry import Geometry
from stagecache_wire.layout import ControlLayout
from stagecache_wire.results import Result

DOCS = Path(__file__).parents[3] / "docs" / "memory-layout.md"

geometries = st.builds(
    Geometry,
    num_blocks=st.integers(1, 1 << 16),
    block_size=st.integers(1, 64),
    staging_capacity_tokens=st.integers(1, 1 << 14),
    staging_depth=st.integers(1, 64),
    arena_bytes=st.integers(1 << 16, 1 << 24),
    max_results=st.integers(16, 1 << 14),
)


def named(prefix: str) -> dict[str, int]:
    return {name: value for name, value in vars(layout).items() if re.fullmatch(rf"{prefix}_[A-Z_]+", name)}


@pytest.mark.parametrize("prefix", ["H", "W", "D", "E", "R"])
def test_no_two_words_share_a_place(prefix: str) -> None:
    places = {name: at for name, at in named(prefix).items() if not name.endswith(("_BASE", "_FIGURES"))}
    assert len(set(places.values())) == len(places)


def test_each_side_writes_pages_of_its_own() -> None:
    words = layout.PAGE // layout.WORD
    assert all(at < words for at in named("H").values())
    assert all(words <= at < 2 * words for at in named("W").values())
    assert all(2 * words <= at < 3 * words for at in named("D").values())


def test_the_words_that_are_polled_have_a_cache_line_of_their_own() -> None:
    line = 64 // layout.WORD
    for polled, prefix in ((layout.W_HEAD, "W"), (layout.D_CONSUMED, "D")):
        others = [at for name, at in named(prefix).items() if at != polled and not name.endswith("_BASE")]
        assert all(at // line != polled // line for at in others)


@given(geometries)
def test_the_parts_follow_each_other_without_overlap(geometry: Geometry) -> None:
    control = ControlLayout.of(geometry.checked())
    assert control.entries_word == 3 * layout.PAGE // layout.WORD
    assert control.payload_word == control.entries_word + control.log_entries * layout.ENTRY_WORDS
    assert control.results_word * layout.WORD == control.payload_word * layout.WORD + control.payload_bytes
    last = control.result_word(control.max_results - 1) + layout.RESULT_WORDS
    assert last * layout.WORD == control.total_bytes


@given(geometries, st.integers(1, 1 << 40))
def test_entries_are_a_ring_of_cache_lines(geometry: Geometry, sequence: int) -> None:
    control = ControlLayout.of(geometry.checked())
    at = control.entry_word(sequence)
    assert control.entries_word <= at <= control.payload_word - layout.ENTRY_WORDS
    assert (at - control.entries_word) % layout.ENTRY_WORDS == 0
    assert control.entry_word(sequence + control.log_entries) == at
    assert control.entry_word(sequence + 1) != at


@given(st.lists(st.integers(0, (1 << 32) - 1), min_size=11, max_size=11))
def test_a_result_comes_out_as_it_went_in(numbers: list[int]) -> None:
    result = Result(*numbers)
    words = result.words()
    assert len(words) == layout.RESULT_WORDS
    assert all(0 <= word < 1 << 64 for word in words)
    assert Result.of(words) == result


def test_a_result_names_its_first_missing_row() -> None:
    assert Result(1, 0, 0, 9, 0, 0, 0, 9, 0, 9, 0).first_missing == 9
    assert Result(1, 0, 0, 9, 1, 2, 0, 6, 7, 3, 5).first_missing == 3


def test_the_words_are_documented() -> None:
    text = DOCS.read_text()
    for word in ("consumed", "head", "boot id", "epoch"):
        assert word in text
    assert str(layout.ABI) in text
