"""What a restarted daemon must know of a namespace: one JSON file each, there before a join is answered.

A segment without a manifest is a creation, or a removal, that a kill cut short: nobody was told of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from stagecache_wire.geometry import BadGeometryError, KeySchema
from stagecached.files import write_atomically
from stagecached.index import BlockIndexError, Namespace
from stagecached.index import KeySchema as IndexedKey
from stagecached.manifest import KeyEntry, NotDurableError
from stagecached.shared.layout import SHARED_ABI, SharedGeometry

VERSION: Final = 1


class NamespaceManifestError(ValueError):
    """A manifest that is no manifest of this version, or does not name its own namespace."""


class NamespaceManifest(BaseModel):
    """One namespace and the size of its segment. keys: by name; their ids are positions."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    version: Literal[1] = VERSION
    shared_abi: int = SHARED_ABI
    namespace_id: str = Field(pattern="^[0-9a-f]{64}$")
    model_fingerprint: str
    hash_algorithm: str
    hash_seed: str
    stage: str
    dtype: str
    block_size: int = Field(ge=1)
    tensor_parallel_size: int = Field(ge=1)
    keys: list[KeyEntry] = Field(min_length=1)
    num_blocks: int = Field(ge=1)
    created_unix_s: float

    @classmethod
    def of(
        cls, namespace: Namespace, schemas: tuple[KeySchema, ...], num_blocks: int, created_unix_s: float
    ) -> NamespaceManifest:
        return cls(
            namespace_id=namespace.digest.hex(),
            model_fingerprint=namespace.model_fingerprint,
            hash_algorithm=namespace.hash_algorithm,
            hash_seed=namespace.hash_seed,
            stage=namespace.stage,
            dtype=namespace.dtype,
            block_size=namespace.block_size,
            tensor_parallel_size=namespace.tensor_parallel_size,
            keys=[KeyEntry.of(at, schema) for at, schema in enumerate(schemas)],
            num_blocks=num_blocks,
            created_unix_s=created_unix_s,
        )

    def schemas(self) -> tuple[KeySchema, ...]:
        return tuple(key.to_schema().checked() for key in self.keys)

    def namespace(self) -> Namespace:
        return namespace_of(
            self.schemas(),
            model_fingerprint=self.model_fingerprint,
            hash_algorithm=self.hash_algorithm,
            hash_seed=self.hash_seed,
            stage=self.stage,
            dtype=self.dtype,
            block_size=self.block_size,
            tensor_parallel_size=self.tensor_parallel_size,
        )

    def geometry(self) -> SharedGeometry:
        return SharedGeometry(bytes.fromhex(self.namespace_id), self.num_blocks, self.block_size, self.schemas())


def namespace_of(
    schemas: tuple[KeySchema, ...],
    *,
    model_fingerprint: str,
    hash_algorithm: str,
    hash_seed: str,
    stage: str,
    dtype: str,
    block_size: int,
    tensor_parallel_size: int,
) -> Namespace:
    """The namespace of these keys.

    Raises:
        UnsupportedHash: an algorithm that can collide.
        ValueError: a number below 1, or a key that is named twice.
    """
    return Namespace(
        model_fingerprint=model_fingerprint,
        hash_algorithm=hash_algorithm,
        hash_seed=hash_seed,
        stage=stage,
        key_schemas=tuple(IndexedKey(schema.name, schema.dtype, schema.row_shape) for schema in schemas),
        dtype=dtype,
        block_size=block_size,
        tensor_parallel_size=tensor_parallel_size,
    )


class NamespaceManifests:
    """The manifests in one directory. Small synchronous file operations."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def save(self, manifest: NamespaceManifest) -> None:
        """
        Raises:
            NotDurableError: it cannot be written.
        """
        try:
            write_atomically(self._path(manifest.namespace_id), manifest.model_dump_json(indent=1))
        except OSError as error:
            raise NotDurableError(f"{self._directory} cannot be written: {error.strerror}") from error

    def remove(self, namespace_id: str) -> None:
        self._path(namespace_id).unlink(missing_ok=True)

    def ids(self) -> Iterator[str]:
        """Of every manifest, readable or not; what a kill in the middle of ``save`` left is removed."""
        for draft in self._directory.glob("*.new"):
            draft.unlink(missing_ok=True)
        for path in sorted(self._directory.glob("*.json")):
            yield path.stem

    def load(self, namespace_id: str) -> NamespaceManifest:
        """Raises: NamespaceManifestError."""
        try:
            manifest = NamespaceManifest.model_validate_json(self._path(namespace_id).read_bytes())
            digest = manifest.namespace().digest.hex()
        except (ValidationError, OSError, BlockIndexError, BadGeometryError, ValueError) as error:
            raise NamespaceManifestError(f"the manifest of namespace {namespace_id} cannot be used: {error}") from error
        if manifest.shared_abi != SHARED_ABI:
            raise NamespaceManifestError(f"its layout is {manifest.shared_abi}, this daemon's is {SHARED_ABI}")
        if not digest == manifest.namespace_id == namespace_id:
            raise NamespaceManifestError(f"the manifest of namespace {namespace_id} describes {digest}")
        return manifest

    def _path(self, namespace_id: str) -> Path:
        return self._directory / f"{namespace_id}.json"
