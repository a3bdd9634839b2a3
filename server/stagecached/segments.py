"""All shared memory of one session, as the daemon holds it: it creates, sizes, maps and unlinks every segment."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from stagecache_wire import layout, shm
from stagecache_wire.geometry import Geometry, KeySchema, key_bytes, table_bytes
from stagecache_wire.layout import ControlLayout
from stagecache_wire.names import SessionNames
from stagecached.keystore import KeyStore, adopt_key, create_key
from stagecached.memlock import tell_not_locked
from stagecached.shared.membership import Membership

Progress = Callable[[str, int, int], None]
"""Called with what is being prefaulted, bytes done and bytes in all."""


class AdoptError(RuntimeError):
    """Segments that an earlier daemon left do not fit: the session cannot be adopted."""


class SessionSegments:
    """Control segment, arena, slot words, keys and doorbells of one session.

    Attributes:
        words: memoryview of u64, the whole control segment.
        slot_words: u64 [num_slots], see ``stagecache_wire.presence``.
        arena: u8 [arena_bytes].
        keys: open keys by id.
        shared: the session's part in node-shared blocks; None while it has joined no namespace.
    """

    def __init__(
        self,
        names: SessionNames,
        geometry: Geometry,
        control: shm.Segment,
        arena: shm.Segment,
        slots: shm.Segment,
        *,
        mode: int = 0o600,
    ) -> None:
        self.names = names
        self.geometry = geometry
        self.layout = ControlLayout.of(geometry)
        self.keys: dict[int, KeyStore] = {}
        self.shared: Membership | None = None
        self.words = control.view.cast("Q")
        self.control_bytes = control.view
        self.arena: NDArray[np.uint8] = np.frombuffer(arena.map, np.uint8)
        self.slot_words: NDArray[np.uint64] = np.frombuffer(slots.map, np.uint64, geometry.num_slots)
        self._parts = [control, arena, slots]
        self._mode = mode
        self.daemon_doorbell, self.worker_doorbell = shm.open_doorbells(names.daemon_doorbell, names.worker_doorbell)

    @classmethod
    def create(
        cls,
        names: SessionNames,
        geometry: Geometry,
        boot_id: int,
        progress: Progress | None = None,
        *,
        mode: int = 0o600,
    ) -> SessionSegments:
        """Make and prefault a session's segments, header written.

        Raises:
            shm.ShmFullError: no room; nothing is left behind.
        """
        control_layout = ControlLayout.of(geometry)
        made: list[shm.Segment] = []
        try:
            for name, size in (
                (names.control, control_layout.total_bytes),
                (names.arena, geometry.arena_bytes),
                (names.slots, table_bytes(geometry)),
            ):
                made.append(shm.create_segment(name, size, mode))
            shm.create_semaphore(names.daemon_doorbell, mode)
            shm.create_semaphore(names.worker_doorbell, mode)
            session = cls(names, geometry, *made, mode=mode)
        except BaseException:
            for segment in made:
                shm.unlink_segment(segment.name)
            shm.unlink_semaphore(names.daemon_doorbell)
            shm.unlink_semaphore(names.worker_doorbell)
            raise
        session._prefault(made, progress)
        for word, value in layout.header_words(names.session_id, geometry):
            session.words[word] = value
        session.words[layout.D_BOOT_ID] = boot_id
        return session

    @classmethod
    def adopt(
        cls,
        names: SessionNames,
        geometry: Geometry,
        keys: dict[int, KeySchema],
        boot_id: int,
        *,
        mode: int = 0o600,
    ) -> SessionSegments:
        """Map what an earlier daemon made, and check it. The log is not touched.

        Raises:
            AdoptError: a segment is gone, of another length, of another ABI or of another geometry.
        """
        try:
            parts = [shm.open_segment(name) for name in (names.control, names.arena, names.slots)]
            needed = (ControlLayout.of(geometry).total_bytes, geometry.arena_bytes, table_bytes(geometry))
            if any(part.size != size for part, size in zip(parts, needed, strict=True)):
                raise AdoptError("a segment is not as long as its geometry says")
            session = cls(names, geometry, *parts, mode=mode)
        except (FileNotFoundError, ValueError) as error:
            raise AdoptError(f"a segment cannot be mapped: {error}") from error
        try:
            session._adopt_parts(keys)
        except BaseException:
            session.close()
            raise
        session.words[layout.D_BOOT_ID] = boot_id
        return session

    def _adopt_parts(self, keys: dict[int, KeySchema]) -> None:
        for word, value in layout.header_words(self.names.session_id, self.geometry):
            if self.words[word] != value:
                raise AdoptError(f"header word {word} is {self.words[word]}, expected {value}")
        for key_id, schema in keys.items():
            try:
                self.keys[key_id] = adopt_key(self.names, key_id, schema, self.geometry)
            except (FileNotFoundError, ValueError) as error:
                raise AdoptError(f"a segment of key {key_id} cannot be used: {error}") from error

    def _prefault(self, segments: list[shm.Segment], progress: Progress | None) -> None:
        total = sum(segment.size for segment in segments)
        done = 0
        for segment in segments:
            shm.prefault(segment)
            done += segment.size
            if progress is not None:
                progress(segment.name.rsplit(".", 1)[-1], done, total)

    @property
    def head(self) -> int:
        return self.words[layout.W_HEAD]

    @property
    def consumed(self) -> int:
        return self.words[layout.D_CONSUMED]

    @property
    def epoch(self) -> int:
        return self.words[layout.D_EPOCH]

    @property
    def epoch_sequence(self) -> int:
        """Sequence of the last RESET; a word that a worker scribbled on must not stop who reads all sessions."""
        return min(self.words[layout.D_EPOCH_SEQUENCE], layout.MAX_SEQUENCE)

    @property
    def status(self) -> int:
        return self.words[layout.D_STATUS]

    @status.setter
    def status(self, value: int) -> None:
        self.words[layout.D_STATUS] = value

    @property
    def total_bytes(self) -> int:
        """Shared memory of the session, in bytes."""
        own = sum(part.size for part in self._parts)
        return own + sum(key_bytes(self.geometry, key.row_bytes) for key in self.keys.values())

    def open_key(self, key_id: int, schema: KeySchema, progress: Progress | None = None) -> KeyStore:
        """Make, prefault and, where the limit allows it, lock the segments of a key.

        Raises:
            shm.ShmFullError: no room; nothing is left behind.
        """
        store = create_key(self.names, key_id, schema, self.geometry, self._mode)
        self._prefault(store.segments(), progress)
        self._lock(store)
        self.keys[key_id] = store
        return store

    def pin(self) -> None:
        """After an adoption: map every page again, so that no record faults, and lock the keys where that is allowed.

        The consumer works meanwhile, and keys may come and go.
        """
        for part in list(self._parts):
            shm.prefault(part, live=True)
        for store in list(self.keys.values()):
            for segment in store.segments():
                shm.prefault(segment, live=True)
            self._lock(store)

    def _lock(self, store: KeyStore) -> None:
        store.lock()
        if not store.locked:
            names = {"session": self.names.session_id, "key": store.schema.name}
            store.unlocked_why += tell_not_locked("key is", store.total_bytes, **names)

    def close_key(self, key_id: int) -> None:
        """Unlink a key and let go of it. No error where it is gone already: the record that asks may be done twice."""
        store = self.keys.pop(key_id, None)
        if store is None:
            return
        for segment in store.segments():
            shm.unlink_segment(segment.name)

    def unlink(self) -> None:
        """Remove every name. Workers keep what they have mapped."""
        for store in self.keys.values():
            for segment in store.segments():
                shm.unlink_segment(segment.name)
        for part in self._parts:
            shm.unlink_segment(part.name)
        shm.unlink_semaphore(self.names.daemon_doorbell)
        shm.unlink_semaphore(self.names.worker_doorbell)

    def close(self) -> None:
        """Let go of everything mapped; a mapping goes when its last reader does. Nothing may use the session after."""
        self.keys.clear()
        del self.arena, self.slot_words
        self.words.release()
        self.control_bytes.release()
        self.daemon_doorbell.close()
        self.worker_doorbell.close()
        self._parts.clear()
