"""One moment of a session as plain numbers: the words of both sides, and what the daemon knows besides.

Reading costs two slices of the control segment; nothing is locked, so words of one step may be from before and after.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from stagecache_wire import layout
from stagecache_wire.figures import DAEMON_WORDS, WORKER_WORDS, Worker
from stagecached.budget import Cost
from stagecached.session import Session, State

MAX_AGE_NS: Final = 365 * 24 * 3600 * 10**9


@dataclass(slots=True)
class Presence:
    """Slots of a key by presence, as of the last survey. Never surveyed: all unknown, age_s is None."""

    present: int = 0
    absent: int = 0
    pending: int = 0
    unknown: int = 0
    age_s: float | None = None


@dataclass(slots=True)
class KeyFold:
    """One open key. Sizes in bytes."""

    key_id: int
    name: str
    dtype: str
    row_shape: tuple[int, ...]
    row_bytes: int
    pool_bytes: int
    staging_bytes: int
    locked: bool
    scattered: int
    gathered: int
    presence: Presence = field(default_factory=Presence)


@dataclass(slots=True)
class SessionFold:
    """One session. worker, daemon: words as ``figures.Worker`` and ``figures.Daemon`` name them.

    replica: number that tells sessions of a stage apart. oldest_s: age of the oldest record that waits. idle_s: since
    the worker's last step. lease_s: age of the oldest lease. Ages are in seconds, 0.0 where there is nothing.
    """

    session_id: str
    model: str
    stage: str
    replica: str
    rank: int
    pid: int
    live: bool
    failure: str
    adopted: bool
    attached_unix_s: float
    worker: list[int]
    daemon: list[int]
    head: int
    consumed: int
    epoch: int
    slots: int
    block_size: int
    depth: int
    arena_bytes: int
    memory: Cost
    oldest_s: float
    idle_s: float
    lease_s: float
    keys: list[KeyFold]

    @property
    def waiting(self) -> int:
        """Records that wait for the daemon."""
        return max(self.head - self.consumed, 0)


def fold_session(session: Session, replica: str, now_ns: int) -> SessionFold:
    """A session now. Its segments must stay mapped meanwhile; now_ns: time.monotonic_ns()."""
    segments, manifest, words = session.segments, session.manifest, session.segments.words
    worker = words[layout.W_FIGURES : layout.W_FIGURES + WORKER_WORDS].tolist()
    daemon = words[layout.D_FIGURES : layout.D_FIGURES + DAEMON_WORDS].tolist()
    head, consumed = segments.head, segments.consumed
    geometry = segments.geometry
    memory = session.base.cost
    for held in list(session.key_reservations.values()):
        memory += held.cost
    return SessionFold(
        session_id=session.session_id,
        model=manifest.model,
        stage=manifest.stage,
        replica=replica,
        rank=manifest.rank,
        pid=manifest.pid,
        live=session.state is State.LIVE,
        failure=session.failure,
        adopted=session.adopted,
        attached_unix_s=manifest.attached_unix_s,
        worker=worker,
        daemon=daemon,
        head=head,
        consumed=consumed,
        epoch=segments.epoch,
        slots=geometry.num_slots,
        block_size=geometry.block_size,
        depth=geometry.staging_depth,
        arena_bytes=geometry.arena_bytes,
        memory=memory,
        oldest_s=age_s(_published(words, head, consumed), now_ns),
        idle_s=age_s(worker[Worker.EXPORTED_AT], now_ns),
        lease_s=age_s(worker[Worker.OLDEST_LEASE_AT], now_ns),
        keys=[
            KeyFold(
                key_id=store.key_id,
                name=store.schema.name,
                dtype=store.schema.dtype,
                row_shape=store.schema.row_shape,
                row_bytes=store.row_bytes,
                pool_bytes=store.pool_bytes,
                staging_bytes=store.staging_bytes,
                locked=store.locked,
                scattered=store.rows_scattered,
                gathered=store.rows_gathered,
            )
            for store in list(segments.keys.values())
        ],
    )


def age_s(at_ns: int, now_ns: int) -> float:
    """Seconds since a time.monotonic_ns() of another process; 0.0 for 0, and where the clocks do not agree."""
    age_ns = now_ns - at_ns
    return age_ns / 1e9 if at_ns and 0 < age_ns < MAX_AGE_NS else 0.0


def _published(words: memoryview, head: int, consumed: int) -> int:
    """When the oldest record that waits was published; where its ring entry was used again, that of a younger one."""
    if head <= consumed:
        return 0
    sequence = max(consumed + 1, head - layout.TIME_ENTRIES + 1)
    return int(words[layout.W_TIMES + (sequence - 1) % layout.TIME_ENTRIES])
