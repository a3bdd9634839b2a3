"""A daemon that leaks on purpose, the control of the soak: a session that ends leaves 8 MiB, 8 fds and its files.

python -m tests.soak.leaky --socket PATH
"""

from __future__ import annotations

import os
import sys
from typing import Any

from stagecached import main
from stagecached.segments import SessionSegments

_kept: list[Any] = []


def forget(segments: SessionSegments) -> None:
    """In the place of ``SessionSegments.unlink``."""
    _kept.append((b"\1" * (8 << 20), [os.dup(0) for _ in range(8)]))


if __name__ == "__main__":
    SessionSegments.unlink = forget  # type: ignore[method-assign]
    sys.exit(main.main())
