"""Real segments of a session in this process, and a worker's end of its log without torch."""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np

from stagecache_wire import layout
from stagecache_wire.geometry import Geometry, KeySchema, page_stride
from stagecache_wire.locks import LifeLock
from stagecache_wire.names import SessionNames
from stagecache_wire.records import GATHER_DTYPE, KeyMode, Kind, Record, encode, key_words
from stagecache_wire.shm import PREFIX, SHM_DIRECTORY
from stagecached.consumer import Consumer
from stagecached.keystore import KeyStore
from stagecached.segments import SessionSegments

GEOMETRY = Geometry(8, 4, 16, 2, 1 << 16, 16).checked()
HIDDEN = KeySchema("__hidden_states__", "float32", (2,))
WIDE = KeySchema("wide", "bfloat16", (3, 2))
LATE = KeySchema("late", "uint8", (5,))
KEYS: dict[int, KeySchema] = {0: HIDDEN, 1: WIDE, 2: LATE}


@contextmanager
def session_names() -> Iterator[SessionNames]:
    """Names of a session that no daemon knows. Its node's lock is held, so no daemon's sweep touches it."""
    names = SessionNames(secrets.token_hex(6), secrets.token_hex(8))
    lock = LifeLock(SHM_DIRECTORY / f"{PREFIX}.{names.node}.lock")
    try:
        yield names
    finally:
        lock.release(unlink=True)


@contextmanager
def new_session(
    geometry: Geometry = GEOMETRY, keys: Mapping[int, KeySchema] = KEYS, boot_id: int = 1
) -> Iterator[SessionSegments]:
    """Segments with their keys open; gone at the end."""
    with session_names() as names:
        segments = SessionSegments.create(names, geometry, boot_id)
        try:
            for key_id, schema in keys.items():
                segments.open_key(key_id, schema)
            yield segments
        finally:
            segments.unlink()
            segments.close()


class Log:
    """A worker that appends records."""

    def __init__(self, segments: SessionSegments) -> None:
        self._segments = segments
        self._position = 0

    def append(self, record: Record) -> int:
        """Publish a record; its sequence."""
        segments, control = self._segments, self._segments.layout
        record.sequence = segments.head + 1
        words, payload = encode(record)
        start = self._position % control.payload_bytes
        assert start + len(payload) <= control.payload_bytes, "this log does not wrap"
        at = control.payload_word * layout.WORD + start
        segments.control_bytes[at : at + len(payload)] = payload
        words[layout.E_PAYLOAD_POSITION] = self._position
        self._position += len(payload)
        word = control.entry_word(record.sequence)
        segments.words[word : word + layout.ENTRY_WORDS] = memoryview(array("Q", words))
        segments.words[layout.W_HEAD] = record.sequence
        return record.sequence


def page_of(store: KeyStore, page: int, geometry: Geometry = GEOMETRY) -> np.ndarray:
    """u8 [capacity, row bytes]: a staging page of a key, writable."""
    stride = page_stride(geometry, store.row_bytes)
    size = geometry.staging_capacity_tokens * store.row_bytes
    flat = np.frombuffer(store.segments()[0].map, np.uint8, size, page * stride)
    return flat.reshape(-1, store.row_bytes)


def fill_page(segments: SessionSegments, page: int, salt: int) -> None:
    """Rows that no other salt has, in a page of every key."""
    for store in segments.keys.values():
        rows = page_of(store, page, segments.geometry)
        rows[:] = np.random.default_rng(salt * 100 + store.key_id).integers(0, 256, rows.shape, np.uint8)


def runs(*pairs: tuple[int, int]) -> np.ndarray:
    """u32 [n, 2] of start and length."""
    return np.array(pairs, np.uint32).reshape(-1, 2)


def slots(*numbers: int) -> np.ndarray:
    """u32 [n], each a run of one."""
    return np.array(numbers, np.uint32)


def gathers(*entries: tuple[int, int, int, int]) -> np.ndarray:
    """(span, key id, result index, arena offset) each."""
    made = np.zeros(len(entries), GATHER_DTYPE)
    for index, (span, key_id, result, offset) in enumerate(entries):
        made[index] = (span, key_id, result, 0, offset)
    return made


def spans(*entries: tuple[int, int, int]) -> np.ndarray:
    """(first run, number of runs, rows) each."""
    return np.array([(*entry, 0) for entry in entries], np.uint32).reshape(-1, 4)


def save(page: int, at: np.ndarray, *keyed: tuple[int, KeyMode]) -> Record:
    """A SAVE of the rows of a page at these runs or slots."""
    unit = at.ndim == 1
    rows = len(at) if unit else int(at[:, 1].sum())
    return Record(0, Kind.SAVE, page=page, rows=rows, unit_runs=unit, runs=at, keys=key_words(*keyed))


def hit(at: np.ndarray, *wanted: tuple[int, int, int]) -> Record:
    """A gather of one span; wanted: (key id, result, arena offset)."""
    return Record(
        0,
        Kind.BEGIN,
        spans=spans((0, len(at), int(at[:, 1].sum()))),
        span_runs=at,
        gathers=gathers(*((0, *entry) for entry in wanted)),
    )


def flush(page: int, at: np.ndarray, claims: list[int], key_id: int = 2, kind: Kind = Kind.FLUSH) -> Record:
    """Rows of a deferred key, for slots that the records ``claims`` claimed."""
    return Record(
        0, kind, page=page, rows=len(at), unit_runs=True, runs=at, claims=np.array(claims, np.uint64),
        keys=key_words((key_id, KeyMode.ROWS)),
    )  # fmt: skip


class Failures(list[str]):
    """What a consumer told of a session that it failed, and of keys that it closed."""

    def __init__(self) -> None:
        super().__init__()
        self.closed: list[int] = []

    def failed(self, reason: int, message: str) -> None:
        assert reason
        self.append(message)


def consumer_of(segments: SessionSegments, kind: type[Consumer] = Consumer) -> tuple[Consumer, Failures]:
    """A consumer that is not started: ``_drain`` works off the log on the caller's thread."""
    told = Failures()
    return kind(segments, told.failed, told.closed.append), told


def snapshot(segments: SessionSegments) -> dict[str, bytes]:
    """Every shared byte that the daemon writes, but for its figures and boot id."""
    words = segments.words
    state = {
        "slots": segments.slot_words.tobytes(),
        "arena": segments.arena.tobytes(),
        "results": words[segments.layout.results_word :].tobytes(),
        "consumed": words[layout.D_CONSUMED : layout.D_CONSUMED + 1].tobytes(),
        "status": words[layout.D_STATUS : layout.D_EPOCH_SEQUENCE + 1].tobytes(),
    }
    for key_id, store in segments.keys.items():
        state[f"pool{key_id}"] = bytes(store.segments()[1].map)
        state[f"claims{key_id}"] = store.claims.tobytes()
    return state
