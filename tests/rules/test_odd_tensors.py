"""K2, K4: tensors whose bytes are not what they say, and tensors without strides."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from stagecache import Geometry, StageCache
from stagecache.step import NewRequest, SchedulerStep
from tests.rules.test_failed_writes import Batch

GEOMETRY = Geometry(num_blocks=16, block_size=4, staging_capacity_tokens=32)


@pytest.fixture
def attached(daemon: Any) -> Any:
    view = Batch()
    cache = StageCache.attach(socket=daemon.socket, model="m", stage="odd", geometry=GEOMETRY, view=view)
    yield cache, view
    cache.close()


def prefill(cache: StageCache, view: Batch, req_id: str, first: int, blocks: list[int], value: Any) -> Any:
    cache.new_step_starts(SchedulerStep({req_id: 4}, [NewRequest(req_id, first, blocks)]))
    view.rows = [(req_id, first, blocks)]
    step = cache.save_outputs(torch.zeros(4, 2), {"odd": value}, num_tokens_unpadded=4, num_tokens_padded=4)
    return cache.materialize(step, [req_id]).mm_outputs["odd"][req_id]


COMPLEX = torch.view_as_complex(torch.arange(16, dtype=torch.float32).view(4, 2, 2))
PLAIN = torch.arange(12, dtype=torch.float32)


@pytest.mark.parametrize(
    "rows",
    [
        COMPLEX.conj(),
        torch._neg_view(PLAIN.view(4, 3)),
        COMPLEX.conj().imag,
        PLAIN.view(3, 4).t(),
        PLAIN.view(4, 3).clone().requires_grad_(),
        PLAIN.view(4, 3)[:, ::2],
        PLAIN[:1].expand(4),
        (PLAIN.view(4, 3) > 5),
        PLAIN.view(4, 3).to(torch.float8_e4m3fn),
    ],
    ids=["conj", "neg", "conj-imag", "transposed", "grad", "sliced", "expanded", "bool", "float8"],
)
def test_rows_are_what_the_tensor_says_not_what_its_bytes_say(attached: Any, rows: torch.Tensor) -> None:
    """K2: handed out and hit alike."""
    cache, view = attached
    wanted = rows.detach().clone().contiguous().resolve_conj().resolve_neg()
    own = prefill(cache, view, "a", 0, [0], rows)
    merged = prefill(cache, view, "b", 4, [0, 1], rows)
    for found in (own, merged[:4], merged[4:]):
        assert found.dtype == rows.dtype
        assert found.to(torch.complex64).tolist() == wanted.to(torch.complex64).tolist()


@pytest.mark.parametrize(
    "value",
    [
        torch.eye(4).to_sparse(),
        torch.eye(4).to_sparse_csr(),
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        torch.empty(4, 2, device="meta"),
        torch.empty(4, 0),
        torch.tensor(3.0),
    ],
    ids=["sparse", "csr", "nested", "meta", "no-bytes", "scalar"],
)
def test_a_tensor_that_no_pool_can_hold_is_a_leftover(attached: Any, value: torch.Tensor) -> None:
    """K4: whole, to every request, and the step is kept."""
    cache, view = attached
    found = prefill(cache, view, "a", 0, [0], value)
    assert found.layout == value.layout
    assert found.is_nested == value.is_nested
    assert value.is_nested or found.shape == value.shape
    assert cache.counters.lost_steps == 0
    assert "odd" not in {key.schema.name for key in cache._keys.open.values()}
