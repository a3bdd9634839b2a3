"""The CUDA seam's calls, on a torch.cuda that keeps them: which stream gets what, and that nothing is waited for."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from stagecache import cuda as cuda_module
from stagecache.cuda import CudaStreams, device_for
from stagecache.device import CpuDevice
from stagecache.stream_device import StreamDevice
from stagecache.streams import PinError


class FakeCuda:
    """What is used of torch.cuda; ``calls`` in order."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        calls = self.calls

        class Event:
            def __init__(self, blocking: bool = False) -> None:
                self.blocking = blocking

            def record(self, stream: Any) -> None:
                calls.append(("record", stream.name, self.blocking))

            def query(self) -> bool:
                return True

            def synchronize(self) -> None:
                calls.append(("synchronize", self.blocking))

        class Stream:
            def __init__(self, device: Any = None, name: str = "copies") -> None:
                self.name = name

            def wait_event(self, event: Any) -> None:
                calls.append(("wait_event", self.name))

            def synchronize(self) -> None:
                calls.append(("drain", self.name))

        self.Event = Event
        self.Stream = Stream
        self._compute = Stream(name="compute")

    def current_device(self) -> int:
        return 3

    def current_stream(self, device: Any) -> Any:
        assert device == torch.device("cuda", 3)
        return self._compute

    def set_device(self, device: Any) -> None:
        self.calls.append(("set_device", device.index))

    @contextlib.contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        self.calls.append(("enter", stream.name))
        yield
        self.calls.append(("leave", stream.name))


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    monkeypatch.setattr(torch, "cuda", fake)
    return fake


def test_copies_run_on_the_copy_stream_behind_the_clones(cuda: FakeCuda) -> None:
    streams = CudaStreams(torch.device("cuda"))
    source, host = torch.arange(6.0).view(2, 3).t(), torch.zeros(3, 2)
    clone = streams.clone(source)
    streams.hold_copies(streams.mark_compute())
    streams.copy([(host, clone)])
    event = streams.mark_copies()
    assert clone.is_contiguous()
    assert host.tolist() == source.tolist()
    assert cuda.calls == [
        ("record", "compute", False),
        ("wait_event", "copies"),
        ("enter", "copies"),
        ("leave", "copies"),
        ("record", "copies", True),
    ]
    assert event.done()
    event.wait()
    streams.drain()
    streams.enter_thread()
    assert cuda.calls[-3:] == [("synchronize", True), ("drain", "copies"), ("set_device", 3)]


def test_lazy_bits_of_a_view_are_resolved_before_its_bytes_are_copied(cuda: FakeCuda) -> None:
    streams = CudaStreams(torch.device("cuda", 3))
    values = torch.tensor([1 + 2j, 3 - 1j])
    assert torch.view_as_real(streams.clone(values.conj())).tolist() == [[1, -2], [3, 1]]


def test_without_a_runtime_memory_stays_unpinned_and_says_why(cuda: FakeCuda) -> None:
    streams = CudaStreams(torch.device("cuda", 3))
    with pytest.raises(PinError, match="no libcudart"):
        streams.pin(0x1000, 4096)
    device = StreamDevice(streams, slab_bytes=4096)
    assert (device.pins.pinned_bytes, device.pins.unpinned_bytes) == (0, 4096)
    assert "no libcudart" in device.pins.cause


def test_the_seam_follows_where_the_outputs_are(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_module.torch, "version", SimpleNamespace(cuda="13.0"))
    for device in (None, "cpu", torch.device("xpu")):
        assert type(device_for(device)) is CpuDevice
    assert isinstance(device_for("cuda:3"), StreamDevice)
    monkeypatch.setattr(cuda_module.torch, "version", SimpleNamespace(cuda=None))
    assert type(device_for("cuda")) is CpuDevice
