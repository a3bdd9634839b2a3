"""A full memory barrier between data and the word that announces it.

x86-64 keeps stores in order and loads in order, so nothing is done there. arm64 keeps neither: there each side takes
and gives a lock twice, which orders what stands before against what stands after (release, then acquire).
"""

from __future__ import annotations

import platform
import threading

_STRONG = platform.machine().lower() in ("x86_64", "amd64", "i686")
_lock = threading.Lock()


def _lock_fence() -> None:
    with _lock:
        pass
    with _lock:
        pass


def _no_fence() -> None:
    return None


fence = _no_fence if _STRONG else _lock_fence
