"""One namespace as the daemon holds it: its name, its store, its leases, its members."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from stagecache_wire import messages
from stagecache_wire.v1 import stagecache_pb2 as pb
from stagecached.index import Namespace
from stagecached.shared.leases import LeaseBook
from stagecached.shared.manifest import NamespaceManifest
from stagecached.shared.membership import Membership
from stagecached.shared.store import NamespaceStore


@dataclass
class Space:
    """On the event loop, but for store, leases and memberships, which are thread-safe."""

    manifest: NamespaceManifest
    namespace: Namespace
    store: NamespaceStore
    leases: LeaseBook
    members: dict[str, Membership] = field(default_factory=dict)
    """By session id."""
    users: int = 0
    """Calls that work on it in a thread."""

    @classmethod
    def of(cls, manifest: NamespaceManifest, store: NamespaceStore) -> Space:
        return cls(manifest, manifest.namespace(), store, LeaseBook(store))

    @property
    def namespace_id(self) -> str:
        return self.manifest.namespace_id

    @property
    def total_bytes(self) -> int:
        return self.store.geometry.total_bytes

    @property
    def is_idle(self) -> bool:
        """No session has joined, nobody holds a lease: it may be dropped for another namespace."""
        return not self.members and not self.users and not len(self.leases)

    def stats(self) -> pb.NamespaceStats:
        store, figures, counts = self.store, self.store.figures, self.store.counts()
        oldest_ns = store.oldest_ns()
        return pb.NamespaceStats(
            namespace_id=self.namespace_id,
            stage=self.manifest.stage,
            model_fingerprint=self.manifest.model_fingerprint,
            hash_algorithm=self.manifest.hash_algorithm,
            hash_seed=self.manifest.hash_seed,
            dtype=self.manifest.dtype,
            block_size=self.manifest.block_size,
            tensor_parallel_size=self.manifest.tensor_parallel_size,
            keys=[messages.schema_to_wire(schema) for schema in store.geometry.keys],
            bytes=self.total_bytes,
            block_bytes=store.geometry.block_bytes,
            num_blocks=store.geometry.num_blocks,
            held=counts["held"],
            cached=counts["cached"],
            free=counts["free"],
            generation=store.base_generation,
            members=len(self.members),
            leases=len(self.leases),
            lookup_hashes=figures.lookup_hashes,
            hit_hashes=figures.hit_hashes,
            published=figures.published,
            known=figures.known,
            skipped={outcome.name.lower(): count for outcome, count in list(figures.skipped.items())},
            filled=figures.filled,
            evictions=dict(figures.evictions),
            created_unix_s=self.manifest.created_unix_s,
            used_unix_s=store.used_ns / 1e9,
            locked=store.segment.locked,
            oldest_s=0.0 if oldest_ns is None else max(time.time() - oldest_ns / 1e9, 0.0),
        )
