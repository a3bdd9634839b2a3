"""The raw seam to an accelerator: two streams, events, and pinned memory. cuda.py is the real one.

Work on one stream is done in the order in which it was given; between two streams there is no order but where one
waits for an event of the other. The *compute stream* is the engine's current one: it runs the forward, and what we give
it stands behind the forward and before the next. The *copy stream* is ours. No call here waits for either, but
``StreamEvent.wait``, ``Streams.drain`` and a ``copy`` into memory that is not pinned.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

CopyPair = tuple[torch.Tensor, torch.Tensor]
"""(host memory, source on the device): contiguous, of one shape and dtype."""


class PinError(RuntimeError):
    """Memory could not be pinned; the text has the runtime's error."""


class StreamEvent(Protocol):
    """A mark in a stream. Both calls raise RuntimeError where what stands before it failed."""

    def done(self) -> bool:
        """Whether everything before it is done."""

    def wait(self) -> None:
        """Block until it is, without the interpreter lock."""


class Streams(Protocol):
    """One device. Engine thread, but where a method says otherwise; each may raise RuntimeError."""

    name: str

    def enter_thread(self) -> None:
        """First call of a thread of ours: it works on this device from now on."""

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor is in the device's memory."""

    def clone(self, rows: torch.Tensor) -> torch.Tensor:
        """An independent contiguous copy on the device, made on the compute stream."""

    def cat(self, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
        """Pieces along the first dimension, joined on the compute stream."""

    def mark_compute(self) -> StreamEvent:
        """An event behind what the compute stream was given so far."""

    def hold_copies(self, event: StreamEvent) -> None:
        """What the copy stream is given from now on waits for the event."""

    def copy(self, pairs: Sequence[CopyPair]) -> None:
        """Copy to host memory on the copy stream. Any thread. Returns at once where the host memory is pinned;
        elsewhere only when the copy is done.
        """

    def mark_copies(self) -> StreamEvent:
        """An event behind what the copy stream was given so far. Any thread."""

    def drain(self) -> None:
        """Wait for the copy stream. Any thread."""

    def pin(self, address: int, nbytes: int) -> None:
        """Pin host memory, at exactly this size.

        Raises:
            PinError: it could not be pinned, and no error of it is left behind in the runtime.
        """

    def unpin(self, address: int) -> None:
        """Undo ``pin``; no copy into the memory is on its way. Raises PinError."""
