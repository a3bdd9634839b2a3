"""K4: what is no per-token row is copied at save and handed to each request, independent of every other's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from stagecache.device import CpuDevice
from stagecache.leftovers import for_request, snapshot

DEVICE = CpuDevice()


def nested() -> dict[str, Any]:
    return {
        "a": torch.arange(6.0).reshape(2, 3),
        "each": [torch.zeros(2), torch.ones(3)],
        "pair": (torch.full((1,), 7.0), "text"),
        "deep": {"x": [1, None, torch.tensor(5)]},
        "rate": 24000,
    }


def tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [found for item in value for found in tensors(item)] if isinstance(value, (list, tuple)) else []


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


def test_a_snapshot_is_equal_and_changes_with_nothing() -> None:
    live = nested()
    taken = snapshot(live, DEVICE)
    assert equal(taken, nested())
    for tensor in tensors(live):
        tensor.fill_(-1)
    live["each"].append(torch.zeros(1))
    assert equal(taken, nested())


def test_a_snapshot_of_a_view_is_no_view() -> None:
    live = torch.arange(10.0)
    taken = snapshot(live[2:4], DEVICE)
    live.zero_()
    assert taken.tolist() == [2.0, 3.0]
    assert snapshot(torch.arange(6).reshape(2, 3).T, DEVICE).is_contiguous()


@pytest.mark.parametrize("batch_size", [1, 4])
def test_each_request_gets_an_independent_whole(batch_size: int) -> None:
    taken = snapshot(nested(), DEVICE)
    first = for_request(taken, 0, batch_size, split_lists=True)
    second = for_request(taken, batch_size - 1, batch_size, split_lists=True)
    assert equal(first, nested())
    for tensor in tensors(first):
        tensor.fill_(-1)
    assert equal(second, nested())
    assert equal(taken, nested())


def test_a_list_with_an_entry_a_request_is_split_unless_told_otherwise() -> None:
    taken = snapshot([torch.zeros(2), torch.ones(3)], DEVICE)
    assert equal(for_request(taken, 1, 2, split_lists=True), torch.ones(3))
    assert equal(for_request(taken, 1, 2, split_lists=False), [torch.zeros(2), torch.ones(3)])
    assert equal(for_request(taken, 1, 3, split_lists=True), [torch.zeros(2), torch.ones(3)])
    assert equal(for_request({"in": taken}, 0, 2, split_lists=True), {"in": torch.zeros(2)})


def test_a_tensor_is_never_cut_whatever_its_first_dimension() -> None:
    assert for_request(torch.arange(2), 1, 2, split_lists=True).tolist() == [0, 1]
