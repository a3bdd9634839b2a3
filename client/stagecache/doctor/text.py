"""Numbers as people read them."""

from __future__ import annotations


def size(count: int) -> str:
    """``24.0 GiB``, ``64 MiB``, ``12 KiB``."""
    if count >= 1 << 30:
        return f"{count / (1 << 30):.1f} GiB"
    if count >= 1 << 20:
        return f"{count / (1 << 20):.0f} MiB"
    return f"{count / (1 << 10):.0f} KiB"
