"""Drives one StageCache with a workload and holds every row against the oracle."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import torch

from stagecache.cache import StageCache
from stagecache.errors import StageCacheError, UnreadableHitError
from stagecache.policy import ModelCachePolicy
from stagecache_wire.geometry import Geometry, KeySchema
from stagecache_wire.v1 import stagecache_pb2 as pb
from tests.crash.oracle import HIDDEN, RowKind
from tests.crash.workload import DEFERRED, KINDS, PASSING, SHARED, Step, View, Workload

POISON = 0xA5


class WrongError(AssertionError):
    """A row is wrong or missing, a step was lost, or something did not end in its time."""


@dataclass
class Open:
    """A saved step that nobody consumed yet."""

    step: Step
    step_id: int
    expected: dict[str, dict[str, bytes]] = field(default_factory=dict)


def tensor_of(kind: RowKind, rows: list[bytes]) -> torch.Tensor:
    """Rows as a tensor of its own memory."""
    dtype = getattr(torch, kind.dtype)
    if not rows:
        return torch.empty((0, *kind.shape), dtype=dtype)
    return torch.frombuffer(bytearray(b"".join(rows)), dtype=torch.uint8).view(dtype).reshape(len(rows), *kind.shape)


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


class Load:
    """One worker's steps, random but for the seed.

    Rows that were handed out are kept for a while and looked at again (S3); live buffers are spoilt after each save.
    """

    def __init__(
        self,
        socket: Path,
        seed: int,
        *,
        wait_s: float = 20.0,
        eager: float = 0.5,
        workload: Workload | None = None,
        **attach: Any,
    ) -> None:
        """wait_s: longest wait of a save or a hit. eager: how often some step is consumed right after a save.
        attach: also ``extra_blocks``, which the workload leaves alone."""
        self.rng = Random(seed * 7 + 1)
        self.workload = workload or Workload(seed)
        self.view = View(self.workload.block_size)
        self.depth = attach.pop("staging_depth", 4)
        self.cache = StageCache.attach(
            socket=socket,
            model="m",
            stage=attach.pop("stage", "s"),
            geometry=Geometry(
                num_blocks=self.workload.num_blocks + attach.pop("extra_blocks", 0),
                block_size=self.workload.block_size,
                staging_capacity_tokens=self.workload.capacity,
                staging_depth=self.depth,
                arena_bytes=attach.pop("arena_bytes", 1 << 20),
            ),
            view=self.view,
            policy=ModelCachePolicy(deferred_keys=DEFERRED),
            keys=[KeySchema(name, kind.dtype, kind.shape) for name, kind in KINDS.items()],
            staging_claim_timeout_s=wait_s,
            merge_timeout_s=wait_s,
            daemon_grace_s=attach.pop("daemon_grace_s", 60.0),
            gpu_staging_bytes=attach.pop("gpu_staging_bytes", 512),
            **attach,
        )
        if self.workload.sharing:
            ids = [key.key_id for key in self.cache.session.keys if key.schema.name in SHARED]
            answer = self.cache.session.rpc.join_namespace(
                pb.JoinNamespaceRequest(
                    model_fingerprint=str(seed), hash_algorithm="sha256", dtype="x", tensor_parallel_size=1, key_ids=ids
                ),
                wait_s,
            )
            assert answer.on, answer.why
            self.cache._saver.sharing._on = True
        self.eager = eager
        self.steps = 0
        self.checked_rows = 0
        self.unreadable = 0
        self._open: deque[Open] = deque()
        self._held: deque[tuple[torch.Tensor, bytes]] = deque()
        self.unsaved: Step | None = None
        """The last step, where it is one that never comes to its save."""

    def run_step(self) -> None:
        """One step, and perhaps the materialize of this or of an older one.

        Raises:
            WrongError: the first thing that is not as it must be.
        """
        try:
            self._begin_and_save(self.workload.next())
            while self._open and (len(self._open) >= self.depth or self.rng.random() < self.eager):
                self._consume(self.rng.randrange(len(self._open)))
        except StageCacheError as error:
            raise WrongError(f"step {self.steps}: {type(error).__name__}: {error}") from error
        while len(self._held) > 64:
            self._look_again()

    def finish(self) -> None:
        """Consume what is open, and hold the counters against what was done."""
        try:
            while self._open:
                self._consume(0)
            self.cache.session.wait_consumed(self.cache.session.log.head, 8.0, "the rest of the log")
        except StageCacheError as error:
            raise WrongError(f"at the end: {type(error).__name__}: {error}") from error
        while self._held:
            self._look_again()
        lost = self.workload.lost - bool(self.unsaved and self.unsaved.tokens)
        if self.cache.counters.lost_steps != lost:
            raise WrongError(f"{self.cache.counters.lost_steps} steps were lost, {lost} were never saved")
        if self.cache.counters.local_steps:
            raise WrongError(f"{self.cache.counters.local_steps} steps were not logged")

    def close(self) -> None:
        self._held.clear()
        self.cache.session.close(drain_s=0.2)

    # ---- parts of a step

    def _begin_and_save(self, step: Step) -> None:
        self.steps += 1
        if step.reset_before:
            self.cache.reset(cause="test")
        if step.fill:
            self.cache.fill(step.fill)
        self.cache.new_step_starts(step.plan)
        self.view.show(step)
        self.unsaved = None
        if not step.save:
            self.workload.was_lost(step)
            self.unsaved = step
            return
        live = {key: tensor_of(KINDS.get(key, PASSING), rows) for key, rows in step.rows.items()}
        n = step.tokens
        step_id = self.cache.save_outputs(
            live.get(HIDDEN),
            {key: value for key, value in live.items() if key != HIDDEN},
            num_tokens_unpadded=n,
            num_tokens_padded=n,
        )
        for value in live.values():
            value.view(torch.uint8).fill_(1 if value.dtype == torch.bool else POISON)
        self._open.append(Open(step, step_id, self.workload.saved(step)))
        if step.publish:
            self.cache.publish(step.publish)

    def _consume(self, index: int) -> None:
        entry = self._open[index]
        del self._open[index]
        if self.rng.random() < 0.1:
            self.cache.discard_step(entry.step_id)
            return
        try:
            out = self.cache.materialize(entry.step_id, [part.req_id for part in entry.step.parts])
        except UnreadableHitError:
            if not entry.step.unreadable:
                raise
            self.unreadable += 1
            return
        if entry.step.unreadable:
            raise WrongError(f"step {entry.step_id}: rows were guessed, for a hit on slots that nobody wrote")
        given: dict[str, Any] = {HIDDEN: out.hidden_states or {}, **out.mm_outputs}
        for key, by_request in entry.expected.items():
            for req_id, expected in by_request.items():
                tensor = given.get(key, {}).get(req_id)
                found = b"" if tensor is None else bytes_of(tensor)
                if found != expected:
                    raise WrongError(self._difference(entry, key, req_id, expected, found))
                self.checked_rows += len(expected) // KINDS.get(key, PASSING).row_bytes
                if tensor is not None and tensor.numel():
                    self._held.append((tensor, expected))

    def _look_again(self) -> None:
        tensor, expected = self._held.popleft()
        if bytes_of(tensor) != expected:
            raise WrongError("rows that were handed out have changed since (S3)")

    def _difference(self, entry: Open, key: str, req_id: str, expected: bytes, found: bytes) -> str:
        size = KINDS.get(key, PASSING).row_bytes
        part = next(part for part in entry.step.parts if part.req_id == req_id)
        wrong = [
            at
            for at in range(0, max(len(expected), len(found)), size)
            if expected[at : at + size] != found[at : at + size]
        ]
        return (
            f"step {entry.step_id} of {self.steps}, {key} of {req_id} (hit {part.hit}, blocks {part.blocks}, "
            f"@{part.first}+{part.count}): {len(expected) // size} rows expected, {len(found) // size} given, wrong at "
            f"positions {[at // size for at in wrong][:12]}"
        )


def wait_until(ready: Callable[[], bool], what: str, timeout_s: float = 10.0) -> None:
    """Poll until ``ready``.

    Raises:
        WrongError: not within ``timeout_s`` seconds.
    """
    deadline = time.monotonic() + timeout_s
    while not ready():
        if time.monotonic() > deadline:
            raise WrongError(f"{what}: not after {timeout_s:g} s")
        time.sleep(0.002)
