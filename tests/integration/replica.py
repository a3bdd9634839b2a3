"""A replica of a stage whose rows tell their content: a row is made of the tokens up to it, so any replica that
computes a prompt or is filled with it must show the same bytes, and no other prompt's.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch

from stagecache.cache import StageCache
from stagecache.policy import HIDDEN_KEY, ModelCachePolicy
from stagecache.sharing import Joined, Namespace
from stagecache.step import NewRequest, SchedulerStep
from stagecache_wire.geometry import Geometry, KeySchema

BLOCK = 4
NUM_BLOCKS = 16
HIDDEN = KeySchema(HIDDEN_KEY, "float32", (3,))
CONTEXT = KeySchema("ctx", "int64", (2,))
LATE = KeySchema("late", "float32", (2, 2))
MODEL = Namespace("weights 1", "sha256_cbor", "seed", "float32")


def rows_of(schema: KeySchema, tokens: Sequence[int], first: int, count: int) -> torch.Tensor:
    """[count, *row_shape] of positions first, first + 1, ...: bytes that follow from the tokens up to each."""
    made = []
    for position in range(first, first + count):
        seed = sha256(f"{schema.name} {list(tokens[: position + 1])}".encode()).digest()
        made.append((seed * (schema.row_bytes // 32 + 1))[: schema.row_bytes])
    raw = torch.frombuffer(bytearray(b"".join(made)), dtype=torch.uint8)
    return raw.view(getattr(torch, schema.dtype)).reshape(count, *schema.row_shape)


def hashes_of(tokens: Sequence[int], salt: str = "") -> list[bytes]:
    """Hashes of the full blocks of a prompt."""
    return [sha256(f"{salt}{list(tokens[:end])}".encode()).digest() for end in range(BLOCK, len(tokens) + 1, BLOCK)]


def same(found: torch.Tensor | None, expected: torch.Tensor) -> bool:
    """Bit for bit."""
    return found is not None and torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


class Replica:
    """One attached worker, one request a step."""

    def __init__(
        self, socket: Path, *, keys: Sequence[KeySchema] = (HIDDEN, CONTEXT), deferred: Sequence[str] = (), **more: Any
    ) -> None:
        self.block_size = BLOCK
        self.keys = list(keys)
        self._part: tuple[str, list[int], int] = ("", [], 0)
        self._serial = 0
        self.cache = StageCache.attach(
            socket=socket,
            model="m",
            stage=more.pop("stage", "shared"),
            geometry=Geometry(NUM_BLOCKS, BLOCK, 64, arena_bytes=1 << 16),
            view=self,
            policy=ModelCachePolicy(deferred_keys=frozenset(deferred)),
            keys=self.keys,
            merge_timeout_s=10.0,
            **more,
        )

    def join(self, namespace: Namespace = MODEL) -> Joined:
        return self.cache.join_namespace(namespace)

    def run(
        self,
        tokens: Sequence[int],
        blocks: Sequence[int],
        *,
        hit: int = 0,
        fill: Sequence[int] = (),
        publish: Sequence[int] = (),
        salt: str = "",
        emit: Sequence[str] = (),
        finish: Sequence[str] = (),
    ) -> tuple[str, dict[str, torch.Tensor]]:
        """A prompt whose first ``hit`` positions were not computed; the id of its request and its rows by key.

        fill, publish: indices of blocks of the prompt that the scheduler says so of. emit: keys of the step; all.
        """
        self._serial += 1
        req_id, hashes = f"r{self._serial}", hashes_of(tokens, salt)
        count = len(tokens) - hit
        step: Any = SchedulerStep({req_id: count}, finished_req_ids=set(finish))
        step.scheduled_new_reqs = [NewRequest(req_id, hit, (list(blocks),))]
        step.stagecache_fill = [(blocks[index], hashes[index]) for index in fill]
        step.stagecache_published = {req_id: [(blocks[index], hashes[index]) for index in publish]}
        self.cache.new_step_starts(step)
        self._part = req_id, list(blocks), hit
        live = {key.name: rows_of(key, tokens, hit, count) for key in self.keys if not emit or key.name in emit}
        step_id = self.cache.save_outputs(
            live.pop(HIDDEN_KEY), live, num_tokens_unpadded=count, num_tokens_padded=count
        )
        outputs = self.cache.materialize(step_id, [req_id])
        assert outputs.hidden_states is not None
        return req_id, {
            HIDDEN_KEY: outputs.hidden_states[req_id],
            **{k: v[req_id] for k, v in outputs.mm_outputs.items()},
        }

    def consumed(self) -> None:
        """Wait until the daemon has done all that was logged."""
        self.cache.session.wait_consumed(self.cache.session.log.head, 10.0, "the log")

    # ---- BatchView

    def req_ids(self) -> list[str]:
        return [self._part[0]]

    def num_computed(self) -> np.ndarray[Any, Any]:
        return np.array([self._part[2]], np.int32)

    def block_table(self) -> np.ndarray[Any, Any]:
        table = np.zeros((1, NUM_BLOCKS), np.int32)
        table[0, : len(self._part[1])] = self._part[1]
        return table

    def close(self) -> None:
        self.cache.close()
