"""Opening and closing the keys of an attached session."""

from __future__ import annotations

import asyncio

import structlog

from stagecache_wire import shm
from stagecache_wire.geometry import MAX_KEYS, KeySchema
from stagecache_wire.v1 import stagecache_pb2 as pb
from stagecached.access import Access
from stagecached.background import Background, progress_of
from stagecached.budget import Budget, key_cost
from stagecached.keymemory import KeyMemory
from stagecached.keystore import KeyStore
from stagecached.manifest import KeyEntry, ManifestStore, NotDurableError
from stagecached.refusal import Refusal, not_durable
from stagecached.session import Session

log = structlog.get_logger()


class SessionKeys:
    """Makes and forgets keys: budget, segments, manifest, memory, in this order. On the event loop."""

    def __init__(
        self, budget: Budget, manifests: ManifestStore, memory: KeyMemory, access: Access, background: Background
    ) -> None:
        self._budget = budget
        self._manifests = manifests
        self._memory = memory
        self._access = access
        self._background = background

    async def open(self, session: Session, schema: KeySchema) -> KeyStore:
        """The open key of that name, durable in the manifest; the same one when repeated.

        A provisional key that is opened again as confirmed becomes confirmed (K1). The work goes on where the caller
        is cancelled.

        Raises:
            Refusal: the session takes no calls, another dtype or row shape (K3), too many keys, or no room.
        """
        session.check_usable()
        store = session.key_named(schema.name)
        if store is not None and store.schema == schema:
            return store
        return await asyncio.shield(self._background.keep(self._open(session, schema)))

    def closed(self, session: Session, key_id: int) -> None:
        """The consumer gave a key up (K1): its memory is back already. Its id is never given again."""
        reservation = session.key_reservations.pop(key_id, None)
        if reservation is not None:
            reservation.release()
        session.manifest.keys = [key for key in session.manifest.keys if key.key_id != key_id]
        try:
            self._manifests.save(session.manifest)
        except NotDurableError as error:  # A key of which a part is gone counts as closed.
            log.warning("key is closed, and not noted", session=session.session_id, key_id=key_id, why=str(error))
        log.info("key closed", session=session.session_id, key_id=key_id)

    async def _open(self, session: Session, schema: KeySchema) -> KeyStore:
        async with session.key_lock:
            session.check_usable()
            store = session.key_named(schema.name)
            if store is not None:
                return self._reopen(session, store, schema)
            if len(session.segments.keys) >= MAX_KEYS:
                raise Refusal(
                    pb.REASON_TOO_MANY, f"{session.label} has {MAX_KEYS} keys open, the most that a session may have."
                )
            store = await self._make(session, schema)
        self._memory.remember(session.manifest.model, session.manifest.stage, schema)
        log.info("key opened", session=session.session_id, key=schema.name, dtype=schema.dtype, shape=schema.row_shape)
        return store

    def _reopen(self, session: Session, store: KeyStore, schema: KeySchema) -> KeyStore:
        if not store.schema.same_rows(schema):
            raise Refusal(
                pb.REASON_SCHEMA_MISMATCH,
                f"key {schema.name} is open with dtype {store.schema.dtype} and row shape {store.schema.row_shape}, "
                f"not {schema.dtype} and {schema.row_shape}.",
                "A key keeps its dtype and row shape for the life of a session.",
            )
        if store.schema.provisional and not schema.provisional:
            store.schema = schema
            manifest = session.manifest
            manifest.keys = [
                KeyEntry.of(store.key_id, schema) if key.key_id == store.key_id else key for key in manifest.keys
            ]
            self._manifests.save(manifest)
            self._memory.remember(manifest.model, manifest.stage, schema)
        return store

    async def _make(self, session: Session, schema: KeySchema) -> KeyStore:
        what = f"key {schema.name} of {session.label}"
        cost = key_cost(session.segments.geometry, schema)
        (reservation,) = self._budget.reserve(session.label, what, [cost])
        manifest, key_id = session.manifest, session.manifest.next_key_id

        def allocate() -> KeyStore:
            store = session.segments.open_key(key_id, schema, progress_of(what))
            self._access.open_session(session.names)
            return store

        try:
            store = await self._background.in_thread(allocate)
        except BaseException as error:
            reservation.release()
            if isinstance(error, shm.ShmFullError):
                raise self._budget.shm_full(what, cost) from error
            raise
        reservation.settled()
        noted = manifest.keys
        manifest.keys = [*noted, KeyEntry.of(key_id, schema)]
        manifest.next_key_id = key_id + 1
        try:
            self._manifests.save(manifest)
        except NotDurableError as error:
            manifest.keys = noted
            session.segments.close_key(key_id)
            reservation.release()
            raise not_durable(what, error) from error
        session.key_reservations[key_id] = reservation
        return store
