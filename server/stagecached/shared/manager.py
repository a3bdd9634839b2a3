"""All namespaces of this daemon: the one module that makes, fills, drops and adopts them.

    recover   a start: namespaces that an earlier daemon left, before any session is adopted
    adopt     a session that was a member is one again, before its consumer runs
    settle    every session was adopted: what nobody can reach or claims any more goes
    join      segment made, manifest durable, then the answer
    leave     a session is over

On the event loop; what takes long runs in threads. A namespace outlives its members: it is dropped when another one
needs its room, the one used longest ago first, and never while a session is in it or somebody holds a lease.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

import structlog

from stagecache_wire import layout, shm
from stagecache_wire.geometry import KeySchema
from stagecache_wire.shm import PREFIX
from stagecached import sweep
from stagecached.background import Background
from stagecached.budget import mib
from stagecached.index import Namespace
from stagecached.lasting import lasting, use_huge_pages
from stagecached.manifest import ManifestStore, NotDurableError
from stagecached.memory_limits import cgroup_room
from stagecached.refusal import not_durable
from stagecached.session import Session
from stagecached.shared.figures import IndexTotals
from stagecached.shared.layout import SharedGeometry, fitting_blocks
from stagecached.shared.manifest import NamespaceManifest, NamespaceManifestError, NamespaceManifests
from stagecached.shared.membership import Membership
from stagecached.shared.rebuild import rebuild
from stagecached.shared.segment import SegmentMismatchError, SharedSegment
from stagecached.shared.space import Space
from stagecached.shared.store import NamespaceStore

StoreFactory = Callable[[SharedSegment], NamespaceStore]

log = structlog.get_logger()


@dataclass(frozen=True)
class Off:
    """Nothing is shared. why: for people, what was found and what to do."""

    why: str


HUGE_PAGES_EVERY_S: Final = 60.0
"""The map from hash to block is laid out anew as it fills and changes: it must be asked for again."""
HUGE_PAGES_FROM: Final = 1 << 17
"""Blocks of all namespaces from which on their tables outgrow the processor's caches."""


class CgroupFullError(RuntimeError):
    """The control group's memory limit has no room for a segment; the text is for people."""


DISABLED: Final = Off("shared blocks are off on this node: its daemon runs with --shared-bytes 0.")


def segment_name(node: str, namespace_id: str) -> str:
    """Name of a namespace's segment; ``stagecached.sweep`` knows the form."""
    return f"{PREFIX}.{node}.shared.{namespace_id[:16]}"


class SharedBlocks:
    """Composes what a namespace needs, and alone makes and drops one."""

    def __init__(
        self,
        node: str,
        manifests: NamespaceManifests,
        sessions: ManifestStore,
        background: Background,
        *,
        limit_bytes: int,
        parts: int,
        make_store: StoreFactory = NamespaceStore,
    ) -> None:
        """sessions: where a session's membership is noted. limit_bytes: of all namespaces together, 0 for none; each
        gets one of ``parts`` equal parts.
        """
        self.limit_bytes = limit_bytes
        self._node = node
        self._manifests = manifests
        self._session_manifests = sessions
        self._background = background
        self._parts = parts
        self._make_store = make_store
        self._spaces: dict[str, Space] = {}
        self.totals = IndexTotals(self.all, limit_bytes)
        self._creating = asyncio.Lock()
        self._huge_pages_at = 0.0

    @property
    def is_on(self) -> bool:
        return self.limit_bytes > 0

    @property
    def used_bytes(self) -> int:
        return sum(space.total_bytes for space in self._spaces.values())

    def all(self) -> list[Space]:
        return list(self._spaces.values())

    def get(self, namespace_id: str) -> Space | None:
        return self._spaces.get(namespace_id)

    def membership(self, session_id: str) -> tuple[Space, Membership] | None:
        """Where a session is a member."""
        for space in self._spaces.values():
            if session_id in space.members:
                return space, space.members[session_id]
        return None

    # ---------------------------------------------------------------- members

    async def join(self, session: Session, namespace: Namespace, keys: dict[int, KeySchema]) -> Space | Off:
        """Make the session a member, in place of what it was a member of; durable with its manifest.

        keys: the session's key id to schema, those that the namespace consists of.

        Raises:
            Refusal: it cannot be made durable; the session then is a member of nothing.
        """
        if not self.is_on:
            return DISABLED
        ordered = sorted(keys.items(), key=lambda item: item[1].name)
        async with self._creating:
            space = self._spaces.get(namespace.digest.hex())
            try:
                if space is None:
                    schemas = tuple(KeySchema(key.name, key.dtype, key.row_shape) for _, key in ordered)
                    made = await asyncio.shield(self._background.keep(self._create(namespace, schemas)))
                    if isinstance(made, Off):
                        self.totals.note("refused")
                        return made
                    space = made
                session.check_usable()
                self._enter(session, space, {key_id: at for at, (key_id, _) in enumerate(ordered)})
            except NotDurableError as error:
                raise not_durable(f"join of {session.label}", error) from error
        return space

    def _enter(self, session: Session, space: Space, key_ids: dict[int, int]) -> None:
        """A daemon that is killed in here leaves a session without a generation, which is no member."""
        self._quit(session)
        before, session.manifest.namespace = session.manifest.namespace, space.namespace_id
        try:
            self._session_manifests.save(session.manifest)
        except NotDurableError:
            session.manifest.namespace = before
            raise
        membership = Membership(space.store, key_ids, space.store.base_generation, _noting(session))
        space.members[session.session_id] = membership
        session.segments.shared = membership
        log.info("namespace joined", session=session.session_id, label=session.label, namespace=space.namespace_id[:16])

    def _quit(self, session: Session) -> None:
        found = self.membership(session.session_id)
        session.segments.shared = None
        if found is not None:
            space, membership = found
            membership.end()
            del space.members[session.session_id]
        session.segments.words[layout.D_SHARED_GENERATION] = 0

    def adopt(self, session: Session) -> None:
        """Make an adopted session again a member where it was one, else tell its worker that it is none. Its consumer
        must not run yet.
        """
        space = self._spaces.get(session.manifest.namespace)
        generation = session.segments.words[layout.D_SHARED_GENERATION]
        if generation == 0:
            return
        stores = [] if space is None else [session.key_named(schema.name) for schema in space.store.geometry.keys]
        key_ids = {store.key_id: at for at, store in enumerate(stores) if store is not None}
        if space is None or len(key_ids) < len(stores):
            session.segments.words[layout.D_SHARED_GENERATION] = 0
            log.warning("session is in no namespace any more", session=session.session_id, label=session.label)
            return
        membership = Membership(space.store, key_ids, generation, _noting(session))
        space.members[session.session_id] = membership
        session.segments.shared = membership

    def leave(self, session_id: str) -> None:
        """A session is over, its consumer has stopped: its membership and its leases end. It may have none."""
        found = self.membership(session_id)
        if found is not None:
            space, membership = found
            membership.end()
            del space.members[session_id]
        self.owner_gone(session_id)

    def owner_gone(self, owner: str) -> None:
        """A client is dead or has left: its leases end."""
        ended = sum(space.leases.release_owner(owner) for space in self._spaces.values())
        if ended:
            log.info("leases ended with their owner", owner=owner, leases=ended)

    # ---------------------------------------------------------------- making and dropping

    async def _create(self, namespace: Namespace, schemas: tuple[KeySchema, ...]) -> Space | Off:
        part = self.limit_bytes // self._parts
        while self.limit_bytes - self.used_bytes < part and (idle := self._idlest()) is not None:
            self._drop(idle, f"room for another namespace of stage {namespace.stage}")
        room = self.limit_bytes - self.used_bytes
        size = min(part, room)
        num_blocks = fitting_blocks(size, namespace.block_size, schemas)
        if size < part // 2 or num_blocks == 0:
            users = ", ".join(f"{space.manifest.stage} {mib(space.total_bytes)}" for space in self.all()) or "nobody"
            return Off(
                f"shared blocks have {mib(max(room, 0))} of {mib(self.limit_bytes)} MiB free, a namespace gets "
                f"{mib(part)} and a block needs {mib(_block_bytes(namespace, schemas))} (used by: {users}). Raise "
                "--shared-bytes or --shared-namespaces."
            )
        manifest = NamespaceManifest.of(namespace, schemas, num_blocks, time.time())
        try:
            store = await self._background.in_thread(partial(self._allocate, manifest))
        except shm.ShmFullError as error:
            return Off(f"shared blocks need {mib(error.needed)} MiB, /dev/shm has {mib(error.free)} MiB free.")
        except CgroupFullError as error:
            return Off(str(error))
        space = self._spaces[manifest.namespace_id] = Space.of(manifest, store)
        self.totals.note("made")
        log.info(
            "namespace made",
            namespace=space.namespace_id[:16],
            stage=manifest.stage,
            blocks=num_blocks,
            mib=mib(space.total_bytes),
        )
        return space

    def _allocate(self, manifest: NamespaceManifest) -> NamespaceStore:
        """In a thread. Segment first: one without a manifest is swept at the next start."""
        name, geometry = segment_name(self._node, manifest.namespace_id), manifest.geometry()
        shm.unlink_segment(name)
        if shm.free_bytes() < geometry.total_bytes:
            raise shm.ShmFullError(geometry.total_bytes, shm.free_bytes())
        group = cgroup_room()
        if group is not None and group.free_bytes < geometry.total_bytes:
            raise CgroupFullError(
                f"shared blocks need {mib(geometry.total_bytes)} MiB; the daemon's control group has a memory limit of "
                f"{mib(group.limit_bytes)} MiB, of which {mib(group.free_bytes)} are free: the kernel would kill the "
                "daemon. Raise the memory limit of its container or unit (`stagecache plan --shared-bytes` computes "
                "it), or lower --shared-bytes."
            )
        segment = SharedSegment.create(name, geometry)
        try:
            with lasting():
                store = self._make_store(segment)
            store.point("before_namespace_manifest")
            self._manifests.save(manifest)
        except BaseException:
            segment.unlink()
            raise
        return store

    def _idlest(self) -> Space | None:
        idle = [space for space in self._spaces.values() if space.is_idle]
        return min(idle, key=lambda space: space.store.used_ns, default=None)

    def _drop(self, space: Space, why: str) -> None:
        """Manifest first: a segment without one is swept."""
        del self._spaces[space.namespace_id]
        self.totals.dropping(space)
        self._manifests.remove(space.namespace_id)
        space.store.point("before_namespace_unlink")
        space.store.segment.unlink()
        self._background.keep(self._background.in_thread(space.store.pool.close))
        log.info("namespace dropped", namespace=space.namespace_id[:16], stage=space.manifest.stage, why=why)

    # ---------------------------------------------------------------- start and stop

    async def recover(self) -> None:
        """Take up what an earlier daemon left, sealed blocks and leases included; the rest of it is removed."""
        await self._background.in_thread(self._recover)

    def _recover(self) -> None:
        kept: set[str] = set()
        for namespace_id in list(self._manifests.ids()):
            started = time.monotonic()
            try:
                if not self.is_on:
                    raise NamespaceManifestError("shared blocks are off now")
                manifest = self._manifests.load(namespace_id)
                segment = SharedSegment.open(segment_name(self._node, namespace_id), manifest.geometry())
                with lasting():
                    store = self._make_store(segment)
                    blocks, dropped = rebuild(store)
                space = Space.of(manifest, store)
                space.leases.recover()
            except (NamespaceManifestError, SegmentMismatchError) as error:
                log.warning("namespace is given up", namespace=namespace_id[:16], why=str(error))
                self._manifests.remove(namespace_id)
                self.totals.note("given_up")
                continue
            store.settled = False
            self._spaces[namespace_id] = space
            kept.add(store.segment.name)
            self.totals.note("recovered", blocks, dropped)
            log.info(
                "namespace recovered",
                namespace=namespace_id[:16],
                stage=manifest.stage,
                blocks=blocks,
                dropped=dropped,
                owners=len(space.leases.owners()),
                took_s=round(time.monotonic() - started, 3),
            )
        sweep.remove_shared_files(self._node, keep=kept)

    def settle(self, is_alive: Callable[[str], bool]) -> None:
        """Every session that lives was adopted. is_alive(owner): whether a client that held leases still does."""
        for space in self.all():
            for owner in space.leases.owners():
                if not is_alive(owner):
                    space.leases.release_owner(owner)
            space.store.settled = True
            space.store.drop_unreachable()
            self._background.keep(self._pin(space))
        while self.used_bytes > self.limit_bytes and (idle := self._idlest()) is not None:
            self._drop(idle, "--shared-bytes is lower now")

    def tick(self) -> None:
        """Time has passed: large tables that were laid out anew get huge pages again (``stagecached.lasting``)."""
        now = time.monotonic()
        blocks = sum(space.store.geometry.num_blocks for space in self._spaces.values())
        if blocks >= HUGE_PAGES_FROM and now >= self._huge_pages_at:
            self._huge_pages_at = now + HUGE_PAGES_EVERY_S
            self._background.keep(self._background.in_thread(use_huge_pages))

    async def _pin(self, space: Space) -> None:
        """Fault and lock what an earlier daemon left, beside its use: large segments take seconds."""
        space.users += 1
        try:
            await self._background.in_thread(space.store.segment.pin)
        finally:
            space.users -= 1

    def stop(self, *, keep: bool) -> None:
        """keep: the next daemon takes everything up; else all of it goes."""
        if not keep:
            for space in self.all():
                self._drop(space, "the daemon stops")


def _noting(session: Session) -> Callable[[int], None]:
    """Writes a generation to the session's own control segment: one store, which a restart finds."""
    words = session.segments.words

    def note(generation: int) -> None:
        words[layout.D_SHARED_GENERATION] = generation

    return note


def _block_bytes(namespace: Namespace, schemas: tuple[KeySchema, ...]) -> int:
    return SharedGeometry(namespace.digest, 1, namespace.block_size, schemas).block_bytes
