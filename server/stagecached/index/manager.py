"""Block tables of requests: which blocks hold their tokens, what a new request may take over, what goes back.

The rules are those of vLLM V1's KVCacheManager for one group of full attention, as vLLM 0.30.0 has them; the
conformance test drives both side by side. The order of calls in a request's life:

    get_computed_blocks     what of its content is cached; changes nothing
    allocate_slots          once for the prefix hit and the first tokens, then for every chunk and every decoded token
    free                    when it finishes, is aborted or is preempted

A table is append-only: block ids already told are never changed, so a block that fills with content cached elsewhere
stays, as a duplicate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stagecached.index.blocks import Block
from stagecached.index.errors import MissingBlockHash, RequestAlreadyRunning, StalePrefix
from stagecached.index.pool import BlockPool
from stagecached.index.request import RequestView


@dataclass(slots=True)
class _BlockTable:
    """blocks: in token order, each held once by this table. num_cached: how many leading ones have had their hash."""

    blocks: list[Block]
    num_cached: int


class BlockManager:
    """Gives requests their blocks out of one pool. One thread owns both.

    block_size                  tokens a block.
    max_model_len               tokens that a request may reach; no slot beyond it is allocated. None: no limit.
    num_preallocated_blocks     blocks that an allocation which needs any takes ahead, so that the next ones need
                                none; as many as are free and max_model_len allows. vLLM 0.30.0 takes none.
    """

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        *,
        max_model_len: int | None = None,
        num_preallocated_blocks: int = 0,
    ) -> None:
        if block_size < 1 or num_preallocated_blocks < 0 or (max_model_len is not None and max_model_len < 1):
            raise ValueError(
                f"block_size {block_size} and max_model_len {max_model_len} must be at least 1, "
                f"num_preallocated_blocks {num_preallocated_blocks} at least 0"
            )
        self.pool = pool
        self.block_size = block_size
        self.max_model_len = max_model_len
        self.num_preallocated_blocks = num_preallocated_blocks
        self._tables: dict[str, _BlockTable] = {}

    def get_computed_blocks(self, request: RequestView) -> list[Block]:
        """Blocks of the longest cached prefix of the request; its length is their number times block_size.

        Changes nothing, not even the order of eviction. At least the last token is left to compute, since sampling
        needs its output: a prompt that is cached to its end gets all blocks but the last.
        """
        return self.pool.longest_prefix(request.block_hashes, max(0, request.num_tokens - 1) // self.block_size)

    def allocate_slots(
        self,
        request: RequestView,
        num_new_tokens: int,
        computed_blocks: Sequence[Block] = (),
        *,
        num_external_computed_tokens: int = 0,
        num_lookahead_tokens: int = 0,
        delay_cache_blocks: bool = False,
        full_sequence_must_fit: bool = False,
        reserved_blocks: int = 0,
    ) -> list[Block] | None:
        """Gives the request slots for `num_new_tokens` tokens behind those computed, and caches what they fill.

        Three cases, block by block: a computed block in the free queue is taken out of it; a computed block in use
        gets one more reference; what no hit covers comes from the front of the queue and may evict old content.
        A block that the new tokens fill gets its hash at once, before they are computed, so that requests of the
        same step may hit it (H6). Tokens beyond request.num_tokens (drafts) get slots but no hash.

        computed_blocks                 what get_computed_blocks answered, at the request's first allocation only.
        num_external_computed_tokens    tokens behind the hit whose rows come from elsewhere; they need slots too.
        num_lookahead_tokens            slots beyond the new tokens.
        delay_cache_blocks              leave the caching to a later cache_blocks (rows still on their way).
        full_sequence_must_fit          refuse unless all of the request's known tokens would fit.
        reserved_blocks                 free blocks that this call must leave.

        Returns the blocks taken from the queue, in table order; or None, with nothing changed, when too few are free.
        Raises RequestAlreadyRunning, StalePrefix or MissingBlockHash, with nothing changed.
        """
        if num_new_tokens < 0 or (num_new_tokens == 0 and num_external_computed_tokens == 0):
            raise ValueError(f"request {request.request_id}: slots for {num_new_tokens} tokens were asked for")
        table = self._tables.get(request.request_id)
        self._check_computed_blocks(request, table, computed_blocks)
        num_held = len(computed_blocks) if table is None else len(table.blocks)
        num_computed = self._clip(
            request.num_computed_tokens + len(computed_blocks) * self.block_size + num_external_computed_tokens
        )
        num_full = min(num_computed + num_new_tokens, request.num_tokens) // self.block_size
        if not delay_cache_blocks:
            self._check_hashes(request, num_full)

        num_out_of_queue = sum(block.ref_cnt == 0 for block in computed_blocks)
        num_free = self.pool.num_free_blocks - num_out_of_queue
        if full_sequence_must_fit and self._blocks_for(request.num_tokens) - num_held > num_free:
            return None
        num_needed = max(0, self._blocks_for(num_computed + num_new_tokens + num_lookahead_tokens) - num_held)
        if num_needed > num_free - reserved_blocks:
            return None

        self.pool.touch(computed_blocks)
        if table is None:
            table = self._tables[request.request_id] = _BlockTable(list(computed_blocks), num_held)
        num_taken = self._with_preallocated(num_needed, num_held, num_free - reserved_blocks, num_lookahead_tokens)
        new_blocks = self.pool.get_new_blocks(num_taken)
        table.blocks += new_blocks
        if not delay_cache_blocks:
            self._cache(request, table, num_full)
        return new_blocks

    def cache_blocks(self, request: RequestView, num_tokens: int) -> None:
        """Caches the blocks that the request's first num_tokens tokens fill; for allocations that delayed it."""
        num_full = num_tokens // self.block_size
        self._check_hashes(request, num_full)
        table = self._tables.get(request.request_id)
        if table is not None:
            self._cache(request, table, num_full)

    def free(self, request_id: str) -> None:
        """Gives the request's blocks back, last first, so that the tail of a sequence is evicted before its start.

        Finish, abort and preemption alike; a request without blocks is legal.
        """
        table = self._tables.pop(request_id, None)
        if table is not None:
            self.pool.free_blocks(reversed(table.blocks))

    def block_ids(self, request_id: str) -> list[int]:
        """The request's block table; empty when it holds none."""
        table = self._tables.get(request_id)
        return [] if table is None else [block.block_id for block in table.blocks]

    @property
    def num_requests(self) -> int:
        """Requests that hold blocks."""
        return len(self._tables)

    def _check_computed_blocks(
        self, request: RequestView, table: _BlockTable | None, computed_blocks: Sequence[Block]
    ) -> None:
        if not computed_blocks:
            return
        if table is not None:
            raise RequestAlreadyRunning(request.request_id, len(table.blocks))
        self._check_hashes(request, len(computed_blocks))
        for position, (block, block_hash) in enumerate(zip(computed_blocks, request.block_hashes, strict=False)):
            if block.block_hash != block_hash:
                raise StalePrefix(request.request_id, position, block.block_id)

    def _check_hashes(self, request: RequestView, num_full: int) -> None:
        if num_full > len(request.block_hashes):
            raise MissingBlockHash(request.request_id, num_full, len(request.block_hashes))

    def _cache(self, request: RequestView, table: _BlockTable, num_full: int) -> None:
        num_cached = table.num_cached
        if num_full > num_cached:
            after = table.blocks[num_cached - 1] if num_cached else None
            self.pool.cache_full_blocks(
                table.blocks[num_cached:num_full], request.block_hashes[num_cached:num_full], after
            )
            table.num_cached = num_full

    def _with_preallocated(self, num_needed: int, num_held: int, num_available: int, num_lookahead_tokens: int) -> int:
        """num_needed and the blocks to take ahead; slots for lookahead tokens count as taken ahead already."""
        num_ahead = self.num_preallocated_blocks - num_lookahead_tokens // self.block_size
        if num_needed == 0 or num_ahead <= 0:
            return num_needed
        most = num_available
        if self.max_model_len is not None:
            most = min(most, self._blocks_for(self.max_model_len) - num_held)
        return max(num_needed, min(num_needed + num_ahead, most))

    def _clip(self, num_tokens: int) -> int:
        return num_tokens if self.max_model_len is None else min(num_tokens, self.max_model_len)

    def _blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold num_tokens tokens, as far as max_model_len lets a request grow."""
        return -(-self._clip(num_tokens) // self.block_size)
