"""A real segment of a namespace in this process, and rows that name their content."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256

import numpy as np

from stagecache_wire.geometry import KeySchema
from stagecache_wire.locks import LifeLock
from stagecache_wire.shm import PREFIX, SHM_DIRECTORY
from stagecached.shared.layout import SharedGeometry
from stagecached.shared.membership import Membership
from stagecached.shared.segment import SharedRows, SharedSegment
from stagecached.shared.store import NamespaceStore

HIDDEN = KeySchema("__hidden_states__", "float32", (2,))
WIDE = KeySchema("wide", "bfloat16", (3, 2))
KEYS = (HIDDEN, WIDE)
BLOCK_SIZE = 4
DIGEST = sha256(b"a namespace").digest()
KEY_IDS = {0: 0, 1: 1}


def digest(number: int) -> bytes:
    """The hash of block ``number``."""
    return sha256(f"block {number}".encode()).digest()


def digests(*numbers: int) -> list[bytes]:
    return [digest(number) for number in numbers]


def rows_of(block_hash: bytes, schema: KeySchema) -> np.ndarray:
    """u8 [block_size, row bytes]: rows that no other hash or key has."""
    seed = int.from_bytes(block_hash[:8], "little") + len(schema.name)
    return np.random.default_rng(seed).integers(0, 256, (BLOCK_SIZE, schema.row_bytes), np.uint8)


def write(block_hash: bytes, shared: SharedRows) -> bool:
    """A publisher's copy."""
    for key_id, at in KEY_IDS.items():
        shared.by_key[key_id].view(np.uint8).reshape(BLOCK_SIZE, -1)[:] = rows_of(block_hash, KEYS[at])
    return True


def holds(block_hash: bytes, shared: SharedRows | None) -> bool:
    """Whether these are the rows of that hash, all keys."""
    return shared is not None and all(
        np.array_equal(shared.by_key[key_id].view(np.uint8).reshape(BLOCK_SIZE, -1), rows_of(block_hash, KEYS[at]))
        for key_id, at in KEY_IDS.items()
    )


def stored(membership: Membership, numbers: Sequence[int]) -> list[bool]:
    """Which blocks are there, with the right rows; wrong rows are an error."""
    hashes = digests(*numbers)
    with membership.rows(hashes) as found:
        for block_hash, rows in zip(hashes, found, strict=True):
            assert rows is None or holds(block_hash, rows)
        return [rows is not None for rows in found]


def publish(membership: Membership, number: int) -> int:
    block_hash = digest(number)
    return membership.publish(block_hash, lambda shared: write(block_hash, shared))


@contextmanager
def segment_name() -> Iterator[str]:
    """A name that no daemon's sweep touches: its node's lock is held."""
    node = secrets.token_hex(6)
    lock = LifeLock(SHM_DIRECTORY / f"{PREFIX}.{node}.lock")
    try:
        yield f"{PREFIX}.{node}.shared.{secrets.token_hex(8)}"
    finally:
        lock.release(unlink=True)


@contextmanager
def new_segment(num_blocks: int = 4) -> Iterator[SharedSegment]:
    with segment_name() as name:
        segment = SharedSegment.create(name, SharedGeometry(DIGEST, num_blocks, BLOCK_SIZE, KEYS))
        try:
            yield segment
        finally:
            segment.unlink()


class Member(Membership):
    """A member that remembers its generation as a session's control segment would."""

    def __init__(self, store: NamespaceStore, generation: int | None = None) -> None:
        self.noted: list[int] = []
        super().__init__(store, KEY_IDS, store.base_generation if generation is None else generation, self.noted.append)
