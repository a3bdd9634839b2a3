"""The one seam for the device: clones and copies of rows. On the CPU all of them are done when they return; where
outputs are on a device with streams, stream_device.py takes its place.

Copies go through memmove, not ``Tensor.copy_``: from 32,768 elements on torch spreads a copy over its OpenMP threads,
and on a busy machine the barrier at its end was seen to take 8 ms for 128 KiB. Small copies keep the interpreter lock,
since giving it up may cost a switch interval when another thread runs Python; large ones release it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from stagecache.copies import Copies

RELEASE_BYTES: Final = 1 << 20
"""Copies of at least so many bytes (about 100 µs) let other threads run meanwhile."""

_signature = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_holding = ctypes.PyDLL(None).memmove
_holding.argtypes = _signature
_holding.restype = ctypes.c_void_p
_releasing = ctypes.CDLL(None).memmove
_releasing.argtypes = _signature
_releasing.restype = ctypes.c_void_p


def move_bytes(target: int, source: int, size: int) -> None:
    """Copy ``size`` bytes from one address of this process to another."""
    move = _holding if size < RELEASE_BYTES else _releasing
    move(target, source, size)


def copy_rows(target: torch.Tensor, source: torch.Tensor) -> None:
    """target[:] = source for host tensors of one dtype and shape; a single memmove where both are contiguous."""
    if source.is_neg() or source.is_conj():  # Lazy bits of the view, which its bytes do not show.
        source = source.resolve_neg().resolve_conj()
    if not (source.is_contiguous() and target.is_contiguous() and source.is_cpu):
        target.copy_(source)
        return
    size = source.nbytes
    move = _holding if size < RELEASE_BYTES else _releasing
    move(target.data_ptr(), source.data_ptr(), size)


def clone_rows(source: torch.Tensor) -> torch.Tensor:
    """An independent contiguous copy in host memory."""
    copy = torch.empty_like(source, memory_format=torch.contiguous_format)
    if source.is_contiguous() and source.is_cpu and copy.is_cpu and not (source.is_neg() or source.is_conj()):
        size = source.nbytes
        move = _holding if size < RELEASE_BYTES else _releasing
        move(copy.data_ptr(), source.data_ptr(), size)
    else:
        copy_rows(copy, source)
    return copy


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether the tensor is an ordinary array: strided, not nested, with data."""
    return tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_meta


class CpuDevice:
    """Copies for tensors in host memory."""

    name = "cpu"

    def clone(self, rows: torch.Tensor) -> torch.Tensor:
        """An independent copy on the same device, contiguous."""
        return clone_rows(rows.detach())

    def stage(self, page: torch.Tensor, rows: torch.Tensor) -> None:
        """Copy rows into a staging page. page: [n, *row shape], host; rows: the same shape and dtype."""
        copy_rows(page, rows.detach() if rows.requires_grad else rows)

    def gather(self, page: torch.Tensor, pieces: Sequence[torch.Tensor]) -> None:
        """Copy pieces of clones into a page, one behind the other. page: [sum of their rows, *row shape], host."""
        self.stage(page, torch.cat([*pieces]))

    def to_host(self, rows: torch.Tensor) -> torch.Tensor:
        """An independent contiguous copy in host memory."""
        return clone_rows(rows.detach()) if rows.is_cpu else rows.detach().contiguous().cpu()

    def seal(self) -> Copies | None:
        """The copies asked for since the last ``seal``, on their way; None where all of them are done."""
        return None

    def snapshot(self, value: torch.Tensor) -> torch.Tensor:
        """A copy in host memory of any tensor, also of one that has no strides; one without data stays as it is."""
        if is_plain(value):
            return self.to_host(value)
        return value if value.is_meta else value.detach().clone().cpu()
