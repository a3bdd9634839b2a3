"""Outputs that are no per-token rows: copied at save, handed to each request at materialize (K4)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from stagecache.device import CpuDevice

_HOST = CpuDevice()


def snapshot(value: Any, device: CpuDevice) -> Any:
    """A copy in host memory that no later forward can change: tensors cloned, containers rebuilt, the rest as it is."""
    if isinstance(value, torch.Tensor):
        return device.snapshot(value)
    if isinstance(value, Mapping):
        return {key: snapshot(item, device) for key, item in value.items()}
    if isinstance(value, list):
        return [snapshot(item, device) for item in value]
    if isinstance(value, tuple):
        return tuple(snapshot(item, device) for item in value)
    return value


def for_request(value: Any, index: int, batch_size: int, *, split_lists: bool) -> Any:
    """The part of a snapshot that belongs to the request at ``index`` of the batch, independent of every other's.

    A tensor goes out whole, its first dimension uncut. A list with one entry a request is one entry each, unless
    ``split_lists`` is False (vLLM-Omni splits lists itself, later); any other list goes out whole. Mappings and tuples
    go by their values.
    """
    if isinstance(value, torch.Tensor):
        return _HOST.snapshot(value)
    if isinstance(value, Mapping):
        return {key: for_request(item, index, batch_size, split_lists=split_lists) for key, item in value.items()}
    if isinstance(value, list):
        if split_lists and len(value) == batch_size:
            return whole(value[index])
        return [whole(item) for item in value]
    if isinstance(value, tuple):
        return tuple(whole(item) for item in value)
    return value


def whole(value: Any) -> Any:
    """An independent copy of a snapshot."""
    if isinstance(value, torch.Tensor):
        return _HOST.snapshot(value)
    if isinstance(value, Mapping):
        return {key: whole(item) for key, item in value.items()}
    if isinstance(value, list):
        return [whole(item) for item in value]
    if isinstance(value, tuple):
        return tuple(whole(item) for item in value)
    return value
