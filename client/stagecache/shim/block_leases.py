"""A scheduler's hold on node-shared blocks: what it is told to be there stays there until it lets go, or dies.

The engine's thread waits for ``acquire``, for ``ACQUIRE_TIMEOUT_S`` at most; while no daemon answers it is told at once
that nothing is held, and the daemon is asked again after ``RETRY_S``. Leases end from a thread of their own.

A lease has a name of its own, so that the end of a request's old lease never meets its new one.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from stagecache.rpc import Rpc
    from stagecache_wire.locks import LifeLock
    from stagecache_wire.v1 import stagecache_pb2 as pb

logger = logging.getLogger("vllm.stagecache")

ACQUIRE_TIMEOUT_S: Final = 0.5
RELEASE_TIMEOUT_S: Final = 5.0
RETRY_S: Final = 1.0
STOP_TIMEOUT_S: Final = 2.0


class BlockLeases:
    """Leases of one scheduler on the blocks of its engine's namespace. All calls are the engine's thread's.

    Args:
        socket: the daemon's.
        stage: name of the stage, as its workers attach by it.
        engine: as its workers name it when they attach.

    Attributes:
        asked, held: hashes asked for, and of these held.
        last_error: why the last try failed; empty once one did not.
    """

    def __init__(self, socket: str, stage: str, engine: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.asked = 0
        self.held = 0
        self.last_error = ""
        self._socket = socket
        self._stage = stage
        self._engine = engine
        self._clock = clock
        self._retry_at = 0.0
        self._rpc: Rpc | None = None
        self._lock: LifeLock | None = None
        self._boot_id = 0
        self._serial = 0
        self._leases: dict[str, tuple[str, list[bytes]]] = {}
        self._stale: int | None = None
        self._generation: int | None = None
        self._learn = False
        self._ends: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def __len__(self) -> int:
        return len(self._leases)

    def holders(self) -> list[str]:
        """Requests that hold something."""
        return list(self._leases)

    def acquire(self, req_id: str, hashes: Sequence[bytes]) -> int:
        """Hold the longest prefix of ``hashes`` that the node keeps, in place of what the request held; how many those
        are. 0 where the daemon does not answer in time.
        """
        self.release((req_id,))
        self.asked += len(hashes)
        if self._learn:
            self._learn_generation()
        if not hashes or self._learn:
            return 0
        self._serial += 1
        name = f"{req_id}.{self._serial}"
        answer = self._ask({name: list(hashes)})
        if answer is None:
            self._ends.put(name)  # It may have been held all the same.
            return 0
        count = answer.held[0]
        if count == 0:
            return 0
        self._leases[req_id] = name, list(hashes[:count])
        if answer.generation == self._stale:  # Of the model before it changed: its workers have not said so yet.
            self.release((req_id,))
            return 0
        self._generation, self._stale = answer.generation, None
        if answer.boot_id != self._boot_id:
            self._claim_again(answer.boot_id)
        self.held += count
        return count

    def release(self, req_ids: Iterable[str]) -> None:
        """End the leases of these requests; ones that have none are ignored. Returns at once."""
        for req_id in req_ids:
            found = self._leases.pop(req_id, None)
            if found is not None:
                self._ends.put(found[0])

    def model_changed(self) -> None:
        """What is kept for the model of before must not be used: nothing is held until the workers are in another
        generation of the namespace, which they are once they have logged the reset.
        """
        self.release(list(self._leases))
        self._learn = True
        self._learn_generation()

    def close(self) -> None:
        """End all leases, and the thread; may be called again."""
        self.release(list(self._leases))
        self._disconnect()

    # ---------------------------------------------------------------- inside

    def _disconnect(self) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:
            self._ends.put(None)
            if thread is not threading.current_thread():
                thread.join(STOP_TIMEOUT_S)
        rpc, self._rpc = self._rpc, None
        if rpc is not None:
            rpc.close()
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.release(unlink=True)

    def _learn_generation(self) -> None:
        """Ask in which generation the workers are now, to know it when they are in another."""
        if self._generation is not None:
            self._stale, self._learn = self._generation, False
            return
        answer = self._ask({})
        if answer is not None:
            self._stale, self._learn = answer.generation, False

    def _claim_again(self, boot_id: int) -> None:
        """Another daemon serves: tell it all that is held."""
        first, self._boot_id = self._boot_id == 0, boot_id
        if not first:
            self._ask(dict(self._leases.values()), everything=True)

    def _ask(self, spans: dict[str, list[bytes]], *, everything: bool = False) -> pb.AcquireBlocksResponse | None:
        """One call, bounded; None where there was no answer."""
        from stagecache.errors import CallDeadlineError, DaemonLostError, StageCacheError
        from stagecache_wire.v1 import stagecache_pb2 as pb

        if self._clock() < self._retry_at:
            return None
        request = pb.AcquireBlocksRequest(
            namespace=pb.NamespaceRef(stage=self._stage, engine=self._engine),
            request_ids=list(spans),
            hashes=b"".join(block_hash for hashes in spans.values() for block_hash in hashes),
            span_blocks=[len(hashes) for hashes in spans.values()],
            all=everything,
        )
        try:
            rpc = self._rpc or self._connect()
            answer = rpc.acquire_blocks(request, ACQUIRE_TIMEOUT_S)
        except StageCacheError as error:
            if not self.last_error:
                logger.warning("stagecache: stage %s uses no KV from elsewhere for now: %s", self._stage, error)
            self.last_error = str(error)
            self._retry_at = self._clock() + RETRY_S
            if not isinstance(error, (DaemonLostError, CallDeadlineError)):
                self._disconnect()  # Another daemon, that knows nothing of this client: it begins anew.
                self._leases.clear()
            return None
        self.last_error = ""
        return answer

    def _connect(self) -> Rpc:
        """Shake hands, take the lock that says that this process lives, and start the thread that ends leases.

        Raises:
            StageCacheError: refused, or nobody answers.
        """
        # gRPC is imported here: engines without a daemon, and the processes that they fork before, do without it.
        from stagecache.rpc import Rpc, handshake

        credentials = handshake(self._socket, "scheduler", engine=self._engine, timeout_s=ACQUIRE_TIMEOUT_S)
        self._lock = credentials.take_lock(ACQUIRE_TIMEOUT_S)
        self._rpc = Rpc(credentials)
        self._thread = threading.Thread(
            target=self._end_leases, args=(self._rpc,), name="stagecache-leases", daemon=True
        )
        self._thread.start()
        return self._rpc

    def _end_leases(self, rpc: Rpc) -> None:
        """Ends that came together go out together. What a daemon does not hear it finds out with this process' end, or
        when it is told all leases anew.
        """
        from stagecache.errors import StageCacheError
        from stagecache_wire.v1 import stagecache_pb2 as pb

        going_on = True
        while going_on:
            names = [self._ends.get()]
            while not self._ends.empty():
                names.append(self._ends.get())
            going_on = None not in names
            ended = [name for name in names if name is not None]
            if not ended:
                continue
            try:
                rpc.release_blocks(pb.ReleaseBlocksRequest(request_ids=ended), RELEASE_TIMEOUT_S)
            except StageCacheError as error:
                logger.info("stagecache: leases were not ended by a call: %s", error)
