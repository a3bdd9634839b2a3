"""What a cache must give back, as a plain dict of rows: (key, slot) to bytes, written in step order."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

HIDDEN = "__hidden_states__"


@dataclass(frozen=True)
class RowKind:
    """dtype (torch's name) and row shape of a key, and the bytes of a row."""

    dtype: str
    shape: tuple[int, ...]
    row_bytes: int

    def row(self, serial: int) -> bytes:
        """A row that no other serial gives. The low bit of each element is the serial's, so bool rows work too."""
        if self.dtype == "bool":
            return bytes(serial >> bit & 1 for bit in range(self.row_bytes))
        raw = (serial * 0x9E3779B97F4A7C15 & (1 << 64) - 1).to_bytes(8, "little")
        return (raw * (self.row_bytes // 8 + 1))[: self.row_bytes]


class Oracle:
    """Rows by key and slot."""

    def __init__(self) -> None:
        self._rows: dict[tuple[str, int], bytes] = {}
        self._keys: set[str] = set()

    def save(self, slots: Sequence[int], rows: Mapping[str, Sequence[bytes]]) -> None:
        """A step wrote ``slots``: these keys have rows now, all others none."""
        self.lose(slots)
        for key, values in rows.items():
            self._keys.add(key)
            self._rows.update({(key, slot): row for slot, row in zip(slots, values, strict=True)})

    def lose(self, slots: Iterable[int]) -> None:
        """Nothing may be read of these slots."""
        for slot in slots:
            for key in self._keys:
                self._rows.pop((key, slot), None)

    def reset(self) -> None:
        self._rows.clear()

    def drop_key(self, key: str) -> None:
        """The cache gave the key up."""
        for at in [at for at in self._rows if at[0] == key]:
            del self._rows[at]

    def readable(self, slots: Iterable[int]) -> bool:
        """Whether a hit on these slots is served."""
        return all((HIDDEN, slot) in self._rows for slot in slots)

    def read(self, key: str, slots: Iterable[int], kind: RowKind) -> list[bytes]:
        """Rows of a key: zeros where the tenant did not write it."""
        zeros = bytes(kind.row_bytes)
        return [self._rows.get((key, slot), zeros) for slot in slots]
