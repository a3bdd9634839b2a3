"""Where the cases of check.py run: live buffers that a forward fills late and the next one overwrites."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from stagecache import Geometry, KeySchema, ModelCachePolicy, StageCache
from stagecache.cuda import CudaStreams
from stagecache.device import CpuDevice
from stagecache.step import CachedRequests, NewRequest, SchedulerStep
from stagecache.stream_device import StreamDevice
from stagecache.streams import PinError

HIDDEN = "__hidden_states__"
POISON = -77.0
LATE_MS = 3


class Bed:
    """Host memory: a forward is done when it is asked for. check.py's own control."""

    name = "cpu"

    def device(self) -> CpuDevice:
        """A new device seam for one cache."""
        return CpuDevice()

    def unpinned(self) -> CpuDevice:
        """One whose memory cannot be pinned."""
        return CpuDevice()

    def forward(self, values: torch.Tensor, padding: int = 0) -> torch.Tensor:
        """A live buffer that holds ``values`` when a late forward is done; ``padding`` rows of noise behind them."""
        noise = torch.full((padding, *values.shape[1:]), POISON).to(values.dtype)
        return torch.cat([values, noise])

    def overwrite(self, live: torch.Tensor) -> None:
        """The next forward uses the buffer."""
        live.fill_(POISON)

    def settle(self) -> None:
        """Wait for the device."""


class CudaBed(Bed):
    """A GPU."""

    name = "gpu"

    def __init__(self) -> None:
        self.torch_device = torch.device("cuda", torch.cuda.current_device())
        self._cycles = _cycles_of(LATE_MS)

    def device(self) -> CpuDevice:
        return StreamDevice(CudaStreams(self.torch_device))

    def unpinned(self) -> CpuDevice:
        streams = CudaStreams(self.torch_device)

        def refuse(address: int, nbytes: int) -> None:
            raise PinError("refused by the check")

        streams.pin = refuse  # type: ignore[method-assign]
        return StreamDevice(streams)

    def forward(self, values: torch.Tensor, padding: int = 0) -> torch.Tensor:
        source = super().forward(values, padding).to(self.torch_device)
        live = torch.full_like(source, POISON)
        torch.cuda.synchronize()
        torch.cuda._sleep(self._cycles)
        live.copy_(source)
        return live

    def settle(self) -> None:
        torch.cuda.synchronize()


def _cycles_of(milliseconds: float) -> int:
    """Cycles of torch's sleep kernel for so long, by measurement."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(1 << 20)
    begin.record()
    torch.cuda._sleep(1 << 24)
    end.record()
    torch.cuda.synchronize()
    return int((1 << 24) * milliseconds / max(begin.elapsed_time(end), 1e-3))


class Worker:
    """One cache, its live batch, and rows that are told apart by request and position."""

    def __init__(
        self,
        bed: Bed,
        socket: Path,
        *,
        hidden: int = 32,
        capacity: int = 256,
        depth: int = 4,
        num_blocks: int = 256,
        device: CpuDevice | None = None,
        deferred: frozenset[str] = frozenset(),
        **settings: Any,
    ) -> None:
        self.bed = bed
        self.hidden = hidden
        self._ids: list[str] = []
        self._first = np.zeros(0, np.int64)
        self._table = np.zeros((0, 1), np.int64)
        self._known: set[str] = set()
        self._fill = itertools.count(1)
        self.cache = StageCache.attach(
            socket=socket,
            model="check",
            stage=f"check-{bed.name}",
            geometry=Geometry(num_blocks, 16, capacity, depth, 8 << 20),
            view=self,
            policy=ModelCachePolicy(deferred_keys=deferred),
            keys=[KeySchema(HIDDEN, "bfloat16", (hidden,))],
            device=device or bed.device(),
            **settings,
        )

    def req_ids(self) -> list[str]:
        return self._ids

    def num_computed(self) -> Any:
        return self._first

    def block_table(self) -> Any:
        return self._table

    def begin(self, *batch: tuple[str, Sequence[int], int, int], finished: Sequence[str] = ()) -> int:
        """new_step_starts of (request, blocks, first position, tokens); returns the step's tokens."""
        step = self.plan(*batch, finished=finished)
        self.cache.new_step_starts(step)
        self.show(*batch)
        return step.total_num_scheduled_tokens

    def plan(self, *batch: tuple[str, Sequence[int], int, int], finished: Sequence[str] = ()) -> SchedulerStep:
        """What the scheduler sends for such a step."""
        self._known -= set(finished)
        new = [NewRequest(req, first, list(blocks)) for req, blocks, first, _ in batch if req not in self._known]
        old = [(req, first) for req, _, first, _ in batch if req in self._known]
        self._known |= {req for req, *_ in batch}
        cached = CachedRequests([req for req, _ in old], set(), [None] * len(old), [first for _, first in old])
        counts = {req: count for req, _, _, count in batch}
        return SchedulerStep(counts, new, cached, finished_req_ids=set(finished))

    def show(self, *batch: tuple[str, Sequence[int], int, int]) -> None:
        """The runner has taken the step into its live batch."""
        self._ids = [req for req, *_ in batch]
        self._first = np.array([first for _, _, first, _ in batch], np.int64)
        self._table = np.zeros((len(batch), max((len(blocks) for _, blocks, *_ in batch), default=1)), np.int64)
        for row, (_, blocks, _, _) in enumerate(batch):
            self._table[row, : len(blocks)] = blocks

    def rows(self, count: int) -> torch.Tensor:
        """bf16 [count, hidden]: rows that no other call gives."""
        maker = torch.Generator().manual_seed(next(self._fill))
        bits = torch.randint(-(1 << 14), 1 << 14, (count, self.hidden), generator=maker, dtype=torch.int16)
        return bits.view(torch.bfloat16)

    def save(self, values: torch.Tensor, outputs: dict[str, torch.Tensor] | None = None, padding: int = 0) -> int:
        """A late forward yields these; they are saved, and overwritten at once."""
        live = self.bed.forward(values, padding)
        more = {name: self.bed.forward(tensor, padding) for name, tensor in (outputs or {}).items()}
        count = len(values)
        step = self.cache.save_outputs(live, more, num_tokens_unpadded=count, num_tokens_padded=count + padding)
        for tensor in (live, *more.values()):
            self.bed.overwrite(tensor)
        return step

    def close(self) -> None:
        self.cache.close()


def same(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """
    Raises:
        AssertionError: the bytes differ.
    """
    assert found.device.type == "cpu", f"{what}: rows on {found.device}"
    assert found.shape == expected.shape, f"{what}: {tuple(found.shape)} instead of {tuple(expected.shape)}"
    equal = torch.equal(found.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8))
    assert equal, f"{what}: wrong rows"
