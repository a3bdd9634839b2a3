"""Pinned host memory: exact sizes, chunks, refusals, and that nothing registered is ever unmapped."""

from __future__ import annotations

import ctypes
import gc
import mmap
from typing import Any

import pytest

from stagecache import pins as pins_module
from stagecache.cuda import CudaRuntime, runtime_paths
from stagecache.pins import Pins
from stagecache.streams import PinError
from tests.device.fake import FakeStreams

PAGE = mmap.PAGESIZE


class Function:
    """A function of the runtime's library: takes its signature, answers ``code``, keeps its calls."""

    def __init__(self, code: Any = 0) -> None:
        self.code = code
        self.calls: list[tuple[Any, ...]] = []
        self.argtypes: Any = None
        self.restype: Any = None

    def __call__(self, *arguments: Any) -> Any:
        self.calls.append(arguments)
        return self.code


class Library:
    """libcudart without a device."""

    def __init__(self) -> None:
        self.cudaHostRegister = Function()
        self.cudaHostUnregister = Function()
        self.cudaGetLastError = Function()
        self.cudaGetErrorString = Function(b"out of memory")


def test_memory_is_registered_at_its_exact_size_and_portable() -> None:
    library = Library()
    runtime = CudaRuntime(library)
    runtime.register(0x1000, 3 * PAGE)
    runtime.unregister(0x1000)
    assert library.cudaHostRegister.calls == [(0x1000, 3 * PAGE, 1)]
    assert library.cudaHostUnregister.calls == [(0x1000,)]
    assert library.cudaHostRegister.argtypes == (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint)
    assert library.cudaGetLastError.calls == []


@pytest.mark.parametrize("method", ["register", "unregister"])
def test_a_refusal_is_an_error_of_ours_and_none_of_the_next_kernel(method: str) -> None:
    library = Library()
    library.cudaHostRegister.code = library.cudaHostUnregister.code = 2
    call = getattr(CudaRuntime(library), method)
    with pytest.raises(PinError, match=r"error 2 \(out of memory\)"):
        call(*(0x1000, PAGE)[: 2 if method == "register" else 1])
    assert library.cudaGetLastError.calls == [()], "the sticky error stayed"


def test_the_runtime_is_the_one_that_torch_has_loaded() -> None:
    maps = [
        "7f00-7f01 r-xp 00000000 08:01 1 /usr/lib/libcudart.so.12.4.127",
        "7f01-7f02 r-xp 00000000 08:01 2 /venv/nvidia/cuda_runtime/lib/libcudart.so.13",
        "7f02-7f03 r--p 00000000 08:01 2 /venv/nvidia/cuda_runtime/lib/libcudart.so.13",
        "7f03-7f04 r-xp 00000000 08:01 3 /usr/lib/libcuda.so.1",
        "7f04-7f05 rw-p 00000000 00:00 0 ",
    ]
    ours, other = "/venv/nvidia/cuda_runtime/lib/libcudart.so.13", "/usr/lib/libcudart.so.12.4.127"
    assert runtime_paths(maps, "13.0") == [ours, other]
    assert runtime_paths(maps, "12.9") == [other, ours]
    assert runtime_paths(maps[3:], "13.0") == []


def test_a_large_mapping_is_pinned_in_chunks_that_no_copy_crosses() -> None:
    streams = FakeStreams()
    pins = Pins(streams, max_chunk=5 * PAGE)
    memory = mmap.mmap(-1, 9 * PAGE)
    assert pins.add(memory, 2 * PAGE)
    first = min(streams.pinned)
    assert {at - first: size for at, size in streams.pinned.items()} == {
        0: 4 * PAGE,
        4 * PAGE: 4 * PAGE,
        8 * PAGE: PAGE,
    }
    assert (pins.pinned_bytes, pins.unpinned_bytes) == (9 * PAGE, 0)
    assert pins.covers(first + 5 * PAGE)
    assert not pins.covers(first + 9 * PAGE)
    pins.close()
    assert (streams.pinned, pins.pinned_bytes) == ({}, 0)
    assert pins_module.MAX_CHUNK == 64 << 30


def test_what_cannot_be_pinned_whole_is_not_pinned_in_part(caplog: pytest.LogCaptureFixture) -> None:
    streams = FakeStreams()
    pin, calls = streams.pin, []

    def second_fails(address: int, nbytes: int) -> None:
        calls.append(address)
        if len(calls) == 2:
            raise PinError("no more")
        pin(address, nbytes)

    streams.pin = second_fails  # type: ignore[method-assign]
    pins = Pins(streams, max_chunk=PAGE)
    assert not pins.add(mmap.mmap(-1, 3 * PAGE), PAGE)
    assert streams.pinned == {}
    assert (pins.pinned_bytes, pins.unpinned_bytes, pins.cause) == (0, 3 * PAGE, "no more")
    assert "is not pinned: no more" in caplog.text
    assert not pins.covers(calls[0])


def test_pinned_memory_is_not_unmapped_and_forgotten_pins_are_undone() -> None:
    streams = FakeStreams()
    pins = Pins(streams)
    memory = mmap.mmap(-1, PAGE)
    pins.add(memory, PAGE)
    with pytest.raises(BufferError):
        memory.close()
    pins.remove(memory)
    assert streams.pinned == {}
    memory.close()
    pins.add(mmap.mmap(-1, PAGE), PAGE)
    assert len(streams.pinned) == 1
    del pins
    gc.collect()
    assert streams.pinned == {}
