"""The device seam where outputs are in an accelerator's memory: clones at once, copies when the step is sealed.

    stage, to_host, snapshot   clone off the live buffers on the compute stream: a later forward, or a replayed graph,
                               overwrites them
    seal                       an event behind the clones; the copy stream waits for it and copies; a second event
                               behind the copies, which the sender thread waits for

The engine thread waits for nothing. Host tensors among the outputs are copied at once, as on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from stagecache.arena import Extent
from stagecache.copies import Copies
from stagecache.device import CpuDevice, is_plain
from stagecache.host_slab import HostSlab
from stagecache.pins import Pins
from stagecache.streams import CopyPair, Streams

SLAB_BYTES = 64 << 20


class StreamDevice(CpuDevice):
    """Copies from a device with streams. Engine thread only."""

    def __init__(self, streams: Streams, *, slab_bytes: int = SLAB_BYTES) -> None:
        """slab_bytes: pinned host memory for leftovers and for rows that are not kept."""
        self.streams = streams
        self.name = streams.name
        self.pins = Pins(streams)
        self.slab = HostSlab(slab_bytes)
        self.pins.add(self.slab.memory, slab_bytes)
        self.on_sealed: Callable[[Copies], None] = Copies.land
        """Gets each seal's copies before anybody else, and lands them sooner or later: the sender."""
        self._pairs: list[CopyPair] = []
        self._extents: list[Extent] = []

    def clone(self, rows: torch.Tensor) -> torch.Tensor:
        return self.streams.clone(rows) if self.streams.owns(rows) else super().clone(rows)

    def stage(self, page: torch.Tensor, rows: torch.Tensor) -> None:
        """Into the page by a copy of the next ``seal``, from a clone made now."""
        if self.streams.owns(rows):
            self._pairs.append((page, self.streams.clone(rows)))
        else:
            super().stage(page, rows)

    def gather(self, page: torch.Tensor, pieces: Sequence[torch.Tensor]) -> None:
        """Pieces of our own clones: joined on the device, one copy. What a failed save had asked for is dropped."""
        self.drop()
        owned = [self.streams.owns(piece) for piece in pieces]
        if all(owned):
            self._pairs.append((page, self.streams.cat(pieces)))
            return
        at = 0
        for piece in pieces:  # A key whose tensors were now in host memory, now on the device.
            self.stage(page[at : at + len(piece)], piece)
            at += len(piece)

    def to_host(self, rows: torch.Tensor) -> torch.Tensor:
        """Host memory that holds the rows once the copies of the next ``seal`` have landed."""
        if not self.streams.owns(rows):
            return super().to_host(rows)
        source = self.streams.clone(rows)
        taken = self.slab.take(source)
        if taken is not None:
            host, extent = taken
            self._extents.append(extent)
        else:
            with torch.inference_mode(False):
                host = torch.empty(source.shape, dtype=source.dtype)
        self._pairs.append((host, source))
        return host

    def snapshot(self, value: torch.Tensor) -> torch.Tensor:
        # What has no strides (sparse, nested) is copied by torch, which waits for the compute stream.
        return self.to_host(value) if is_plain(value) else super().snapshot(value)

    def seal(self) -> Copies | None:
        """Start the copies asked for since the last ``seal`` or ``drop``; None where there are none."""
        if not self._pairs:
            return None
        pairs, extents = self._pairs, self._extents
        self._pairs, self._extents = [], []
        covers, streams = self.pins.covers, self.streams
        late = [pair for pair in pairs if not covers(pair[0].data_ptr())]
        if late:
            pairs = [pair for pair in pairs if covers(pair[0].data_ptr())]
        try:
            ready = streams.mark_compute()
            streams.hold_copies(ready)
        except BaseException:
            self.slab.give_back(extents)
            raise
        copies = Copies(streams, ready, pairs, late, self.slab, extents)
        copies.start()
        self.on_sealed(copies)
        return copies

    def drop(self) -> None:
        """Forget copies that were asked for and not sealed: their step failed."""
        if self._pairs:
            self.slab.give_back(self._extents)
            self._pairs, self._extents = [], []
