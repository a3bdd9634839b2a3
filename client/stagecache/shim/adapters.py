"""Hashes of blocks under a LoRA adapter, as all engines of a node may know them.

The engine's own hash has the adapter's name, and two engines may load different adapters under one name. So a block
is shared under the digest of that hash and of which files the adapter was loaded from: their place on this node, size
and time of change. An adapter that is no folder with files is not shared.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any


def file_facts(folder: Path) -> list[tuple[str, int, int, int, int]]:
    """(name, device, inode, bytes, ns of the last change) of each file right in ``folder``; links are followed."""
    found = []
    for path in sorted(folder.iterdir()):
        if path.is_file():
            facts = path.stat()
            found.append((path.name, facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns))
    return found


class AdapterTags:
    """One digest an adapter, made when it is first seen: an adapter that is loaded anew in place comes with a reset."""

    def __init__(self) -> None:
        self._tags: dict[tuple[str, int, str], bytes | None] = {}

    def tagged(self, adapter: Any, hashes: Sequence[bytes]) -> list[bytes]:
        """The hashes under which blocks of this adapter (a LoRARequest) are shared; none where it has no files."""
        key = adapter.lora_name, adapter.lora_int_id, adapter.lora_path
        if key not in self._tags:
            self._tags[key] = _tag_of(Path(adapter.lora_path))
        tag = self._tags[key]
        return [] if tag is None else [sha256(tag + block_hash).digest() for block_hash in hashes]


def _tag_of(folder: Path) -> bytes | None:
    try:
        facts = file_facts(folder)
    except OSError:
        return None
    return sha256(repr(facts).encode()).digest() if facts else None
