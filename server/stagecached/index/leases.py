"""Leases: holds on cached prefixes, by (session, request), from acquire until release or until the session ends.

Acquiring is using: the blocks leave the free queue, so they cannot be evicted, and when the lease ends they join its
end as the most recently used. Looking up (BlockPool.longest_prefix) does neither.
"""

from __future__ import annotations

from collections.abc import Sequence

from stagecached.index.blocks import Block
from stagecached.index.pool import BlockPool


class LeaseTable:
    """All leases on one pool. One thread owns both.

    A (session, request) has at most one lease; no clock ends it: the owner of this table ends a session's leases when
    the session is known to be over.
    """

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self._spans: dict[str, dict[str, list[Block]]] = {}

    def acquire(
        self, session_id: str, request_id: str, block_hashes: Sequence[bytes], max_blocks: int | None = None
    ) -> list[Block]:
        """Holds the longest cached prefix of block_hashes, at most max_blocks, and answers its blocks.

        Repeating it is safe: the new span replaces the old one, and a block in both is held throughout. Nothing
        cached is an empty span, and no lease.
        """
        span = self.pool.longest_prefix(block_hashes, len(block_hashes) if max_blocks is None else max_blocks)
        self.pool.touch(span)
        self.release(session_id, request_id)
        if span:
            self._spans.setdefault(session_id, {})[request_id] = span
        return list(span)

    def release(self, session_id: str, request_id: str) -> bool:
        """Ends a lease; the tail of its span is evicted first. False: there was none, as when it is repeated."""
        spans = self._spans.get(session_id, {})
        span = spans.pop(request_id, None)
        if span is None:
            return False
        if not spans:
            del self._spans[session_id]
        self.pool.free_blocks(reversed(span))
        return True

    def release_session(self, session_id: str) -> int:
        """Ends all leases of a session, oldest first, and answers how many there were."""
        spans = self._spans.pop(session_id, {})
        for span in spans.values():
            self.pool.free_blocks(reversed(span))
        return len(spans)

    def span(self, session_id: str, request_id: str) -> tuple[Block, ...]:
        """The blocks that a lease holds, in prefix order; empty when there is none."""
        return tuple(self._spans.get(session_id, {}).get(request_id, ()))

    def __len__(self) -> int:
        """Number of leases."""
        return sum(map(len, self._spans.values()))
