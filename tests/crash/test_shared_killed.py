"""A daemon that is killed between any two shared stores of a publish, an eviction, a lease or a reset."""

from __future__ import annotations

import inspect
import re

import pytest

from stagecached.index import Block
from stagecached.shared import leases, membership, store
from stagecached.shared.store import CopyRows, NamespaceStore
from tests.crash.shared_store import NUM_BLOCKS, State, check_death, undisturbed
from tests.unit.server.shared.kit import new_segment, segment_name

pytestmark = pytest.mark.crash

SOURCES = "".join(inspect.getsource(module) for module in (store, leases, membership))
POINTS = sorted({*re.findall(r"\.point\(\"(\w+)\"\)", SOURCES), "inside_rows"})
VISITS = 4
"""Deaths at each point, spread over all visits that the script makes."""


@pytest.fixture(scope="module")
def expected() -> tuple[list[State], dict[str, int]]:
    with new_segment(NUM_BLOCKS) as segment:
        states, visits = undisturbed(segment)
    return states, dict(visits)


def deaths(visits: int) -> list[int]:
    """Which of so many visits to die at: first and last, and some between."""
    return sorted({1 + at * (visits - 1) // max(VISITS - 1, 1) for at in range(VISITS)})


def found_faults(kind: type[NamespaceStore], point: str, expected: tuple[list[State], dict[str, int]]) -> list[str]:
    states, visits = expected
    faults = []
    with segment_name() as name:
        for visit in deaths(visits[point]):
            try:
                check_death(kind, point, visit, states, name)
            except AssertionError as error:
                faults.append(f"{point} {visit}: {str(error).splitlines()[0]}")
    return faults


def test_the_script_comes_to_every_point(expected: tuple[list[State], dict[str, int]]) -> None:
    assert set(expected[1]) == set(POINTS)


@pytest.mark.parametrize("point", POINTS)
def test_what_a_killed_daemon_left_is_whole_or_not_there(
    point: str, expected: tuple[list[State], dict[str, int]]
) -> None:
    assert found_faults(NamespaceStore, point, expected) == []


class SealFirst(NamespaceStore):
    """The seal is stored before the rows are in."""

    def _copy(self, block: Block, block_hash: bytes, generation: int, copy_rows: CopyRows) -> bool:
        self._seal(block, block_hash, generation)
        return super()._copy(block, block_hash, generation, copy_rows)


class SealStays(NamespaceStore):
    """An evicted block keeps its seal until the new one is stored."""

    def _take(self) -> Block | None:
        block = super()._take()
        if block is not None:
            at = store.block_word(block.block_id)
            words = tuple(self._words[at : at + 5])
            if any(words):
                self._words[at + 7] = store.seal_of(self._digest_word, block.block_id, words)
        return block


class SealedInPieces(NamespaceStore):
    """The seal says only that there is one: it does not depend on the words before it, and is stored first."""

    def _seal(self, block: Block, block_hash: bytes, generation: int) -> None:
        at, words = store.block_word(block.block_id), (*store.hash_words(block_hash), generation)
        self._words[at + 7] = store.seal_of(self._digest_word, block.block_id, words)
        for index, word in enumerate(words):
            self._words[at + index] = word
            self.point("inside_header")
        self.point("before_seal")
        self.point("after_seal")


@pytest.mark.parametrize(("kind", "point"), [(SealFirst, "inside_rows"), (SealStays, "inside_rows")])
def test_a_store_that_seals_wrongly_is_caught(
    kind: type[NamespaceStore], point: str, expected: tuple[list[State], dict[str, int]]
) -> None:
    assert any("other rows" in fault for fault in found_faults(kind, point, expected))


def test_a_seal_that_is_stored_too_early_still_does_not_fit_a_half_written_header(
    expected: tuple[list[State], dict[str, int]],
) -> None:
    """The seal is a checksum: it protects the header even where the order of stores does not."""
    assert not [fault for fault in found_faults(SealedInPieces, "inside_header", expected) if "other rows" in fault]
