"""One attached session, as the daemon holds it in memory."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from stagecache_wire.geometry import Geometry, KeySchema
from stagecache_wire.layout import ABI
from stagecache_wire.names import SessionNames
from stagecache_wire.v1 import stagecache_pb2 as pb
from stagecached.budget import Reservation
from stagecached.consumer import Consumer
from stagecached.keystore import KeyStore
from stagecached.manifest import GeometryEntry, KeyEntry, Manifest
from stagecached.refusal import Refusal
from stagecached.segments import SessionSegments


class State(Enum):
    """LIVE, then FAILED where a record was bad, then ENDED. Nothing leads back."""

    LIVE = "LIVE"
    FAILED = "FAILED"
    ENDED = "ENDED"


_MOVES: Final = {State.LIVE: {State.FAILED, State.ENDED}, State.FAILED: {State.ENDED}, State.ENDED: set[State]()}


@dataclass(frozen=True)
class AttachSpec:
    """What a worker asks for, checked: every number is inside its range.

    pid: the worker's in its own namespace, for people.
    keys: to be opened now. open_remembered_keys: also those that workers of (model, stage) had before.
    engine: names the engine in its scheduler and its workers alike; may be empty.
    """

    model: str
    stage: str
    pid: int
    rank: int
    geometry: Geometry
    keys: tuple[KeySchema, ...]
    open_remembered_keys: bool
    engine: str = ""

    @property
    def label(self) -> str:
        return label_of(self.model, self.stage, self.rank)

    def manifest(self, session_id: str, schemas: list[KeySchema]) -> Manifest:
        """The manifest of a session that was granted this with these keys, their ids in order from 0."""
        return Manifest(
            abi=ABI,
            session_id=session_id,
            model=self.model,
            stage=self.stage,
            rank=self.rank,
            pid=self.pid,
            geometry=GeometryEntry.of(self.geometry),
            keys=[KeyEntry.of(key_id, schema) for key_id, schema in enumerate(schemas)],
            next_key_id=len(schemas),
            attached_unix_s=time.time(),
            engine=self.engine,
        )


def label_of(model: str, stage: str, rank: int) -> str:
    """How logs and refusals name a session to people."""
    return f"{model}/{stage}" + (f" rank {rank}" if rank else "")


@dataclass
class Session:
    """A session's parts. On the event loop, but for what ``segments`` and ``consumer`` say of themselves."""

    names: SessionNames
    manifest: Manifest
    segments: SessionSegments
    consumer: Consumer
    base: Reservation
    key_reservations: dict[int, Reservation]
    merges: ThreadPoolExecutor
    """Waits of this session's merges: another session's never stand in their way."""
    adopted: bool = False
    failure: str = ""
    key_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    _state: State = State.LIVE
    _users: int = 0
    _idle: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self._idle.set()

    @property
    def session_id(self) -> str:
        return self.names.session_id

    @property
    def label(self) -> str:
        return label_of(self.manifest.model, self.manifest.stage, self.manifest.rank)

    @property
    def state(self) -> State:
        return self._state

    def move(self, to: State) -> None:
        """The only way in which the state changes.

        Raises:
            RuntimeError: a move that is not allowed.
        """
        if to not in _MOVES[self._state]:
            raise RuntimeError(f"session {self.session_id}: no move from {self._state.value} to {to.value}")
        self._state = to

    def key_named(self, name: str) -> KeyStore | None:
        """The open key of that name."""
        for store in list(self.segments.keys.values()):
            if store.schema.name == name:
                return store
        return None

    def check_usable(self) -> None:
        """Raises: Refusal, SESSION_FAILED or UNKNOWN_SESSION, where the session takes no more calls."""
        if self._state is State.FAILED:
            raise Refusal(
                pb.REASON_SESSION_FAILED,
                f"a bad record ended the session: {self.failure}.",
                "Detach and attach anew; if it comes again, report it with the daemon's log.",
            )
        if self._state is State.ENDED:
            raise unknown_session()

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """While inside, the segments stay mapped."""
        self._users += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._users -= 1
            if self._users == 0:
                self._idle.set()

    async def wait_idle(self, timeout_s: float) -> bool:
        """Wait until nobody uses the segments; False if ``timeout_s`` seconds were not enough."""
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except asyncio.TimeoutError:
            return False
        return True

    @property
    def budget_bytes(self) -> int:
        """Shared memory of the session, in bytes."""
        return self.base.cost.total + sum(held.cost.total for held in list(self.key_reservations.values()))

    def release_budget(self) -> None:
        self.base.release()
        for reservation in self.key_reservations.values():
            reservation.release()
        self.key_reservations.clear()


def unknown_session() -> Refusal:
    """The refusal where the daemon holds no such session."""
    return Refusal(
        pb.REASON_UNKNOWN_SESSION,
        "the daemon holds no such session: it ended, or could not be adopted after a restart.",
        "Attach anew, with a new handshake.",
    )
