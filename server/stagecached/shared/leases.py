"""Who holds which blocks of one namespace: leases by (owner, request), noted in the segment, so a restart keeps them.

An owner is a client that the daemon can tell dead: a session's worker or a scheduler that holds its lock. Each has a
bit; a block's ``B_HELD`` word says which owners hold it. A daemon that was killed knows requests no more, but the next
one holds for each owner what the bits say (*recovered*), until the owner has claimed its leases again or is dead: so
nothing leased is evicted in between.

Order of shared stores: an owner's slot before its first bit, and its last bit before the slot is given back.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from stagecached.index import Block, LeaseTable
from stagecached.shared import layout
from stagecached.shared.layout import block_word
from stagecached.shared.store import NamespaceStore, keys_of

MAX_LEASES: Final = 65_536
"""Leases of one owner."""


class TooManyLeasesError(RuntimeError):
    """More owners than a segment has slots for, or more leases than an owner may have. Nothing was changed."""


@dataclass
class _Owner:
    slot: int
    held: dict[Block, int] = field(default_factory=dict)
    """References of each block that are this owner's."""
    requests: set[str] = field(default_factory=set)
    recovered: list[Block] = field(default_factory=list)


class LeaseBook:
    """The leases on one store; thread-safe by the store's lock. An owner is named by its session id, 16 hex digits."""

    def __init__(self, store: NamespaceStore) -> None:
        self._store = store
        self._words = store.segment.words
        self._table = LeaseTable(store.pool)
        self._owners: dict[str, _Owner] = {}

    def __len__(self) -> int:
        """Leases, and owners that have not claimed theirs again."""
        with self._store.lock:
            return len(self._table) + sum(1 for owner in self._owners.values() if owner.recovered)

    def owners(self) -> list[str]:
        with self._store.lock:
            return list(self._owners)

    def check_room(self, owner: str, request_ids: Sequence[str]) -> None:
        """Raises: TooManyLeasesError, where leases for all of these requests would be too many."""
        with self._store.lock:
            known = self._owners.get(owner)
            if known is None and len(self._owners) >= layout.MAX_OWNERS:
                raise TooManyLeasesError(f"{layout.MAX_OWNERS} clients hold leases, the most that may")
            if len({*request_ids, *(known.requests if known else ())}) > MAX_LEASES:
                raise TooManyLeasesError(f"a client has {MAX_LEASES} leases, the most that it may have")

    def acquire(self, owner: str, request_id: str, block_hashes: Sequence[bytes], generation: int) -> int:
        """Hold the longest stored prefix of these hashes in place of what the request held; how many that is.

        Raises:
            TooManyLeasesError
        """
        self.check_room(owner, (request_id,))
        keys = keys_of(block_hashes, generation)
        with self._store.lock:
            entry = self._entry(owner)
            before = self._table.span(owner, request_id)
            span = self._table.acquire(owner, request_id, keys)
            self._store.count_lookup(keys, len(span))
            self._hold(entry, span)
            self._store.stamp((*reversed(before), *reversed(span)))
            if span:
                entry.requests.add(request_id)
            else:
                entry.requests.discard(request_id)
            self._let_go(entry, before)
            self._forget_if_idle(owner, entry)
            return len(span)

    def release(self, owner: str, request_id: str) -> bool:
        """End a lease. False where there is none."""
        with self._store.lock:
            entry = self._owners.get(owner)
            if entry is None or not self._release(owner, entry, request_id):
                return False
            self._forget_if_idle(owner, entry)
            return True

    def release_owner(self, owner: str, *, keep: Iterable[str] = ()) -> int:
        """End all leases of an owner but those of the requests ``keep``, the recovered ones too; how many that were."""
        with self._store.lock:
            entry = self._owners.get(owner)
            if entry is None:
                return 0
            ended = sum(self._release(owner, entry, request) for request in entry.requests - set(keep))
            ended += bool(entry.recovered)
            self._let_go(entry, entry.recovered)
            self._store.give_back(reversed(entry.recovered))
            entry.recovered = []
            self._forget_if_idle(owner, entry)
            return ended

    def recover(self) -> None:
        """Hold what the segment says is held. Called once, on a store that was just rebuilt."""
        with self._store.lock:
            owned = {
                slot: self._words[layout.S_OWNERS + slot]
                for slot in range(layout.MAX_OWNERS)
                if self._words[layout.S_OWNERS + slot]
            }
            known = sum(1 << slot for slot in owned)
            entries = {slot: _Owner(slot) for slot in owned}
            for block in self._store.pool.blocks:
                at = block_word(block.block_id) + layout.B_HELD
                bits = self._words[at]
                if not bits:
                    continue
                kept = bits & known if block.block_hash is not None else 0
                if kept != bits:
                    self._words[at] = kept
                for slot, entry in entries.items():
                    if kept >> slot & 1:
                        self._store.pool.touch((block,))
                        entry.held[block] = 1
                        entry.recovered.append(block)
            for slot, entry in entries.items():
                owner = f"{owned[slot]:016x}"
                self._owners[owner] = entry
                self._forget_if_idle(owner, entry)

    # ---------------------------------------------------------------- all under the lock

    def _entry(self, owner: str) -> _Owner:
        entry = self._owners.get(owner)
        if entry is None:
            taken = {other.slot for other in self._owners.values()}
            slot = next((i for i in range(layout.MAX_OWNERS) if i not in taken), None)
            if slot is None:
                raise TooManyLeasesError(f"{layout.MAX_OWNERS} clients hold leases, the most that may")
            entry = self._owners[owner] = _Owner(slot)
            self._words[layout.S_OWNERS + slot] = int(owner, 16)
            self._store.point("after_owner")
        return entry

    def _release(self, owner: str, entry: _Owner, request_id: str) -> bool:
        span = self._table.span(owner, request_id)
        if not self._table.release(owner, request_id):
            return False
        entry.requests.discard(request_id)
        self._store.stamp(reversed(span))
        self._let_go(entry, span)
        return True

    def _hold(self, entry: _Owner, span: Iterable[Block]) -> None:
        for block in span:
            count = entry.held.get(block, 0)
            entry.held[block] = count + 1
            if count == 0:
                self._words[block_word(block.block_id) + layout.B_HELD] |= 1 << entry.slot
                self._store.point("inside_hold")

    def _let_go(self, entry: _Owner, span: Iterable[Block]) -> None:
        for block in span:
            count = entry.held.pop(block) - 1
            if count:
                entry.held[block] = count
            else:
                self._words[block_word(block.block_id) + layout.B_HELD] &= ~(1 << entry.slot)
                self._store.point("inside_let_go")

    def _forget_if_idle(self, owner: str, entry: _Owner) -> None:
        if not entry.requests and not entry.recovered:
            del self._owners[owner]
            self._words[layout.S_OWNERS + entry.slot] = 0
            self._store.point("after_owner_gone")
