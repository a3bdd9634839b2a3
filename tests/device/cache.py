"""The real cache of tests/model, its outputs on a fake device."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch

from stagecache.stream_device import StreamDevice
from tests.device.fake import FakeStreams
from tests.model.real import RealCache
from tests.model.steps import Outputs, Rules


class DeviceCache(RealCache):
    """Live buffers are the device's: the forward fills them on the compute stream, and overwrites them on it as soon as
    ``save_outputs`` has returned.

    host: live buffers made now are in host memory. hold: no copy of a save runs before its buffers are overwritten.
    """

    host = False
    hold = True

    def __init__(self, rules: Rules, socket: str, *, order: str = "lazy", seed: int = 0, **settings: Any) -> None:
        self.streams = FakeStreams(order, seed)
        self.streams.refuse_pins = settings.pop("refuse_pins", False)
        slab = {"slab_bytes": settings.pop("slab_bytes")} if "slab_bytes" in settings else {}
        self.device = StreamDevice(self.streams, **slab)
        super().__init__(rules, socket, device=self.device, **settings)

    def save_outputs(self, outputs: Outputs) -> int:
        with self.streams.held() if self.hold else nullcontext():
            return super().save_outputs(outputs)

    def live_buffer(self, values: torch.Tensor) -> torch.Tensor:
        return super().live_buffer(values) if self.host else self.streams.live(values)

    def spoil(self, tensor: torch.Tensor) -> None:
        if self.streams.owns(tensor):
            self.streams.overwrite(tensor)
        else:
            super().spoil(tensor)

    def close(self) -> None:
        self.streams.gate.set()
        super().close()
        assert not self.streams.pinned, "a close left memory pinned"
        assert not self.streams.wrong, self.streams.wrong
