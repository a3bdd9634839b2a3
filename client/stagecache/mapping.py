"""The worker's mapping of its session: control words, arena, staging pages. It never maps a pool."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from stagecache.errors import AbiMismatchError
from stagecache_wire import layout, shm
from stagecache_wire.geometry import Geometry, KeySchema, page_stride
from stagecache_wire.layout import ControlLayout
from stagecache_wire.results import Result


def torch_dtype(name: str) -> torch.dtype:
    """torch.bfloat16 for "bfloat16"."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"torch has no dtype {name!r}")
    return dtype


def dtype_name(dtype: torch.dtype) -> str:
    """Name of a dtype without torch's prefix: bfloat16."""
    return str(dtype).removeprefix("torch.")


@dataclass
class StagedKey:
    """A key of the session, with its staging pages as tensors.

    pages: one tensor a page, [capacity, *row_shape] of the key's dtype, over shared memory. addresses: where each
    begins in this process. row_bytes, row_items: bytes and elements of a row.
    """

    key_id: int
    schema: KeySchema
    segment: shm.Segment = field(repr=False)
    geometry: Geometry = field(repr=False)
    pages: list[torch.Tensor] = field(init=False, repr=False)
    addresses: list[int] = field(init=False, repr=False)
    dtype: torch.dtype = field(init=False)
    row_bytes: int = field(init=False)
    row_items: int = field(init=False)
    _cut: dict[int, tuple[int, torch.Tensor]] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        with torch.inference_mode(False):  # Opened inside it, the pages could not be written outside of it.
            self._map()

    def _map(self) -> None:
        self.dtype = torch_dtype(self.schema.dtype)
        capacity = self.geometry.staging_capacity_tokens
        self.row_bytes = self.schema.row_bytes
        self.row_items = self.row_bytes // self.dtype.itemsize
        stride = page_stride(self.geometry, self.row_bytes)
        flat = torch.frombuffer(self.segment.map, dtype=torch.uint8)
        self.pages = [
            flat[page * stride : page * stride + capacity * self.row_bytes]
            .view(self.dtype)
            .view(capacity, *self.schema.row_shape)
            for page in range(self.geometry.staging_depth)
        ]
        self.addresses = [page.data_ptr() for page in self.pages]

    def rows(self, page: int, count: int) -> torch.Tensor:
        """[count, *row_shape]: the first rows of a page. Decode steps ask for the same ones again and again."""
        found = self._cut.get(page)
        if found is None or found[0] != count:
            found = self._cut[page] = count, self.pages[page][:count]
        return found[1]

    def fits(self, tensor: torch.Tensor) -> bool:
        """Whether rows of the tensor may stand in this key (K3)."""
        return tensor.dtype == self.dtype and tuple(tensor.shape[1:]) == self.schema.row_shape


class ControlWords:
    """The control segment as the worker sees it: it writes the worker words, entries and payloads, nothing else."""

    def __init__(self, control_segment: str, arena_segment: str, geometry: Geometry, session_id: str) -> None:
        """
        Raises:
            FileNotFoundError: a segment is gone.
            AbiMismatchError: the segment is of another layout or of another session.
        """
        self.layout = ControlLayout.of(geometry)
        self._results_word = self.layout.results_word
        self._control = shm.open_segment(control_segment)
        self.arena_segment = shm.open_segment(arena_segment)
        self.words = self._control.view.cast("Q")
        self.bytes = self._control.view
        for word, value in layout.header_words(session_id, geometry):
            if self.words[word] != value:
                raise AbiMismatchError(f"control segment: header word {word} is {self.words[word]}, expected {value}.")
        shm.prefault(self._control)
        shm.prefault(self.arena_segment)
        self.arena = np.frombuffer(self.arena_segment.map, np.uint8, geometry.arena_bytes)

    @property
    def boot_id(self) -> int:
        return self.words[layout.D_BOOT_ID]

    @property
    def status(self) -> int:
        return self.words[layout.D_STATUS]

    def is_whole(self, index: int, sequence: int) -> bool:
        """Whether an entry of the result table is of the record ``sequence``, and every row was PRESENT."""
        words, at = self.words, self._results_word + index * layout.RESULT_WORDS
        return words[at] == sequence and not words[at + layout.R_COUNTS] and not words[at + layout.R_PENDING]

    def result(self, index: int) -> Result:
        """An entry of the result table."""
        at = self._results_word + index * layout.RESULT_WORDS
        return Result.of(self.words[at : at + layout.RESULT_WORDS].tolist())
