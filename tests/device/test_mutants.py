"""Each wait of the GPU path is needed, and would be missed: without it a story goes wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("torch")

from stagecache.errors import StageCacheError
from tests.device.mutants import MUTANTS, Mutant
from tests.model.steps import Refused

if TYPE_CHECKING:
    from tests.device.scenarios import Make


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_story_goes_wrong_without_it(
    mutant: Mutant, make_on: Callable[[str], Make], monkeypatch: pytest.MonkeyPatch
) -> None:
    make = make_on(mutant.order)
    mutant.patch(monkeypatch)
    with pytest.raises((AssertionError, Refused, StageCacheError)):
        mutant.story(make)
