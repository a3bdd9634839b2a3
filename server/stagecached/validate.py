"""Every number of a record is held against the geometry before it is used: a bad record fails its session only."""

from __future__ import annotations

from typing import Final

import numpy as np

from stagecache_wire import layout
from stagecache_wire.records import NO_PAGE, OF_BLOCKS, SAME_MODEL, BadRecordError, KeyMode, Kind, Record
from stagecache_wire.v1 import stagecache_pb2
from stagecached.segments import SessionSegments

REASON_SESSION_FAILED: Final = int(stagecache_pb2.REASON_SESSION_FAILED)


def read_entry(segments: SessionSegments, sequence: int) -> tuple[list[int], bytes]:
    """A copy of the entry words and the payload of a published record: what follows cannot change under us.

    Raises:
        BadRecordError: the entry is of another sequence, or its payload lies outside the ring.
    """
    control = segments.layout
    head = segments.head
    if sequence > layout.MAX_SEQUENCE:
        raise BadRecordError(f"sequence {sequence} is more than a claim can hold")
    if head - sequence >= control.log_entries:
        raise BadRecordError(f"head is {head - sequence + 1} records ahead, the log holds {control.log_entries}")
    at = control.entry_word(sequence)
    words = segments.words[at : at + layout.ENTRY_WORDS].tolist()
    if words[layout.E_SEQUENCE] != sequence:
        raise BadRecordError(f"entry carries sequence {words[layout.E_SEQUENCE]}")
    length = words[layout.E_PAYLOAD_LENGTH]
    offset = words[layout.E_PAYLOAD_POSITION] % control.payload_bytes
    if length > control.payload_bytes - offset:
        raise BadRecordError(f"payload of {length} bytes at {offset} leaves the ring of {control.payload_bytes}")
    start = control.payload_word * layout.WORD + offset
    return words, bytes(segments.control_bytes[start : start + length])


def check_record(segments: SessionSegments, record: Record) -> None:
    """Hold a decoded record against the geometry and the open keys.

    Raises:
        BadRecordError: the first number that does not fit, and what it was held against.
    """
    kind = record.kind
    if kind in (Kind.SAVE, Kind.LOST, Kind.FLUSH, Kind.FAIL):
        _check_runs(segments, record)
    elif kind in OF_BLOCKS:
        _check_blocks(segments, record)
    elif len(record.runs):
        raise BadRecordError(f"{kind.name} carries runs")
    if kind is Kind.RESET and not segments.epoch <= record.rows < 1 << 63:
        raise BadRecordError(f"epoch {record.rows} after {segments.epoch}")
    if kind is Kind.RESET and record.page not in (SAME_MODEL, NO_PAGE):
        raise BadRecordError(f"RESET with page {record.page}")
    modes = _check_keys(segments, record)
    if kind is Kind.SAVE:
        if KeyMode.ROWS in modes:
            _check_page(segments, record)
    elif kind is Kind.FLUSH:
        _check_page(segments, record)
    if kind in (Kind.FLUSH, Kind.FAIL) and len(record.claims):
        newest = int(record.claims.max())
        if newest >= record.sequence or int(record.claims.min()) < 1:
            raise BadRecordError(f"claim {newest} is not older than the record")
    if kind in (Kind.BEGIN, Kind.SAVE):
        _check_gathers(segments, record)
    elif len(record.gathers) or len(record.spans) or len(record.span_runs):
        raise BadRecordError(f"{kind.name} carries gathers")


def _check_page(segments: SessionSegments, record: Record) -> None:
    if record.page >= segments.geometry.staging_depth:
        raise BadRecordError(f"page {record.page} of {segments.geometry.staging_depth}")


def _check_runs(segments: SessionSegments, record: Record) -> None:
    geometry = segments.geometry
    num_slots = geometry.num_slots
    runs = record.runs.astype(np.int64)
    if not len(runs):
        raise BadRecordError("no runs")
    if record.unit_runs:
        highest, total = int(runs.max()) + 1, len(runs)
    else:
        if int(runs[:, 1].min()) < 1:
            raise BadRecordError("a run of no slots")
        highest, total = int((runs[:, 0] + runs[:, 1]).max()), int(runs[:, 1].sum())
    if highest > num_slots:
        raise BadRecordError(f"slot {highest - 1} of {num_slots}")
    if record.rows != total:
        raise BadRecordError(f"runs of {total} slots for {record.rows} rows")
    most = geometry.staging_capacity_tokens if record.kind in (Kind.SAVE, Kind.FLUSH) else num_slots
    if total > most:
        raise BadRecordError(f"{total} rows, at most {most} are allowed")


def _check_blocks(segments: SessionSegments, record: Record) -> None:
    blocks, num_blocks = record.runs, segments.geometry.num_blocks
    if not len(blocks):
        raise BadRecordError("no blocks")
    highest = int(blocks.max())
    if highest >= num_blocks:
        raise BadRecordError(f"block {highest} of {num_blocks}")
    if record.rows != len(blocks):
        raise BadRecordError(f"{len(blocks)} blocks, {record.rows} were said")
    if len(np.unique(blocks)) != len(blocks):
        raise BadRecordError("a block is named twice")


def _check_keys(segments: SessionSegments, record: Record) -> list[KeyMode]:
    try:
        keyed = record.keyed_modes()
    except ValueError as error:
        raise BadRecordError(str(error)) from None
    kind = record.kind
    single = kind in (Kind.FLUSH, Kind.FAIL, Kind.CLOSE_KEY)
    if (single != (len(keyed) == 1) and kind is not Kind.SAVE) or (kind is not Kind.SAVE and not single and keyed):
        raise BadRecordError(f"{kind.name} names {len(keyed)} keys")
    if len({key_id for key_id, _ in keyed}) != len(keyed):
        raise BadRecordError("a key is named twice")
    if kind is not Kind.CLOSE_KEY:
        for key_id, _ in keyed:
            if key_id not in segments.keys:
                raise BadRecordError(f"key {key_id} is not open")
    return [mode for _, mode in keyed]


def _check_gathers(segments: SessionSegments, record: Record) -> None:
    geometry = segments.geometry
    num_slots = geometry.num_slots
    runs = record.span_runs.astype(np.int64)
    if len(runs):
        if int(runs[:, 1].min()) < 1:
            raise BadRecordError("a span run of no slots")
        highest = int((runs[:, 0] + runs[:, 1]).max())
        if highest > num_slots:
            raise BadRecordError(f"span slot {highest - 1} of {num_slots}")
    span_rows: list[int] = []
    for first, count, rows, _ in record.spans.tolist():
        if count < 1 or first + count > len(runs):
            raise BadRecordError(f"span of runs {first} to {first + count} of {len(runs)}")
        total = int(runs[first : first + count, 1].sum())
        if total != rows or total > num_slots:
            raise BadRecordError(f"span runs of {total} slots for {rows} rows")
        span_rows.append(rows)
    moved, named = 0, set()
    for span, key_id, result, _, offset in record.gathers.tolist():
        if span >= len(span_rows):
            raise BadRecordError(f"span {span} of {len(span_rows)}")
        if key_id not in segments.keys:
            raise BadRecordError(f"key {key_id} is not open")
        if result >= geometry.max_results:
            raise BadRecordError(f"result {result} of {geometry.max_results}")
        end = offset + span_rows[span] * segments.keys[key_id].row_bytes
        if end > geometry.arena_bytes:
            raise BadRecordError(f"extent ends at {end}, the arena at {geometry.arena_bytes}")
        named.add(span)
        moved += end - offset
    # Extents do not overlap, so all of them together fit: what a record can ask for is bounded by the arena.
    if moved > geometry.arena_bytes:
        raise BadRecordError(f"gathers of {moved} bytes for an arena of {geometry.arena_bytes}")
    if len(named) != len(span_rows):
        raise BadRecordError(f"{len(span_rows) - len(named)} spans that no gather names")
