"""Who besides the daemon's user may come near: nobody, or one group.

Without a group: directories 0700, files and sockets 0600. With one: directories 0750, sockets and what a worker maps
0660, all of that group. Pools, tables, the secret and the manifests are the daemon's alone in both cases.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from stagecache_wire.names import SessionNames
from stagecache_wire.shm import SHM_DIRECTORY


@dataclass(frozen=True)
class Access:
    """gid: the group that may connect and map; None for none."""

    gid: int | None = None

    @property
    def directory_mode(self) -> int:
        return 0o700 if self.gid is None else 0o750

    @property
    def file_mode(self) -> int:
        return 0o600 if self.gid is None else 0o660

    def open_directory(self, path: Path) -> None:
        """Give a directory its mode and group."""
        self._grant(path, self.directory_mode)

    def open_file(self, path: Path) -> None:
        """Give a socket, lock or segment file its mode and group."""
        self._grant(path, self.file_mode)

    def open_session(self, names: SessionNames) -> None:
        """Give the session's files that a worker maps their mode and group; the rest stays the daemon's."""
        if self.gid is None:
            return
        stem = names.stem + "."
        for path in SHM_DIRECTORY.iterdir():
            name = path.name.removeprefix("sem.")
            part = name.removeprefix(stem)
            if name.startswith(stem) and not part.startswith(("pool", "table", "slots")):
                self.open_file(path)

    def admits(self, uid: int, gids: frozenset[int]) -> bool:
        """Whether a peer of this uid and these groups may talk to the daemon."""
        return uid == os.geteuid() or (self.gid is not None and self.gid in gids)

    def _grant(self, path: Path, mode: int) -> None:
        if self.gid is not None:
            os.chown(path, -1, self.gid)
        path.chmod(mode)
