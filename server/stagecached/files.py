"""Files that are whole or not there, whatever kills the daemon."""

from __future__ import annotations

import os
from pathlib import Path


def write_atomically(path: Path, text: str) -> None:
    """Replace the file at ``path``, mode 0600, by a rename.

    It is not synced to a disk: what it describes is shared memory, which is gone where the machine goes down.
    """
    draft = path.with_name(path.name + ".new")
    draft.unlink(missing_ok=True)
    with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "w") as file:
        file.write(text)
    draft.replace(path)
