"""CUDA: streams and events through torch, pinned memory through the runtime library that torch has loaded.

torch's binding of the runtime has no cudaGetLastError. A failed cudaHostRegister leaves its error there, and torch's
next kernel launch would report it as its own; so registration goes through ctypes, on the very library that is mapped.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import torch

from stagecache.device import CpuDevice
from stagecache.stream_device import StreamDevice
from stagecache.streams import CopyPair, PinError, StreamEvent

HOST_REGISTER_PORTABLE: Final = 1
"""Pinned for every context of the process, as torch's own pinned memory is."""
SUCCESS: Final = 0


def device_for(device: torch.device | str | None) -> CpuDevice:
    """The seam for outputs on ``device``, one a cache: streams for an NVIDIA device, plain copies for all else."""
    found = torch.device(device) if device is not None else None
    if found is None or found.type != "cuda" or torch.version.cuda is None:
        return CpuDevice()
    return StreamDevice(CudaStreams(found))


class CudaRuntime:
    """Calls of libcudart that torch does not offer. Every return code is checked."""

    def __init__(self, library: Any) -> None:
        """library: a ctypes library of libcudart."""
        self._register = _function(library, "cudaHostRegister", ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint)
        self._unregister = _function(library, "cudaHostUnregister", ctypes.c_void_p)
        self._last_error = _function(library, "cudaGetLastError")
        self._error_text = _function(library, "cudaGetErrorString", ctypes.c_int, result=ctypes.c_char_p)

    @classmethod
    def of_this_process(cls) -> CudaRuntime:
        """The runtime that torch uses: the mapped one, whose major version is torch's.

        Raises:
            PinError: none is mapped.
        """
        paths = runtime_paths(Path("/proc/self/maps").read_text(encoding="utf-8").splitlines(), torch.version.cuda)
        for path in paths:
            try:
                return cls(ctypes.CDLL(path))
            except (OSError, AttributeError):
                continue
        raise PinError(f"no libcudart of CUDA {torch.version.cuda} is loaded by this process")

    def register(self, address: int, nbytes: int) -> None:
        """Pin host memory. Raises PinError; the error is not left behind for others."""
        self._check(self._register(address, nbytes, HOST_REGISTER_PORTABLE), f"cudaHostRegister of {nbytes} bytes")

    def unregister(self, address: int) -> None:
        """Undo ``register``. Raises PinError."""
        self._check(self._unregister(address), "cudaHostUnregister")

    def _check(self, code: int, what: str) -> None:
        if code == SUCCESS:
            return
        self._last_error()  # Reads it, and by that clears it.
        text = self._error_text(code)
        raise PinError(f"{what}: error {code} ({text.decode() if text else 'unknown'})")


def runtime_paths(maps: Iterable[str], version: str | None) -> list[str]:
    """Paths of mapped CUDA runtimes, those of torch's major ``version`` first. maps: lines of /proc/self/maps."""
    found: dict[str, None] = {}
    for line in maps:
        match = re.search(r"(/\S*/libcudart[^/]*\.so[^/\s]*)$", line.rstrip())
        if match:
            found[match[1]] = None
    major = (version or "").partition(".")[0]
    # libcudart.so.13, or libcudart-1a2b3c.so.13.0 in a repaired wheel.
    return sorted(found, key=lambda path: re.search(rf"\.so\.{major}(\.|$)", path) is None)


def _function(library: Any, name: str, *arguments: Any, result: Any = ctypes.c_int) -> Callable[..., Any]:
    function: Any = getattr(library, name)
    function.argtypes = arguments
    function.restype = result
    return function  # type: ignore[no-any-return]


class CudaEvent:
    """A recorded torch.cuda.Event."""

    __slots__ = ("event",)

    def __init__(self, event: Any) -> None:
        self.event = event

    def done(self) -> bool:
        return bool(self.event.query())

    def wait(self) -> None:
        self.event.synchronize()


class CudaStreams:
    """One CUDA device. The compute stream is torch's current one at each call, so a runner may change it."""

    name = "cuda"

    def __init__(self, device: torch.device) -> None:
        """The runtime is looked up now: where it is missing, memory stays unpinned and ``pin`` says so."""
        cuda: Any = torch.cuda
        self.device = torch.device("cuda", cuda.current_device() if device.index is None else device.index)
        cuda.current_stream(self.device)  # Initializes CUDA, so that the runtime is loaded.
        self._cuda = cuda
        self._copies = cuda.Stream(self.device)
        self._runtime: CudaRuntime | None = None
        self._missing = ""
        try:
            self._runtime = CudaRuntime.of_this_process()
        except (PinError, OSError) as error:
            self._missing = str(error)

    def enter_thread(self) -> None:
        self._cuda.set_device(self.device)

    def owns(self, tensor: torch.Tensor) -> bool:
        return bool(tensor.is_cuda)

    def clone(self, rows: torch.Tensor) -> torch.Tensor:
        rows = rows.detach()
        if rows.is_neg() or rows.is_conj():  # Lazy bits of the view, which its bytes do not show.
            rows = rows.resolve_neg().resolve_conj()
        copy = torch.empty_like(rows, memory_format=torch.contiguous_format)
        return copy.copy_(rows)

    def cat(self, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat([*pieces])

    def mark_compute(self) -> StreamEvent:
        event = self._cuda.Event()
        event.record(self._cuda.current_stream(self.device))
        return CudaEvent(event)

    def hold_copies(self, event: StreamEvent) -> None:
        assert isinstance(event, CudaEvent)
        self._copies.wait_event(event.event)

    def copy(self, pairs: Sequence[CopyPair]) -> None:
        with self._cuda.stream(self._copies):
            for host, source in pairs:
                # cudaMemcpyAsync: truly so where the memory is registered, by whomever; else it returns when done.
                host.copy_(source, non_blocking=True)

    def mark_copies(self) -> StreamEvent:
        event = self._cuda.Event(blocking=True)  # The sender sleeps on it; it must not burn one of the engine's cores.
        event.record(self._copies)
        return CudaEvent(event)

    def drain(self) -> None:
        self._copies.synchronize()

    def pin(self, address: int, nbytes: int) -> None:
        if self._runtime is None:
            raise PinError(self._missing)
        self._runtime.register(address, nbytes)

    def unpin(self, address: int) -> None:
        if self._runtime is None:
            raise PinError(self._missing)
        self._runtime.unregister(address)
