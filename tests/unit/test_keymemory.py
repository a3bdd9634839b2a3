"""Remembered keys: a hint that survives restarts and never gets in the way."""

from __future__ import annotations

from pathlib import Path

import pytest

from stagecache_wire.geometry import KeySchema
from stagecached import keymemory
from stagecached.keymemory import KeyMemory

HIDDEN = KeySchema("__hidden_states__", "bfloat16", (64,))
OTHER = KeySchema("mm", "float32", ())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


def test_keys_come_back_after_a_restart(path: Path) -> None:
    memory = KeyMemory(path)
    memory.remember("m", "s", HIDDEN)
    memory.remember("m", "s", OTHER)
    again = KeyMemory(path)
    assert again.recall("m", "s") == [HIDDEN, OTHER]
    assert again.recall("m", "t") == []


def test_provisional_key_is_not_remembered(path: Path) -> None:
    """K1"""
    memory = KeyMemory(path)
    memory.remember("m", "s", KeySchema("guess", "float32", (4,), provisional=True))
    assert memory.recall("m", "s") == []
    assert not path.exists()


def test_last_schema_of_a_name_wins(path: Path) -> None:
    memory = KeyMemory(path)
    memory.remember("m", "s", HIDDEN)
    wider = KeySchema(HIDDEN.name, "bfloat16", (128,))
    memory.remember("m", "s", wider)
    assert KeyMemory(path).recall("m", "s") == [wider]


@pytest.mark.parametrize("text", ["", "{", '{"stages": 3}', "[]"])
def test_file_that_cannot_be_read_is_begun_anew(path: Path, text: str) -> None:
    path.write_text(text)
    memory = KeyMemory(path)
    memory.remember("m", "s", HIDDEN)
    assert KeyMemory(path).recall("m", "s") == [HIDDEN]


def test_key_that_no_longer_fits_is_left_out(path: Path) -> None:
    memory = KeyMemory(path)
    memory.remember("m", "s", HIDDEN)
    memory.remember("m", "s", OTHER)
    path.write_text(path.read_text().replace("bfloat16", "float3"))
    assert KeyMemory(path).recall("m", "s") == [OTHER]


def test_stage_not_seen_for_longest_is_forgotten(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keymemory, "MAX_STAGES", 2)
    memory = KeyMemory(path)
    for stage in ("a", "b"):
        memory.remember("m", stage, HIDDEN)
    memory.remember("m", "a", OTHER)
    memory.remember("m", "c", HIDDEN)
    assert [bool(KeyMemory(path).recall("m", stage)) for stage in "abc"] == [True, False, True]
