"""Names of everything the daemon leaves outside its own memory, all derived from the socket path and a session id.

    <socket>.d/               run directory, 0700
    <socket>.d/daemon.lock    held by the daemon for life
    <socket>.d/peer.sock      issues session ids and tokens to peers whose uid the kernel vouches for
    <socket>.d/http.sock      figures and the status page, for who may come near the socket
    <socket>.d/secret         key of the tokens, 0600
    <socket>.d/sessions/      one manifest a session
    <socket>.d/namespaces/    one manifest a namespace of shared blocks
    /dev/shm/stagecache.<node>.lock          held by the daemon for life; names the run directory
    /dev/shm/stagecache.<node>.<sid>.lock    held by the worker for life, or by a scheduler that may hold leases
    /dev/shm/stagecache.<node>.shared.<id>   blocks of a namespace, by the first digits of its id
    /dev/shm/stagecache.<node>.<sid>.<part>  segments; semaphores are sem.stagecache.<node>.<sid>.<part>

``<node>`` tells daemons that share a /dev/shm apart. A lock beside the segments says who may sweep them, even where
the run directory is gone.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from stagecache_wire.shm import PREFIX, SHM_DIRECTORY

DEFAULT_SOCKET = "/run/stagecache/stagecached.sock"


@dataclass(frozen=True)
class RunPaths:
    """Paths of one daemon."""

    socket: Path

    @classmethod
    def of(cls, socket: str | os.PathLike[str]) -> RunPaths:
        path = Path(socket)
        return cls(path.parent.resolve() / path.name)

    @property
    def directory(self) -> Path:
        return self.socket.with_name(self.socket.name + ".d")

    @property
    def lock(self) -> Path:
        return self.directory / "daemon.lock"

    @property
    def peer_socket(self) -> Path:
        return self.directory / "peer.sock"

    @property
    def http_socket(self) -> Path:
        return self.directory / "http.sock"

    @property
    def secret(self) -> Path:
        return self.directory / "secret"

    @property
    def sessions(self) -> Path:
        return self.directory / "sessions"

    @property
    def namespaces(self) -> Path:
        return self.directory / "namespaces"

    @property
    def node(self) -> str:
        """12 hex digits that tell this daemon from others on the same /dev/shm: the run directory must exist.

        The inode is part of it, since two containers may use one path for two directories.
        """
        stat = self.directory.stat()
        identity = os.fsencode(self.socket) + f"|{stat.st_dev}|{stat.st_ino}".encode()
        return hashlib.sha256(identity).hexdigest()[:12]

    @property
    def shm_lock(self) -> Path:
        return SHM_DIRECTORY / f"{PREFIX}.{self.node}.lock"


@dataclass(frozen=True)
class SessionNames:
    """Names of one session's parts."""

    node: str
    session_id: str

    @property
    def stem(self) -> str:
        return f"{PREFIX}.{self.node}.{self.session_id}"

    @property
    def worker_lock(self) -> Path:
        return SHM_DIRECTORY / f"{self.stem}.lock"

    @property
    def control(self) -> str:
        return f"{self.stem}.control"

    @property
    def arena(self) -> str:
        return f"{self.stem}.arena"

    @property
    def slots(self) -> str:
        return f"{self.stem}.slots"

    @property
    def daemon_doorbell(self) -> str:
        return f"{self.stem}.daemon"

    @property
    def worker_doorbell(self) -> str:
        return f"{self.stem}.worker"

    def staging(self, key_id: int) -> str:
        return f"{self.stem}.staging{key_id}"

    def pool(self, key_id: int) -> str:
        return f"{self.stem}.pool{key_id}"

    def table(self, key_id: int) -> str:
        return f"{self.stem}.table{key_id}"
