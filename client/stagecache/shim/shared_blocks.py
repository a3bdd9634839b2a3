"""What the scheduler's side says of node-shared blocks, and which external KV the engine may use (G2).

The scheduler knows which blocks a step makes full, under which hashes, and how much of a request's KV comes from a
connector; the worker knows neither. So this sets three attributes on each scheduler output, which pickling keeps:

    stagecache_published  dict of request id to (block id, hash) pairs: blocks that this step makes full
    stagecache_settled    the same of earlier steps, of which it is known only now that their KV was loaded well: a step
                          that loads KV while it runs, and what was scheduled behind it, may have computed with garbage
    stagecache_fill       (block id, hash) pairs: blocks whose KV comes from a connector and whose hashes the engine
                          publishes in this step; the worker has them filled before any hit of the step is gathered

and cuts what a connector offers to the blocks whose rows the node holds, under a lease that lasts as long as the
request runs: the other tokens are computed like any others. Where the daemon does not answer, that is all of them.

    get_num_new_matched_tokens()      of the connector: the offer is cut
    update_state_after_alloc()        of the connector: its blocks are known now, and published unless it loads later
    _update_waiting_for_remote_kv()   of the scheduler: what was loaded meanwhile is published now
    update_from_output()              of the scheduler: whether the KV of a step was loaded well
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from stagecache.shim.adapters import AdapterTags
from stagecache.shim.methods import method_of

if TYPE_CHECKING:
    from stagecache.shim.block_leases import BlockLeases

SHARED_BLOCKS_ENV: Final = "STAGECACHE_SHARED_BLOCKS"
"""Set to 1, a stage shares its blocks on the node and may get KV from a connector."""

NEEDED: Final = {
    "Scheduler": ("update_from_output", "_update_waiting_for_remote_kv"),
    "KVCacheManager": ("get_blocks",),
}
"""What is wrapped or called of the scheduler's side, by class; without one of them nothing is shared."""

CONNECTOR: Final = ("get_num_new_matched_tokens", "update_state_after_alloc")
"""What is wrapped of a connector."""

NamedBlock: TypeAlias = tuple[int, bytes]


def shared_blocks_wanted() -> bool:
    """Whether this engine's environment turns shared blocks on."""
    return os.environ.get(SHARED_BLOCKS_ENV) == "1"


@dataclass(frozen=True)
class Offer:
    """What the engine was told that a connector has: from block ``first`` on; ``later``: it is loaded in the
    background, before the request is scheduled.
    """

    first: int
    later: bool


class SharedBlocks:
    """Decides for one scheduler. Engine's thread.

    Attributes:
        offered, used: external tokens that the connector offered, and of these used.
    """

    def __init__(self, leases: BlockLeases, block_size: int, tags: AdapterTags | None = None) -> None:
        self.leases = leases
        self.offered = 0
        self.used = 0
        self._block_size = block_size
        self._tags = tags or AdapterTags()
        self._full: dict[str, int] = {}
        self._offers: dict[str, Offer] = {}
        self._loading: dict[str, tuple[int, list[NamedBlock]]] = {}
        self._fill: list[NamedBlock] = []
        self._in_flight: list[tuple[Any, dict[str, list[NamedBlock]]]] = []
        self._settled: dict[str, list[NamedBlock]] = {}

    def wrap(self, scheduler: Any) -> None:
        """Wrap the methods of a scheduler's connector, where it has one."""
        connector = scheduler.connector
        if connector is None:
            return
        connector.get_num_new_matched_tokens = self._get_num_new_matched_tokens(connector)
        connector.update_state_after_alloc = self._update_state_after_alloc(connector)
        scheduler._update_waiting_for_remote_kv = self._update_waiting_for_remote_kv(scheduler)
        scheduler.update_from_output = self._update_from_output(scheduler)

    def put_on(self, output: Any, requests: dict[str, Any], manager: Any) -> None:
        """Set the attributes of a step's output, and let go of what its ended requests held."""
        ended = [*output.finished_req_ids, *(output.preempted_req_ids or ())]
        if ended:
            self._forget(ended)
        output.stagecache_fill, self._fill = self._fill, []
        output.stagecache_settled, self._settled = self._settled, {}
        full = self._published(output, requests, manager)
        output.stagecache_published = full
        if self._in_flight or getattr(output, "has_sync_kv_loads", False):
            for _, earlier in self._in_flight:  # Their blocks may have another tenant once it is known.
                for req_id in output.preempted_req_ids or ():
                    earlier.pop(req_id, None)
            self._in_flight.append((output, full))
            output.stagecache_published = {}

    def forget_all_but(self, requests: Container[str]) -> None:
        """Let go of what requests held that the scheduler does not know: the output that named their end was lost, and
        so was what others of that time were to publish or fill.
        """
        self._fill, self._settled = [], {}
        self._in_flight.clear()
        self._full.clear()
        known = {*self._offers, *self._loading, *self.leases.holders()}
        self._forget([req_id for req_id in known if req_id not in requests])

    # ----------------------------------------------------------------- PUBLISH

    def _published(self, output: Any, requests: dict[str, Any], manager: Any) -> dict[str, list[NamedBlock]]:
        full, size = self._full, self._block_size
        for req_id in output.scheduled_cached_reqs.resumed_req_ids:
            full.pop(req_id, None)
        found: dict[str, list[NamedBlock]] = {}
        for req_id, count in output.num_scheduled_tokens.items():
            request = requests.get(req_id)
            if request is None:
                continue
            end = request.num_computed_tokens  # Behind this step.
            known = full.get(req_id)
            if known is None:
                known = full[req_id] = (end - count) // size
            if end // size > known:
                named = self._named(request, manager.get_blocks(req_id).blocks[0], known, end // size)
                full[req_id] = known + len(named)
                if named:
                    found[req_id] = named
        return found

    def _named(self, request: Any, blocks: Any, first: int, end: int) -> list[NamedBlock]:
        """Blocks [first, end) of a request with their hashes, as far as the engine has hashed them. The tokens that a
        step in flight will sample it does not know yet.
        """
        hashes = self._hashes(request, first, end)
        return [(block.block_id, block_hash) for block, block_hash in zip(blocks[first:end], hashes, strict=False)]

    def _hashes(self, request: Any, first: int, end: int) -> list[bytes]:
        """Hashes of blocks [first, end), as all engines of the node know them; none where they cannot."""
        found = request.block_hashes[first:end]
        adapter = getattr(request, "lora_request", None)
        return list(found) if adapter is None else self._tags.tagged(adapter, found)

    # -------------------------------------------------------------------- FILL

    def _get_num_new_matched_tokens(self, connector: Any) -> Callable[..., Any]:
        inner, size = method_of(connector, "get_num_new_matched_tokens"), self._block_size

        @functools.wraps(inner)
        def get_num_new_matched_tokens(request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
            external, later = inner(request, num_computed_tokens)
            if not external:
                return external, later
            self._offers.pop(request.request_id, None)
            self.offered += external
            first = num_computed_tokens // size
            # The last token of a prompt is computed always, and a hit ends with a block (H3).
            last = min(num_computed_tokens + external, request.num_tokens - 1) // size
            held = self.leases.acquire(request.request_id, self._hashes(request, first, last))
            usable = (first + held) * size - num_computed_tokens
            if held == 0 or usable <= 0:
                return 0, False
            self._offers[request.request_id] = Offer(first, later)
            return usable, later

        return get_num_new_matched_tokens

    def _update_state_after_alloc(self, connector: Any) -> Callable[..., Any]:
        inner, size = method_of(connector, "update_state_after_alloc"), self._block_size

        @functools.wraps(inner)
        def update_state_after_alloc(request: Any, blocks: Any, num_external_tokens: int) -> Any:
            result = inner(request, blocks, num_external_tokens)
            offer = self._offers.pop(request.request_id, None)
            if offer is not None and num_external_tokens > 0:
                self.used += num_external_tokens
                end = offer.first + -(-num_external_tokens // size)
                named = self._named(request, blocks.blocks[0], offer.first, end)
                if offer.later:
                    self._loading[request.request_id] = offer.first, named
                else:
                    self._fill += named
            return result

        return update_state_after_alloc

    def _update_waiting_for_remote_kv(self, scheduler: Any) -> Callable[..., Any]:
        inner, size = method_of(scheduler, "_update_waiting_for_remote_kv"), self._block_size

        @functools.wraps(inner)
        def update_waiting_for_remote_kv(request: Any) -> Any:
            result = inner(request)
            first, named = self._loading.pop(request.request_id, (0, []))
            # What could not be loaded the engine computes.
            self._fill += named[: max(0, request.num_computed_tokens // size - first)]
            return result

        return update_waiting_for_remote_kv

    def _update_from_output(self, scheduler: Any) -> Callable[..., Any]:
        inner = method_of(scheduler, "update_from_output")

        @functools.wraps(inner)
        def update_from_output(scheduler_output: Any, model_runner_output: Any, *args: Any, **kwargs: Any) -> Any:
            result = inner(scheduler_output, model_runner_output, *args, **kwargs)
            if self._in_flight and self._in_flight[0][0] is scheduler_output:
                _, full = self._in_flight.pop(0)
                loaded = getattr(model_runner_output, "kv_connector_output", None)
                if loaded is not None and (loaded.invalid_block_ids or getattr(loaded, "failed_recving", None)):
                    self._in_flight.clear()
                    self._full.clear()
                else:
                    for req_id, named in full.items():
                        self._settled.setdefault(req_id, []).extend(named)
            return result

        return update_from_output

    def _forget(self, req_ids: list[str]) -> None:
        self.leases.release(req_ids)
        for req_id in req_ids:
            self._full.pop(req_id, None)
            self._offers.pop(req_id, None)
            self._loading.pop(req_id, None)
