"""A request as the index sees it: how many tokens it has, and the hashes of the blocks that they fill."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from stagecache_wire.identity import NO_EXTRA_KEYS, BlockHasher, ExtraKeys


class RequestView(Protocol):
    """What the block manager reads of a request. vLLM's Request has these attributes too."""

    @property
    def request_id(self) -> str:
        """Unique among the requests that hold blocks."""

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens known so far."""

    @property
    def num_computed_tokens(self) -> int:
        """Leading tokens that are already computed; the caller moves it on after each step."""

    @property
    def block_hashes(self) -> Sequence[bytes]:
        """Hash of each full block of the num_tokens tokens, in order."""


class Request:
    """A request that hashes its own blocks: each is hashed once, when its last token is appended."""

    __slots__ = ("_extra_keys", "_hasher", "block_hashes", "num_computed_tokens", "request_id", "token_ids")

    def __init__(
        self,
        request_id: str,
        token_ids: Sequence[int],
        hasher: BlockHasher,
        extra_keys: ExtraKeys = NO_EXTRA_KEYS,
    ) -> None:
        self.request_id = request_id
        self.token_ids: list[int] = []
        self.block_hashes: list[bytes] = []
        self.num_computed_tokens = 0
        self._hasher = hasher
        self._extra_keys = extra_keys
        self.append(token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    def append(self, token_ids: Sequence[int]) -> None:
        """Adds tokens at the end and hashes the blocks that they fill."""
        self.token_ids.extend(token_ids)
        num_hashed = len(self.block_hashes)
        self.block_hashes += self._hasher.hash_blocks(
            self.token_ids[num_hashed * self._hasher.block_size :],
            self._extra_keys,
            first_block=num_hashed,
            parent_hash=self.block_hashes[-1] if num_hashed else None,
        )
