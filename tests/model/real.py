"""The real client behind the calls that are compared: plain steps and bytes go in, bytes come out.

torch is imported late: the model and its own tests need none.
"""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.model.steps import HIDDEN, Merged, Outputs, Refused, Rules, Step, Tensor

if TYPE_CHECKING:
    import torch

POISON = 0xA5
"""Fills padding, and live buffers after save: bytes that no result may show."""


class View:
    """The live batch. As in the runner it changes after new_step_starts, so it shows the last step until then."""

    def __init__(self, block_size: int):
        self.block_size = block_size
        self._ids: list[str] = []
        self._first = np.zeros(64, np.int32)
        self._table = np.zeros((64, 64), np.int32)

    def req_ids(self) -> list[str]:
        return list(self._ids)

    def num_computed(self) -> np.ndarray:
        return self._first

    def block_table(self) -> np.ndarray:
        return self._table

    def show(self, step: Step) -> None:
        self._ids = [request.req_id for request in step.batch]
        for index, request in enumerate(step.batch):
            self._first[index] = request.first
            self._table[index, : len(request.blocks)] = request.blocks


class SchedulerOutputs:
    """Makes what vLLM's scheduler would send for a step; remembers block tables, since only new blocks travel."""

    def __init__(self) -> None:
        self._tables: dict[str, tuple[int, ...]] = {}
        self._epoch = 0

    def of(self, step: Step) -> SimpleNamespace:
        for req_id in step.finished:
            self._tables.pop(req_id, None)
        new = []
        cached = SimpleNamespace(req_ids=[], resumed_req_ids=set(), new_block_ids=[], num_computed_tokens=[])
        counts: dict[str, int] = {}
        for request in step.batch:
            had = self._tables.get(request.req_id, ())
            self._tables[request.req_id] = request.blocks
            if request.how == "idle":
                continue
            counts[request.req_id] = request.count
            if request.how == "new":
                new.append(
                    SimpleNamespace(
                        req_id=request.req_id,
                        num_computed_tokens=request.first,
                        block_ids=(list(request.blocks),),
                    )
                )
                continue
            resumed = request.how == "resumed"
            assert resumed or had == request.blocks[: len(had)], f"a table may only grow: {request}"
            added = request.blocks if resumed else request.blocks[len(had) :]
            cached.req_ids.append(request.req_id)
            cached.new_block_ids.append((list(added),) if added else None)
            cached.num_computed_tokens.append(request.first)
            if resumed:
                cached.resumed_req_ids.add(request.req_id)
        self._epoch += step.new_epoch
        return SimpleNamespace(
            stagecache_epoch=self._epoch,
            finished_req_ids=set(step.finished),
            preempted_req_ids=set(step.preempted) or None,
            scheduled_new_reqs=new,
            scheduled_cached_reqs=cached,
            num_scheduled_tokens=counts,
            total_num_scheduled_tokens=sum(max(0, count) for count in counts.values()),
        )


def to_torch(tensor: Tensor) -> torch.Tensor:
    """A tensor of its own memory."""
    import torch

    dtype = getattr(torch, tensor.dtype)
    flat = torch.frombuffer(bytearray(b"".join(tensor.rows) or b"\0" * 16), dtype=torch.uint8)
    if not tensor.rows:
        return torch.empty((0, *tensor.row_shape), dtype=dtype)
    return flat.view(dtype).reshape(len(tensor.rows), *tensor.row_shape)


def raw_bytes(value: torch.Tensor) -> bytes:
    """The elements of a tensor in host memory, in order."""
    value = value.contiguous()
    return ctypes.string_at(value.data_ptr(), value.numel() * value.element_size()) if value.numel() else b""


def from_torch(value: torch.Tensor, raw: bytes) -> Tensor:
    """``value`` as bytes. raw: what ``raw_bytes`` read of it."""
    rows = value.shape[0]
    size = len(raw) // rows if rows else 0
    return Tensor(
        str(value.dtype).removeprefix("torch."),
        tuple(value.shape[1:]),
        tuple(raw[index * size : (index + 1) * size] for index in range(rows)),
    )


def spoil(tensor: torch.Tensor) -> None:
    """Fill it with bytes that no result may show."""
    import torch

    if tensor.numel():
        tensor.view(torch.uint8).fill_(1 if tensor.dtype == torch.bool else POISON)


def _nested(value: Any, convert: Any) -> Any:
    """``value`` with every tensor in it converted."""
    if isinstance(value, dict):
        return {name: _nested(inner, convert) for name, inner in value.items()}
    if isinstance(value, (list, tuple)) and not isinstance(value, Tensor):
        return [_nested(inner, convert) for inner in value]
    return convert(value)


class RealCache:
    """A StageCache of one session, driven with plain values.

    It spoils every live buffer right after save (W1, S3, K4) and keeps what was handed out, so that
    ``held_unchanged`` can tell whether any of it changed since.
    """

    def __init__(self, rules: Rules, socket: str, **settings: Any):
        from stagecache import Geometry, KeySchema, ModelCachePolicy, StageCache

        self.rules = rules
        self.view = View(rules.block_size)
        self.outputs = SchedulerOutputs()
        self.held: list[tuple[Any, bytes]] = []
        geometry = {
            "num_blocks": settings.pop("num_blocks", 16),
            "block_size": rules.block_size,
            "staging_capacity_tokens": rules.capacity,
            "staging_depth": rules.depth,
        }
        geometry.update({name: settings.pop(name) for name in ("arena_bytes", "max_results") if name in settings})
        roles = {**dict.fromkeys(rules.deferred, "token"), **rules.roles}
        self.cache = StageCache.attach(
            socket=socket,
            model=settings.pop("model", "model"),
            stage=settings.pop("stage", "stage0"),
            geometry=Geometry(**geometry),
            view=self.view,
            policy=ModelCachePolicy(
                needs_full_hidden_states=rules.needs_hidden, deferred_keys=rules.deferred, key_roles=roles
            ),
            explicit_acks=rules.explicit_acks,
            keys=[KeySchema(key, schema.dtype, schema.row_shape) for key, schema in rules.schemas.items()],
            **settings,
        )
        self.next_step: Step | None = None

    def new_step_starts(self, step: Step) -> None:
        with _errors():
            self.cache.new_step_starts(self.outputs.of(step))
        self.view.show(step)

    def save_outputs(self, outputs: Outputs) -> int:
        live: list[torch.Tensor] = []

        def buffer(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            live.append(self.live_buffer(to_torch(value)))
            return live[-1]

        hidden = None if outputs.hidden is None else buffer(outputs.hidden)
        mm = {key: _nested(value, buffer) for key, value in outputs.mm.items()}
        with _errors():
            step_id: int = self.cache.save_outputs(
                hidden, mm, num_tokens_unpadded=outputs.unpadded, num_tokens_padded=outputs.padded
            )
        for tensor in live:
            self.spoil(tensor)
        return step_id

    def live_buffer(self, values: torch.Tensor) -> torch.Tensor:
        """A buffer of the model's with these values."""
        return values

    def spoil(self, tensor: torch.Tensor) -> None:
        """A later forward overwrites a buffer."""
        spoil(tensor)

    def materialize(self, step_id: int, req_ids: list[str]) -> Merged:
        with _errors():
            given = self.cache.materialize(step_id, req_ids)
        by_key: dict[str, dict[str, Any]] = {HIDDEN: given.hidden_states or {}, **(given.mm_outputs or {})}
        out: Merged = {}
        for key, values in by_key.items():
            for req_id, value in values.items():
                plain = _nested(value, self._hold)
                if not isinstance(plain, Tensor) or plain.rows:
                    out.setdefault(key, {})[req_id] = plain
        return out

    def discard_step(self, step_id: int) -> None:
        with _errors():
            self.cache.discard_step(step_id)

    def reset(self) -> None:
        with _errors():
            self.cache.reset(cause="test")

    def ack(self, req_id: str, upto: int) -> None:
        self.cache.ack(req_id, upto)

    def held_unchanged(self) -> bool:
        """S3: whether all that was handed out since the last call still reads as it did then; lets go of it."""
        same = all(raw_bytes(value) == raw for value, raw in self.held)
        self.held.clear()
        return same

    def close(self) -> None:
        self.held.clear()
        self.cache.close()

    def _hold(self, value: Any) -> Any:
        import torch

        if not isinstance(value, torch.Tensor):
            return value
        raw = raw_bytes(value)
        self.held.append((value, raw))
        return from_torch(value, raw)


class _errors:  # noqa: N801
    """Turns the client's errors into Refused with the error's class name."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        from stagecache.errors import StageCacheError

        if isinstance(error, StageCacheError):
            raise Refused({type(error).__name__}, str(error)) from error
