"""Memory barriers between words that two processes share.

``fence`` stands between data and the word that announces it. x86-64 keeps stores in order and loads in order, so
nothing is done there. arm64 keeps neither: there each side takes and gives a lock twice, which orders what stands
before against what stands after (release, then acquire).

``full_fence`` also keeps a store before a load of another word, which x86-64 does not: where each side stores its own
word and then looks at the other's, at least one sees the other. Taking a free lock is an atomic read-modify-write.
"""

from __future__ import annotations

import platform
import threading

_STRONG = platform.machine().lower() in ("x86_64", "amd64", "i686")
_lock = threading.Lock()


def full_fence() -> None:
    """Loads and stores before it are done before those after it."""
    with _lock:
        pass
    with _lock:
        pass


def _no_fence() -> None:
    return None


fence = _no_fence if _STRONG else full_fence
