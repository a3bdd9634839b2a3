"""A connector of the real scheduler whose KV lies in this process, and a node that keeps rows: what they hold is known.

The engine finds the connector by its module's path, as it would find a user's.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from tests.unit.shim.scheduler_kit import BLOCK, SlotWorker

GARBAGE = -1


class Elsewhere:
    """KV of blocks, by hash. ``later``: how often a load goes on in the background; ``failing``: how often it fails."""

    def __init__(self, seed: int = 0, *, later: float = 0.0, failing: float = 0.0) -> None:
        self.rng = random.Random(seed)
        self.later = later
        self.failing = failing
        self.hashes: set[bytes] = set()
        self.loading: dict[str, list[int]] = {}
        """Blocks by request, of loads that have begun in this step."""
        self.in_background: dict[str, list[int]] = {}
        self.loads = self.failures = 0


class ElsewhereConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """The scheduler's half."""

    elsewhere = Elsewhere()
    """Set by the test before it makes a scheduler."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        end = num_computed_tokens // BLOCK
        while end < len(request.block_hashes) and bytes(request.block_hashes[end]) in self.elsewhere.hashes:
            end += 1
        tokens = min(end * BLOCK, request.num_tokens - 1) - num_computed_tokens
        if tokens <= 0:
            return 0, False
        self._later = self.elsewhere.rng.random() < self.elsewhere.later
        return tokens, self._later

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens <= 0:
            return
        ids = blocks.get_block_ids()[0]
        last = -(-request.num_tokens // BLOCK)
        self.elsewhere.loads += 1
        target = self.elsewhere.in_background if self._later else self.elsewhere.loading
        target[request.request_id] = ids[: min(last, len(ids))]

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None: ...

    def wait_for_save(self) -> None: ...


class Node:
    """Rows of blocks by hash; evicts what nobody holds. It stands for the daemon, and for its leases."""

    def __init__(self, seed: int = 0, *, evicting: float = 0.0) -> None:
        self.rows: dict[bytes, tuple[int, ...]] = {}
        self.held: dict[str, list[bytes]] = {}
        self.evicted = self.model_changes = 0
        self._rng = random.Random(seed)
        self._evicting = evicting

    def holders(self) -> list[str]:
        return list(self.held)

    def acquire(self, req_id: str, hashes: Sequence[bytes]) -> int:
        self.release((req_id,))
        count = 0
        while count < len(hashes) and bytes(hashes[count]) in self.rows:
            count += 1
        if count:
            self.held[req_id] = [bytes(found) for found in hashes[:count]]
        return count

    def release(self, req_ids: Iterable[str]) -> None:
        for req_id in req_ids:
            self.held.pop(req_id, None)

    def model_changed(self) -> None:
        self.model_changes += 1

    def close(self) -> None: ...

    def evict_some(self) -> None:
        held = {block_hash for hashes in self.held.values() for block_hash in hashes}
        for block_hash in list(self.rows):
            if block_hash not in held and self._rng.random() < self._evicting:
                del self.rows[block_hash]
                self.evicted += 1


class SharingWorker(SlotWorker):
    """Publishes to a node and is filled from it. Rows computed on KV that failed to load are garbage.

    Attributes:
        published, filled: blocks.
        wrong: blocks that were published with other rows than their hash stands for.
        unfilled: blocks to be filled that the node did not have.
    """

    def __init__(self, node: Node, elsewhere: Elsewhere, requests: dict[str, Any]) -> None:
        super().__init__()
        self.node, self.elsewhere = node, elsewhere
        self.published = self.filled = self.wrong = self.unfilled = 0
        self._requests = requests
        self._meaning: dict[bytes, tuple[int, ...]] = {}

    def execute(self, output: Any) -> ModelRunnerOutput:
        self._learn()
        for named in getattr(output, "stagecache_settled", {}).values():
            self._publish(named)
        for block, block_hash in getattr(output, "stagecache_fill", ()):
            rows = self.node.rows.get(bytes(block_hash))
            self.unfilled += rows is None
            self.filled += rows is not None
            for offset in range(BLOCK):
                self.slots[block * BLOCK + offset] = GARBAGE if rows is None else rows[offset]
        result = super().execute(output)
        self._load(output, result)
        for named in getattr(output, "stagecache_published", {}).values():
            self._publish(named)
        for req_id in output.num_scheduled_tokens:
            request = self._requests.get(req_id)
            if request is not None:
                self.elsewhere.hashes.update(map(bytes, request.block_hashes[: request.num_computed_tokens // BLOCK]))
        self.node.evict_some()
        return result

    def _learn(self) -> None:
        """What each hash stands for: contents of the block's positions."""
        for request in self._requests.values():
            content, contents = 0, []
            for token in request.all_token_ids:
                content = hash((content, token))
                contents.append(content)
            for index, block_hash in enumerate(request.block_hashes):
                self._meaning[bytes(block_hash)] = tuple(contents[index * BLOCK : (index + 1) * BLOCK])

    def _publish(self, named: Sequence[tuple[int, bytes]]) -> None:
        for block, block_hash in named:
            rows = tuple(self.slots.get(block * BLOCK + offset, GARBAGE) for offset in range(BLOCK))
            self.published += 1
            self.wrong += rows != self._meaning[bytes(block_hash)]
            self.node.rows.setdefault(bytes(block_hash), rows)

    def _load(self, output: Any, result: ModelRunnerOutput) -> None:
        """Loads of this step end, well or not."""
        there = self.elsewhere
        failed = {r: ids for r, ids in there.loading.items() if there.rng.random() < there.failing}
        there.loading.clear()
        there.failures += len(failed)
        for req_id in failed:
            count = output.num_scheduled_tokens.get(req_id, 0)
            end = self._requests[req_id].num_computed_tokens if req_id in self._requests else 0
            for position in range(end - count, end):
                self.slots[self._slot(req_id, position)] = GARBAGE
        done = {req_id for req_id in there.in_background if there.rng.random() < 0.5}
        for req_id in done:
            del there.in_background[req_id]
        if failed or done:
            result.kv_connector_output = KVConnectorOutput(
                finished_recving=done or None,
                invalid_block_ids={ids[0] for ids in failed.values()},
            )
