"""Prefix blocks in the node's daemon: a session whose keys are the KV of each layer.

The session is a window, not a mirror: its few blocks are where prefix blocks stand on their way. The log orders what
happens to them, so a block may be written again as soon as the record before is appended:

    save     SAVE (rows of all layers), PUBLISH (block, hash)     nothing is waited for
    load     FILL (block, hash), BEGIN (gather of all layers)     waited for, then copied into the worker's pages

PUBLISH stands behind its SAVE and the daemon keeps a block when all of its rows are there, so a worker that is killed
anywhere has published whole blocks or none. One thread owns a store.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stagecache.cache import StageCache
from stagecache.diffusion.identity import HASH_SEED
from stagecache.diffusion.model import KVShape
from stagecache.diffusion.pages import BlockTable, KVPages
from stagecache.errors import StageCacheError
from stagecache.mapping import dtype_name
from stagecache.policy import ModelCachePolicy
from stagecache.sharing import NamedBlock, Namespace
from stagecache.step import NewRequest, SchedulerStep
from stagecache_wire.geometry import Geometry, KeySchema
from stagecache_wire.v1 import stagecache_pb2 as pb

logger = logging.getLogger("stagecache")

CALL_TIMEOUT_S = 5.0
"""A call that takes longer is given up: the request computes its prefix then."""


class NodeStore:
    """The node's prefix blocks for one worker. Made by ``NodeStore.attach``.

    Attributes:
        on: whether the node keeps blocks for this stage; where not, nothing is saved and nothing is hit.
    """

    def __init__(self, cache: StageCache, window: Window, keys: Sequence[str], dtype: str) -> None:
        self.on = False
        self._cache = cache
        self._window = window
        self._keys = list(keys)
        self._dtype = dtype
        self._fingerprint = ""
        self._joined: tuple[str, int] = ("", 0)
        self._leases: dict[str, list[Sequence[bytes]]] = {}

    @classmethod
    def attach(
        cls,
        socket: str | os.PathLike[str],
        shape: KVShape,
        *,
        model: str,
        stage: str,
        block_size: int,
        window_blocks: int = 32,
        daemon_grace_s: float = 2.0,
    ) -> NodeStore:
        """Attach this process to the daemon at ``socket``.

        shape: KV of one token. window_blocks: blocks that travel at once; the session takes about six times their
        bytes of the daemon's memory, whatever the number of the worker's pages.

        Raises:
            DaemonUnavailableError: nobody answers at the socket.
            AttachError: refused; the class and the text say why and what to change.
        """
        dtype = dtype_name(shape.dtype)
        keys = [KeySchema(f"kv.{layer}", dtype, shape.row_shape) for layer in range(shape.layers)]
        tokens = window_blocks * block_size
        # A load's rows of all layers, in what is left beside the eighth that is set aside; one more until a finalizer
        # has given the last one's back.
        arena = 3 * tokens * sum(key.row_bytes for key in keys) + (1 << 20)
        geometry = Geometry(window_blocks, block_size, tokens, 2, arena, max(64, 4 * shape.layers))
        names = [key.name for key in keys]
        window = Window()
        cache = StageCache.attach(
            socket=socket,
            model=model,
            stage=stage,
            geometry=geometry,
            view=window,
            policy=ModelCachePolicy(needs_full_hidden_states=False, span_keys=frozenset(names)),
            keys=keys,
            staging_claim_timeout_s=CALL_TIMEOUT_S,
            merge_timeout_s=CALL_TIMEOUT_S,
            daemon_grace_s=daemon_grace_s,
        )
        return cls(cache, window, names, dtype)

    def join(self, fingerprint: str) -> None:
        """Say what the model is: blocks are shared by workers whose fingerprint, KV shape and stage are equal.

        Where the node keeps no blocks, a warning says why and ``on`` stays False.

        Raises:
            StageCacheError: the daemon refused, or went away.
        """
        self._fingerprint = fingerprint
        joined = self._cache.join_namespace(Namespace(fingerprint, "sha256_cbor", HASH_SEED, self._dtype))
        session = self._cache.session
        self._joined = self._standing()
        self.on = joined.on
        if not joined.on:
            logger.warning("stagecache: the node keeps no prefix blocks for stage %s: %s", session.stage, joined.why)

    def acquire(self, request_id: str, rows: Sequence[Sequence[bytes]]) -> list[int]:
        """How many leading hashes of each row the node has; held until ``release``, or this process' end.

        Every call names all that this store holds, so a daemon that restarted knows it again.
        """
        if not self.on or not any(rows):
            return [0] * len(rows)
        self._leases[request_id] = list(rows)
        leases = [(f"{name}/{i}", hashes) for name, spans in self._leases.items() for i, hashes in enumerate(spans)]
        try:
            self._rejoin()
            answer = self._cache.session.rpc.acquire_blocks(
                pb.AcquireBlocksRequest(
                    request_ids=[name for name, _ in leases],
                    hashes=b"".join(block_hash for _, hashes in leases for block_hash in hashes),
                    span_blocks=[len(hashes) for _, hashes in leases],
                    all=True,
                ),
                CALL_TIMEOUT_S,
            )
        except StageCacheError as error:
            logger.warning("stagecache: prefix blocks of request %s cannot be asked for: %s", request_id, error)
            del self._leases[request_id]
            return [0] * len(rows)
        held = list(answer.held)[-len(rows) :]
        if not any(held):
            del self._leases[request_id]
        return held

    def release(self, request_id: str) -> None:
        """End what a request holds. Where the daemon cannot be told, the next ``acquire`` does."""
        rows = self._leases.pop(request_id, None)
        if rows is None:
            return
        names = [f"{request_id}/{i}" for i in range(len(rows))]
        try:
            self._cache.session.rpc.release_blocks(pb.ReleaseBlocksRequest(request_ids=names), CALL_TIMEOUT_S)
        except StageCacheError as error:
            logger.warning("stagecache: the hold of request %s was not ended: %s", request_id, error)

    def load(self, request_id: str, hits: Mapping[int, bytes], pages: KVPages) -> None:
        """Write the content of each hash into its page. hits: hash by page, held by ``acquire``.

        Raises:
            StageCacheError: one of them could not be had; pages may have been written in part.
        """
        for part in self._parts(hits):
            slots = list(range(len(part)))
            count = len(slots) * pages.block_size
            name = self._window.show(request_id, slots, computed=count)
            self._begin(name, slots, computed=count, scheduled=0, fill=list(zip(slots, part.values(), strict=True)))
            step = self._cache.save_outputs(None, {}, num_tokens_unpadded=0, num_tokens_padded=0)
            rows = self._cache.materialize(step, [name]).mm_outputs
            table = BlockTable(list(part))
            for layer, key in enumerate(self._keys):
                pages.write(layer, table, rows[key].pop(name))

    def save(self, request_id: str, blocks: Mapping[int, bytes], pages: KVPages) -> int:
        """Hand complete pages to the node under their hashes. They may be written again once this returns.

        blocks: hash by page. Returns how many went.

        Raises:
            StageCacheError: not all of them went.
        """
        if not self.on:
            return 0
        published = 0
        for part in self._parts(blocks):
            slots = list(range(len(part)))
            count = len(slots) * pages.block_size
            name = self._window.show(request_id, slots, computed=0)
            self._begin(name, slots, computed=0, scheduled=count)
            table = BlockTable(list(part))
            rows = {key: pages.read(layer, table, len(part)) for layer, key in enumerate(self._keys)}
            step = self._cache.save_outputs(None, rows, num_tokens_unpadded=count, num_tokens_padded=count)
            self._cache.discard_step(step)
            published += self._cache.publish(list(zip(slots, part.values(), strict=True)))
        return published

    def wait(self, timeout_s: float = CALL_TIMEOUT_S) -> None:
        """Return once the node has done everything that was handed to it; for tests and measurements.

        Raises:
            StageCacheError: not in ``timeout_s`` seconds, or the daemon is gone.
        """
        session = self._cache.session
        session.wait_consumed(session.log.head, timeout_s, "the log's end")

    def close(self) -> None:
        """Detach. Blocks that were published stay on the node."""
        self._cache.close()

    def _parts(self, blocks: Mapping[int, bytes]) -> Iterator[dict[int, bytes]]:
        """As many blocks at a time as the window has."""
        items, size = list(blocks.items()), self._cache.session.geometry.num_blocks
        for start in range(0, len(items), size):
            yield dict(items[start : start + size])

    def _begin(
        self, name: str, blocks: list[int], *, computed: int, scheduled: int, fill: Sequence[NamedBlock] = ()
    ) -> None:
        """A step of one request, which is all that the window holds; the one before ends with it."""
        counts = {name: scheduled} if scheduled else {}
        request = NewRequest(name, computed, blocks)
        self._cache.new_step_starts(
            TransferStep(counts, [request], finished_req_ids=self._window.take_ended(), stagecache_fill=fill)
        )

    def _rejoin(self) -> None:
        """Join again where a new epoch or a new session took the last join back: the model is still what it was."""
        if self._standing() != self._joined:
            self.join(self._fingerprint)

    def _standing(self) -> tuple[str, int]:
        session = self._cache.session
        return session.rpc.credentials.session_id, session.epoch


@dataclass
class TransferStep(SchedulerStep):
    """A step that says which of its blocks the node fills first."""

    stagecache_fill: Sequence[NamedBlock] = ()


class Window:
    """The batch that StageCache reads: one transfer, as a request."""

    def __init__(self) -> None:
        self._transfers = 0
        self._name = ""
        self._ended: set[str] = set()
        self._computed = 0
        self._blocks: list[int] = []

    def show(self, request_id: str, blocks: list[int], *, computed: int) -> str:
        """The next transfer; returns its name."""
        self._ended = {self._name} if self._name else set()
        self._transfers += 1
        self._name = f"{request_id}#{self._transfers}"
        self._computed, self._blocks = computed, blocks
        return self._name

    def take_ended(self) -> set[str]:
        """The transfer before, once."""
        ended, self._ended = self._ended, set()
        return ended

    def req_ids(self) -> list[str]:
        return [self._name]

    def num_computed(self) -> NDArray[np.int64]:
        return np.array([self._computed], np.int64)

    def block_table(self) -> NDArray[np.int64]:
        return np.array([self._blocks], np.int64)
