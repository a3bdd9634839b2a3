"""Scheduler-side clients that may hold leases: each holds a lock for life, as a worker does, so its death shows.

A worker's leases belong to its session, whose life the session manager watches. A scheduler has no session: it names
its engine in the handshake and gets a lock file. Its pidfd, or the lock that is free, ends its leases; never a clock.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

import structlog

from stagecache_wire.names import SessionNames
from stagecache_wire.v1 import stagecache_pb2 as pb
from stagecached import sweep
from stagecached.access import Access
from stagecached.liveness import Liveness
from stagecached.refusal import Refusal

MAX_WAITING: Final = 256
"""Handshakes whose lock was not taken yet; beyond it the oldest must ask again."""

log = structlog.get_logger()


class LeaseOwners:
    """On the event loop."""

    def __init__(self, node: str, access: Access, on_gone: Callable[[str], None]) -> None:
        """on_gone(owner): it is dead; its leases end."""
        self.liveness = Liveness(self._died)
        self._node = node
        self._access = access
        self._on_gone = on_gone
        self._waiting: dict[str, None] = {}
        self._issued: set[str] = set()

    def issue(self, owner: str, pidfd: int | None) -> Path:
        """The lock file of a new client; the pidfd is owned here from now on."""
        lock = self._lock_of(owner)
        os.close(os.open(lock, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        self._access.open_file(lock)
        self.liveness.watch(owner, lock, pidfd)
        self._waiting[owner] = None
        self._issued.add(owner)
        if len(self._waiting) > MAX_WAITING:
            self._end(next(iter(self._waiting)))
        return lock

    def associate(self, owner: str, pidfd: int | None) -> Path:
        """A client of an earlier handshake is here again, perhaps after a restart of the daemon."""
        lock = self._lock_of(owner)
        self.liveness.watch(owner, lock, pidfd)
        self._issued.add(owner)
        return lock

    def is_alive(self, owner: str) -> bool:
        """Whether a client holds its lock; one not known yet (the daemon was restarted) is watched from now on."""
        lock = self._lock_of(owner)
        self.liveness.watch(owner, lock, None)
        if self.liveness.holds_lock(owner):
            self._waiting.pop(owner, None)
            self._issued.add(owner)
            return True
        if not lock.exists():
            self._end(owner)
        return False

    def check_alive(self, owner: str) -> None:
        """Raises: Refusal, WORKER_LOCK_FREE, where a lease could outlive its holder."""
        if not self.is_alive(owner):
            raise Refusal(
                pb.REASON_WORKER_LOCK_FREE,
                "the caller holds no lock, so nobody would see it die with its leases.",
                "Name the engine in the handshake, take the lock that the answer names, and keep it for life.",
            )

    def stop(self, *, keep: bool) -> None:
        """keep: the next daemon finds the locks; else their files go, and who lives must ask for another."""
        for owner in [] if keep else list(self._issued):
            sweep.remove_worker_lock(SessionNames(self._node, owner))
        self.liveness.close()

    def _lock_of(self, owner: str) -> Path:
        return SessionNames(self._node, owner).worker_lock

    def _died(self, owner: str, why: str) -> None:
        log.info("a scheduler is gone", owner=owner, why=why)
        self._end(owner)

    def _end(self, owner: str) -> None:
        self.liveness.forget(owner)
        self._waiting.pop(owner, None)
        self._issued.discard(owner)
        self._on_gone(owner)
        sweep.remove_worker_lock(SessionNames(self._node, owner))
