"""Hits: which rows a request needs from the pool, the gathers that bring them, and what came of each.

The worker plans: it gives each (request, key) an extent of the arena, sized for the hit and this step's rows behind
it, and an entry of the result table, before it logs the gather. The daemon only fills them.

A hit that finds no extent or no entry is brought over in pieces, through the part of the arena that is set aside for
that, while the engine thread waits: slower, and never an error.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from stagecache.arena import Arena, Extent
from stagecache.entries import Entries, Entry
from stagecache.errors import StageCacheError, UnreadableHitError
from stagecache.mapping import StagedKey
from stagecache.policy import HIDDEN_KEY
from stagecache.session import Session
from stagecache.slots import span_runs
from stagecache_wire.records import RUN_BYTES, PackedBegin, pack_gather, pack_span
from stagecache_wire.results import Result

BOUNCE_RESULT = 0
"""Entry of the result table that pieces through the bounce use."""

_MAX_GATHERS = 512
_FEW_GATHERS = 16
"""So few are one record, if their runs fit: no need to tell which ones share a span before it is made."""
_MAX_RUNS = 1 << 16


@dataclass(slots=True)
class Gather:
    """One (request, key): where its rows go, and which record brings them.

    extent: hit rows, then room for this step's. entry: of the result table. sequence: of the last record that
    gathered it. pieces: instead of an extent, where it came through the bounce; u8 [bytes]. found: what its results
    say, unless all rows are there. address: where the rows begin in this process. error: it cannot be had.
    """

    key: StagedKey
    extent: Extent | None = None
    entry: Entry | None = None
    address: int = 0
    sequence: int = 0
    pieces: NDArray[np.uint8] | None = None
    found: Result | None = None
    error: StageCacheError | None = None

    @property
    def result(self) -> int:
        """Index of its entry; -1 without one."""
        return -1 if self.entry is None else self.entry.index


@dataclass(slots=True)
class Hit:
    """Positions [low, high) of a request come from the pool; ``tail`` rows of this step follow them.

    blocks: the request's block ids, as many as cover ``high``. runs: of its slots (``span_runs``). gathers: by key
    name.
    """

    req_id: str
    low: int
    high: int
    tail: int
    blocks: list[int]
    runs: bytes
    gathers: dict[str, Gather] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        return self.high - self.low


class HitReader:
    """Plans gathers and reads what came of them. ``plan``, ``records``, ``logged`` and ``spill`` on the engine thread;
    ``read`` on any.
    """

    def __init__(self, session: Session, arena: Arena, block_size: int, max_results: int) -> None:
        self._session = session
        self._arena = arena
        self._block_size = block_size
        self.entries = Entries(BOUNCE_RESULT + 1, max_results)
        self.spilled = 0
        """Gathers that went through the bounce."""

    def plan(self, hits: Iterable[Hit], keys: list[StagedKey]) -> list[tuple[Hit, Gather]]:
        """Give each hit an extent and a result for each key that it has none for. Caller holds the cache's lock."""
        planned = []
        for hit in hits:
            gathers, rows = hit.gathers, hit.high - hit.low + hit.tail
            for key in keys:
                name = key.schema.name
                if name in gathers:
                    continue
                gather = gathers[name] = Gather(key)
                entry = self.entries.take()
                if entry is not None:
                    extent = gather.extent = self._arena.allocate(rows * key.row_bytes)
                    if extent is not None:
                        gather.entry = entry
                        gather.address = self._arena.address + extent.offset
                    else:
                        self.entries.give_back(entry)
                planned.append((hit, gather))
        return planned

    def records(self, planned: list[tuple[Hit, Gather]]) -> list[tuple[PackedBegin, list[tuple[Hit, Gather]]]]:
        """Records that bring the gathers that have an extent, as few as fit, each with what it brings."""
        ready = [pair for pair in planned if pair[1].extent is not None]
        if len(ready) <= _FEW_GATHERS:
            size = 0
            for hit, _ in ready:
                size += len(hit.runs)
            if size <= _MAX_RUNS * RUN_BYTES:
                return [(self._record(ready), ready)] if ready else []
        return self._many_records(ready)

    def _many_records(self, ready: list[tuple[Hit, Gather]]) -> list[tuple[PackedBegin, list[tuple[Hit, Gather]]]]:
        records: list[tuple[PackedBegin, list[tuple[Hit, Gather]]]] = []
        open_until: list[tuple[Hit, Gather]] = []
        runs = 0
        seen: set[int] = set()
        for hit, gather in ready:
            more = 0 if id(hit) in seen else len(hit.runs) // RUN_BYTES
            if open_until and (len(open_until) >= _MAX_GATHERS or runs + more > _MAX_RUNS):
                records.append((self._record(open_until), open_until))
                open_until, runs = [], 0
                seen.clear()
                more = len(hit.runs) // RUN_BYTES
            seen.add(id(hit))
            open_until.append((hit, gather))
            runs += more
        if open_until:
            records.append((self._record(open_until), open_until))
        return records

    @staticmethod
    def _record(planned: list[tuple[Hit, Gather]]) -> PackedBegin:
        spans: dict[int, int] = {}
        span_words = runs = gather_words = b""
        first = 0
        for hit, gather in planned:
            span = spans.get(id(hit))
            if span is None:
                span, count = len(spans), len(hit.runs) // RUN_BYTES
                spans[id(hit)] = span
                span_words += pack_span(first, count, hit.high - hit.low, 0)
                runs += hit.runs
                first += count
            assert gather.extent is not None
            assert gather.entry is not None
            gather_words += pack_gather(span, gather.key.key_id, gather.entry.index, 0, gather.extent.offset)
        return PackedBegin(0, span_words, runs, gather_words)

    @staticmethod
    def logged(planned: list[tuple[Hit, Gather]], sequence: int) -> None:
        """The gathers are in the record ``sequence``."""
        for _, gather in planned:
            if gather.extent is not None:
                gather.sequence = sequence

    def spill(self, planned: list[tuple[Hit, Gather]], timeout_s: float) -> None:
        """Bring over, now and in pieces, every gather that has no extent. An error is kept for ``read``."""
        for hit, gather in planned:
            if gather.extent is not None or gather.error is not None:
                continue
            self.spilled += 1
            try:
                self._spill_one(hit, gather, timeout_s)
            except StageCacheError as error:
                gather.error = error.again()

    def _spill_one(self, hit: Hit, gather: Gather, timeout_s: float) -> None:
        key, bounce = gather.key, self._arena.bounce
        row_bytes = key.row_bytes
        step = bounce.size // row_bytes
        if step < 1:
            raise UnreadableHitError(
                f"a row of key {key.schema.name} has {row_bytes} bytes, the arena's bounce {bounce.size}.",
                req_id=hit.req_id,
                key=key.schema.name,
                slots=(),
                remedy="Raise arena_bytes.",
            )
        pieces = np.empty((hit.rows + hit.tail) * row_bytes, np.uint8)
        parts: list[Result] = []
        for start in range(0, hit.rows, step):
            rows = min(step, hit.rows - start)
            runs = span_runs(hit.blocks, hit.low + start, hit.low + start + rows, self._block_size)
            part = Hit(hit.req_id, hit.low + start, hit.low + start + rows, 0, hit.blocks, runs)
            piece = Gather(key, Extent(bounce.offset, bounce.size), Entry(BOUNCE_RESULT))
            sequence = self._session.append(self._record([(part, piece)]))
            self._session.wait_consumed(sequence, timeout_s, "the hit of request", hit.req_id)
            found = self._result(BOUNCE_RESULT, sequence)
            parts.append(found)
            pieces[start * row_bytes : (start + rows) * row_bytes] = self._arena.data[
                bounce.offset : bounce.offset + rows * row_bytes
            ]
        gather.pieces, gather.address, gather.found = pieces, pieces.ctypes.data, _joined(parts)

    def read(self, hit: Hit, gather: Gather, needed: tuple[int, int], timeout_s: float) -> NDArray[np.uint8]:
        """u8 [(rows + tail) * row_bytes]: the extent (or the pieces) of a gather. Positions [begin, end) of
        ``needed`` are all readable. Waits for the record; holds no lock.

        Raises:
            UnreadableHitError: a needed row is UNKNOWN, or ABSENT for hidden states (H4).
            DaemonLostError, SessionFailedError, CallDeadlineError: the record was not done.
        """
        if gather.error is not None:
            raise gather.error.again()
        if gather.pieces is None:
            session, sequence = self._session, gather.sequence
            session.wait_consumed(sequence, timeout_s, "the hit of request", hit.req_id)
            if not session.control.is_whole(gather.result, sequence):
                gather.found = self._result(gather.result, sequence)
        if gather.found is not None:
            self._check(hit, gather, gather.found, needed)
        if gather.pieces is not None:
            return gather.pieces
        assert gather.extent is not None
        offset = gather.extent.offset
        return self._arena.data[offset : offset + (hit.high - hit.low + hit.tail) * gather.key.row_bytes]

    def release(self, gathers: Iterable[Gather]) -> None:
        """Give back extents and entries of a step that is over. Caller holds the cache's lock. It may be done twice;
        what an interrupt leaves comes back when the gathers are collected.
        """
        for gather in gathers:
            if gather.entry is not None:
                self.entries.give_back(gather.entry)
                gather.entry = None
            if gather.extent is not None:
                self._arena.free(gather.extent)
                gather.extent = None

    def _result(self, index: int, sequence: int) -> Result:
        found = self._session.control.result(index)
        if found.sequence != sequence:
            raise StageCacheError(
                f"result {index} is of record {found.sequence}, expected {sequence}: no rows are given"
            )
        return found

    def _check(self, hit: Hit, gather: Gather, found: Result, needed: tuple[int, int]) -> None:
        name = gather.key.schema.name
        begin, end = max(needed[0] - hit.low, 0), min(needed[1] - hit.low, hit.rows)
        bad = [(found.unknown_first, found.unknown_end)]
        if name == HIDDEN_KEY:
            bad.append((found.absent_first, found.absent_end))
        # Between first and last of a kind there may be good rows: a part inside them counts as bad, never the reverse.
        bad = [(max(first, begin), min(last, end)) for first, last in bad if first < end and last > begin]
        if begin >= end or not bad:
            return
        size = self._block_size
        first, last = hit.low + min(low for low, _ in bad), hit.low + max(high for _, high in bad) - 1
        slots = [hit.blocks[position // size] * size + position % size for position in sorted({first, last})]
        raise UnreadableHitError(
            f"request {hit.req_id} hit positions {hit.low} to {hit.high - 1}, but rows of key {name} are not there: "
            f"{found.unknown} unknown, {found.pending} pending, {found.absent} absent, between positions {first} and "
            f"{last} (slots {slots[0]} to {slots[-1]}). Rows are never guessed.",
            req_id=hit.req_id,
            key=name,
            slots=slots,
            remedy="Reset the stage (`stagecache reset`), so that the engine forgets the hashes of these blocks.",
        )


def _joined(parts: list[Result]) -> Result:
    """What pieces of one span, in order, say of the whole."""
    at, unknown, absent = 0, [], []
    for part in parts:
        if part.unknown_end:
            unknown += [at + part.unknown_first, at + part.unknown_end]
        if part.absent_end:
            absent += [at + part.absent_first, at + part.absent_end]
        at += part.rows
    return Result(
        parts[-1].sequence,
        parts[-1].key_id,
        0,
        at,
        sum(part.unknown for part in parts),
        sum(part.absent for part in parts),
        sum(part.pending for part in parts),
        min(unknown, default=at),
        max(unknown, default=0),
        min(absent, default=at),
        max(absent, default=0),
    )
