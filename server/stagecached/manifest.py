"""What the daemon must know to adopt a session after it was killed: one JSON file a session, replaced atomically.

A manifest is written before Attach and OpenKey answer, so a worker never holds a name that the next daemon does not
know. What it lists may be gone (a key that was closed just before the kill); what it does not list is an orphan.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from stagecache_wire.geometry import Geometry, KeySchema
from stagecache_wire.records import KEY_MASK
from stagecached.files import write_atomically

VERSION: Final = 1


class KeyEntry(BaseModel):
    """An open key."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    key_id: int = Field(ge=0, le=KEY_MASK)
    name: str
    dtype: str
    row_shape: tuple[int, ...]
    provisional: bool = False

    @classmethod
    def of(cls, key_id: int, schema: KeySchema) -> KeyEntry:
        return cls(
            key_id=key_id,
            name=schema.name,
            dtype=schema.dtype,
            row_shape=schema.row_shape,
            provisional=schema.provisional,
        )

    def to_schema(self) -> KeySchema:
        return KeySchema(self.name, self.dtype, self.row_shape, self.provisional)


class GeometryEntry(BaseModel):
    """The session's geometry, as granted."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    num_blocks: int
    block_size: int
    staging_capacity_tokens: int
    staging_depth: int
    arena_bytes: int
    max_results: int

    @classmethod
    def of(cls, geometry: Geometry) -> GeometryEntry:
        return cls(
            num_blocks=geometry.num_blocks,
            block_size=geometry.block_size,
            staging_capacity_tokens=geometry.staging_capacity_tokens,
            staging_depth=geometry.staging_depth,
            arena_bytes=geometry.arena_bytes,
            max_results=geometry.max_results,
        )

    def to_geometry(self) -> Geometry:
        return Geometry(**self.model_dump())


class Manifest(BaseModel):
    """One session. ``next_key_id`` keeps ids of closed keys from being given again."""

    model_config = ConfigDict(extra="forbid")

    version: Literal[1] = VERSION
    abi: int
    session_id: str = Field(pattern="^[0-9a-f]{16}$")
    model: str
    stage: str
    rank: int = Field(ge=-(1 << 31), lt=1 << 31)
    pid: int = Field(ge=-(1 << 63), lt=1 << 63)
    geometry: GeometryEntry
    keys: list[KeyEntry] = []
    next_key_id: int = Field(default=0, ge=0, le=KEY_MASK + 1)
    attached_unix_s: float = Field(allow_inf_nan=False)
    engine: str = ""
    namespace: str = Field(default="", pattern="^([0-9a-f]{64})?$")
    """Digest of the namespace of shared blocks that it has joined, as hex digits; empty: none."""

    @model_validator(mode="after")
    def _keys_are_told_apart(self) -> Manifest:
        ids = [key.key_id for key in self.keys]
        if len(set(ids)) != len(ids):  # A name may be: of a key that was closed just before the kill, and of the next.
            raise ValueError("a key id is listed twice")
        if self.keys and self.next_key_id <= max(ids):
            raise ValueError(f"the next key would get the id {self.next_key_id}, and {max(ids)} is given")
        return self


class NotDurableError(RuntimeError):
    """A manifest cannot be written: the run directory is full, or gone."""


class ManifestError(ValueError):
    """A manifest that is no manifest of this version."""


class ManifestStore:
    """The manifests in one directory. Small synchronous file operations."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def _path(self, session_id: str) -> Path:
        return self._directory / f"{session_id}.json"

    def save(self, manifest: Manifest) -> None:
        """
        Raises:
            NotDurableError: it cannot be written; the one of before stands.
        """
        try:
            write_atomically(self._path(manifest.session_id), manifest.model_dump_json(indent=1))
        except OSError as error:
            raise NotDurableError(f"{self._directory} cannot be written: {error.strerror}") from error

    def remove(self, session_id: str) -> None:
        self._path(session_id).unlink(missing_ok=True)
        self._stuck_path(session_id).unlink(missing_ok=True)

    def _stuck_path(self, session_id: str) -> Path:
        return self._directory / f"{session_id}.stuck"

    def note_stuck(self, session_id: str, sequence: int) -> None:
        """This daemon ends since its consumer is stuck in the record ``sequence`` of a session."""
        before, times = self.stuck(session_id)
        times = times + 1 if before == sequence else 1
        write_atomically(self._stuck_path(session_id), f"{sequence} {times}\n")

    def stuck(self, session_id: str) -> tuple[int, int]:
        """The record that daemons were stuck in, and how many in a row; (0, 0) where none was."""
        try:
            sequence, times = self._stuck_path(session_id).read_text(encoding="ascii").split()
            return int(sequence), int(times)
        except (OSError, ValueError):
            return 0, 0

    def remove_drafts(self) -> None:
        """Remove what a kill in the middle of ``save`` left."""
        for path in self._directory.glob("*.new"):
            path.unlink(missing_ok=True)

    def session_ids(self) -> Iterator[str]:
        """Ids that have a manifest, readable or not."""
        for path in sorted(self._directory.glob("*.json")):
            yield path.stem

    def load(self, session_id: str) -> Manifest:
        """The manifest of a session.

        Raises:
            ManifestError: it is cut short, of another version, or of another session.
        """
        try:
            manifest = Manifest.model_validate_json(self._path(session_id).read_bytes())
        except (ValidationError, OSError) as error:
            raise ManifestError(f"the manifest of session {session_id} cannot be used: {error}") from error
        if manifest.session_id != session_id:
            raise ManifestError(f"the manifest of session {session_id} names session {manifest.session_id}")
        return manifest
