"""Node-shared blocks, worker side: what a session says of its full blocks, and which blocks it takes from the node.

    cache.join_namespace(Namespace(model_fingerprint, hash_algorithm, hash_seed, dtype))
    cache.publish([(block_id, block_hash), ...])    blocks that the last saved step made full
    cache.fill([(block_id, block_hash), ...])       blocks whose KV came from elsewhere, before the step that hits them

Both are records of the log, so they stand in its order: a PUBLISH behind the SAVE whose rows it speaks of, a FILL
before the gathers that read its blocks. Where a scheduler-side shim is there, it says both on the scheduler output and
the cache logs them by itself:

    stagecache_published    dict of request id to (block id, hash) pairs that this step makes full
    stagecache_settled      the same of earlier steps
    stagecache_fill         (block id, hash) pairs

Nothing here may cost a step: what cannot be published is not shared, and blocks whose fill cannot be logged are lost
like the rows of a step (W8), so that hits on them fail and never show an older tenant's rows.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np

from stagecache.errors import DaemonLostError, StageCacheError
from stagecache.interrupts import Latch
from stagecache_wire import layout
from stagecache_wire.records import Kind, Record
from stagecache_wire.v1 import stagecache_pb2 as pb

if TYPE_CHECKING:
    from stagecache.epochs import Epochs
    from stagecache.keys import KeyBook
    from stagecache.planner import StepPlan
    from stagecache.session import Session

logger = logging.getLogger("stagecache")

NamedBlock: TypeAlias = tuple[int, bytes]
"""A block id of the engine, and the 32-byte hash of the content up to the block's end."""

BLOCKS_A_RECORD: Final = 512
"""Most blocks of one record, so that none keeps the daemon from other work for long."""
JOIN_TIMEOUT_S: Final = 120.0
"""The first session to join has the daemon prefault the namespace's memory, about a second a GiB."""

ANSWER_TIMEOUT_S: Final = 2.0
"""Longest wait of a fill for the answer to a join in the background."""

JOIN_PAUSES_S: Final = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
"""Between tries of a join in the background that found no daemon."""


@dataclass(frozen=True)
class Namespace:
    """What, beside the session's stage, keys and block size, must be equal for rows to be equal.

    model_fingerprint: names the weights and the configuration that rows depend on. hash_algorithm: the engine's, sha256
    or sha256_cbor. hash_seed: of the first block's parent. dtype: the model's compute dtype.
    tensor_parallel_size: ranks that share the computation.
    """

    model_fingerprint: str
    hash_algorithm: str
    hash_seed: str
    dtype: str
    tensor_parallel_size: int = 1


@dataclass(frozen=True)
class Joined:
    """The daemon's answer. on: blocks are shared; else ``why`` they are not. num_blocks: that the namespace can keep.
    cached_blocks: that it keeps now. block_bytes: rows of one, all keys. namespace_id: 64 hex digits.
    """

    on: bool
    why: str = ""
    namespace_id: str = ""
    num_blocks: int = 0
    block_bytes: int = 0
    cached_blocks: int = 0
    generation: int = 0


class BlockSharing:
    """Logs PUBLISH and FILL records of one session. Engine thread, but for the call that ``join_intended`` makes on a
    thread of its own, which sets ``_begun``, ``_answer`` and ``_answered``.
    """

    def __init__(self, session: Session, keys: KeyBook, epochs: Epochs) -> None:
        self._session = session
        self._keys = keys
        self._epochs = epochs
        self._on = False
        self._namespace: tuple[Namespace, int] | None = None
        self._held: dict[str, list[NamedBlock]] = {}
        self._answer: Joined | None = None
        """Of a join in the background, which the engine thread has not looked at."""
        self._begun = False
        """A thread has begun that join."""
        self._answered = Latch()
        """That thread has ended."""
        self._lock = threading.Lock()

    @property
    def on(self) -> bool:
        """Whether the session has joined a namespace."""
        return self._on

    def join(self, namespace: Namespace) -> Joined:
        """See ``StageCache.join_namespace``."""
        self.intend(namespace)
        joined = self._ask(namespace, self._session.log.head)
        self._on = joined.on
        return joined

    def _ask(self, namespace: Namespace, sequence: int) -> Joined:
        """Any thread."""
        answer = self._session.rpc.join_namespace(
            pb.JoinNamespaceRequest(
                model_fingerprint=namespace.model_fingerprint,
                hash_algorithm=namespace.hash_algorithm,
                hash_seed=namespace.hash_seed,
                dtype=namespace.dtype,
                tensor_parallel_size=namespace.tensor_parallel_size,
                sequence=sequence,
            ),
            JOIN_TIMEOUT_S,
        )
        return Joined(
            answer.on,
            answer.why,
            answer.namespace_id,
            answer.num_blocks,
            answer.block_bytes,
            answer.cached_blocks,
            answer.generation,
        )

    @property
    def vouched(self) -> Namespace | None:
        """What the model still is, as far as is known: what was joined, and no reset has taken back."""
        if self._namespace is None or self._epochs.model_may_differ:
            return None
        namespace, model_resets = self._namespace
        return namespace if model_resets == self._epochs.model_resets else None

    def join_later(self, namespace: Namespace) -> None:
        """See ``StageCache.join_later``. Until the daemon has answered, blocks named are not kept, and fills miss."""
        if self.vouched != namespace:
            self.intend(namespace)
        self.join_intended()

    def intend(self, namespace: Namespace | None) -> None:
        """The model is what ``namespace`` names, and nothing was asked yet."""
        self._namespace = None if namespace is None else (namespace, self._epochs.model_resets)
        self._on, self._answer, self._begun = False, None, False
        self._answered = Latch()

    def join_intended(self) -> None:
        """Join, on a thread of its own, what was intended and is still the model's; once, however often it is called.

        A second join would take back a reset that the daemon did after the first (R5).
        """
        namespace, intended = self.vouched, self._namespace
        if namespace is None or self._begun:
            return
        sequence, answered = self._session.log.head, self._answered

        def run() -> None:
            with self._lock:
                if self._begun or self._namespace is not intended:
                    return
                self._begun = True
            try:
                ask()
            finally:
                answered.set()

        def ask() -> None:
            for pause_s in JOIN_PAUSES_S:
                try:
                    joined = self._ask(namespace, sequence)
                except DaemonLostError as error:  # Adopted by the next daemon, the session may still join.
                    why: object = error
                    if self._session.has_ended():
                        break
                    time.sleep(pause_s)
                except StageCacheError as error:
                    why = error
                    break
                else:
                    self._answer, why = joined, joined.why
                    if joined.on:
                        logger.info("stagecache: stage %s shares %d blocks", self._session.stage, joined.num_blocks)
                        return
                    break
            logger.warning("stagecache: stage %s shares no blocks: %s", self._session.stage, why)

        threading.Thread(target=run, name="stagecache-join", daemon=True).start()

    def _joined(self) -> bool:
        """Whether blocks are shared. What was answered in the background counts only where no reset came after it was
        asked: the daemon may have done the RESET before the join (R5).
        """
        answer, self._answer = self._answer, None
        if answer is not None:
            self._on = answer.on and self.vouched is not None
        if self._on and not self._session.control.words[layout.D_SHARED_GENERATION]:
            self._join_again()
        return self._on

    def _join_again(self) -> None:
        """A daemon adopted the session and does not have its namespace any more."""
        logger.warning(
            "stagecache: stage %s: the daemon is back without the blocks that were shared", self._session.stage
        )
        self.intend(self.vouched)
        self.join_intended()

    def begin(self, output: Any, plan: StepPlan) -> None:
        """What the scheduler output of a step says of shared blocks. Behind the flushes of requests that ended, before
        any gather of the step.
        """
        settled = self._ready(getattr(output, "stagecache_settled", None))
        if settled:
            self.publish(settled)
        if self._held:  # Settled ones too: they may come with the output that says that their request is over.
            for req_id in plan.replaced:
                self._held.pop(req_id, None)  # Its blocks may have had other tenants since.
            for req_id in plan.ended:
                self.publish(self._held.pop(req_id, ()))
        blocks = getattr(output, "stagecache_fill", None)
        if blocks:
            self.fill(blocks)
        plan.publish = self._ready(getattr(output, "stagecache_published", None))

    def _ready(self, published: dict[str, list[NamedBlock]] | None) -> list[NamedBlock]:
        """Blocks that may be published with this step. Rows of deferred keys come with a flush, which is at the end of
        their request at the latest: then these blocks are.
        """
        if not published:
            return []
        if not self._keys.policy.deferred_keys:
            return [block for full in published.values() for block in full]
        for req_id, full in published.items():
            self._held.setdefault(req_id, []).extend(full)
        return []

    def publish(self, blocks: Iterable[NamedBlock]) -> int:
        """Log which blocks are full, under which hashes; how many were logged. What cannot be logged is not shared."""
        if not self._joined() or self._epochs.unlogged or self._keys.refused:
            return 0  # Rows of a refused key are nowhere: a block without them is not what the model gave.
        logged = 0
        for record in _records(Kind.PUBLISH, list(blocks)):
            try:
                self._session.append(record, urgent=False)
            except StageCacheError:
                break
            logged += record.rows
        return logged

    def fill(self, blocks: Iterable[NamedBlock]) -> int:
        """Have the daemon fill blocks with the rows that the node keeps under their hashes; how many were logged.

        The others, where there are any, are lost (W8).
        """
        blocks = list(blocks)
        logged = 0
        if self._begun and not self._answered.is_set():  # The scheduler has heard of the join before this process.
            self._answered.wait(ANSWER_TIMEOUT_S)
        try:
            for record in _records(Kind.FILL, blocks) if self._joined() else ():
                self._session.append(record)
                logged += record.rows
        except StageCacheError:
            pass
        if logged < len(blocks):
            size = self._session.geometry.block_size
            self._epochs.lose(np.array([(block * size, size) for block, _ in blocks[logged:]], np.uint32))
            if self._epochs.unlogged and not self._session.away:
                self._epochs.reset()
        return logged


def _records(kind: Kind, blocks: Sequence[NamedBlock]) -> list[Record]:
    return [
        Record.of_blocks(kind, blocks[first : first + BLOCKS_A_RECORD])
        for first in range(0, len(blocks), BLOCKS_A_RECORD)
    ]
