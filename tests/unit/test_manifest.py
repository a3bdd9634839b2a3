"""A manifest is whole or not there, and says exactly what was granted."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from stagecache_wire.geometry import Geometry, KeySchema
from stagecached.manifest import GeometryEntry, KeyEntry, Manifest, ManifestError, ManifestStore

SESSION = "0123456789abcdef"
GEOMETRY = Geometry(8, 4, 16).checked()
SCHEMA = KeySchema("mm", "bfloat16", (3, 5), provisional=True)


@pytest.fixture
def store(tmp_path: Path) -> ManifestStore:
    return ManifestStore(tmp_path)


def make(session_id: str = SESSION) -> Manifest:
    return Manifest(
        abi=1,
        session_id=session_id,
        model="m",
        stage="s",
        rank=0,
        pid=7,
        geometry=GeometryEntry.of(GEOMETRY),
        keys=[KeyEntry.of(3, SCHEMA)],
        next_key_id=4,
        attached_unix_s=1.5,
    )


def test_what_was_saved_is_loaded(store: ManifestStore, tmp_path: Path) -> None:
    store.save(make())
    loaded = store.load(SESSION)
    assert loaded == make()
    assert loaded.geometry.to_geometry() == GEOMETRY
    assert loaded.keys[0].to_schema() == SCHEMA
    assert stat.S_IMODE((tmp_path / f"{SESSION}.json").stat().st_mode) == 0o600
    assert list(store.session_ids()) == [SESSION]


def test_save_replaces_and_leaves_no_draft(store: ManifestStore, tmp_path: Path) -> None:
    (tmp_path / f"{SESSION}.json.new").write_text("a kill left this")
    store.save(make())
    changed = make()
    changed.keys = []
    store.save(changed)
    assert store.load(SESSION).keys == []
    assert [path.name for path in tmp_path.iterdir()] == [f"{SESSION}.json"]


def test_drafts_are_removed_at_start(store: ManifestStore, tmp_path: Path) -> None:
    (tmp_path / f"{SESSION}.json.new").write_text("{")
    store.remove_drafts()
    assert list(tmp_path.iterdir()) == []


def test_remove_may_be_repeated(store: ManifestStore) -> None:
    store.save(make())
    store.remove(SESSION)
    store.remove(SESSION)
    assert list(store.session_ids()) == []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"version": 1', '"version": 2'),
        (f'"{SESSION}"', '"../../../../etc/pw"'),
        (f'"{SESSION}"', '"fedcba9876543210"'),
        ('"stage"', '"stages"'),
        ("}", ""),
        ('"key_id"', '"x"'),
    ],
)
def test_anything_else_is_refused(store: ManifestStore, tmp_path: Path, old: str, new: str) -> None:
    store.save(make())
    path = tmp_path / f"{SESSION}.json"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    with pytest.raises(ManifestError, match=SESSION):
        store.load(SESSION)


def test_missing_one_is_refused(store: ManifestStore) -> None:
    with pytest.raises(ManifestError):
        store.load(SESSION)
