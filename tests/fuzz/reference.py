"""What a record may say, written from docs/memory-layout.md alone and in plain integers: a second opinion.

It shares no code with the daemon's validator. ``None`` means that the record is good.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

from tests.fuzz.grown import (
    BEGIN,
    CLAIM,
    CLOSE_KEY,
    FAIL,
    FAILED,
    FILL,
    FLUSH,
    LOST,
    PUBLISH,
    RESET,
    ROWS,
    SAVE,
    Bounds,
)


@dataclass
class Plain:
    """A parsed record. runs and span_runs: (start, length); gathers: (span, key, result, offset)."""

    kind: int
    page: int
    rows: int
    keys: list[tuple[int, int]] = field(default_factory=list)
    runs: list[tuple[int, int]] = field(default_factory=list)
    claims: list[int] = field(default_factory=list)
    spans: list[tuple[int, int, int]] = field(default_factory=list)
    span_runs: list[tuple[int, int]] = field(default_factory=list)
    gathers: list[tuple[int, int, int, int]] = field(default_factory=list)

    @property
    def slots(self) -> set[int]:
        return {slot for start, length in self.runs for slot in range(start, start + length)}


def parse(words: list[int], payload: bytes) -> Plain | str:
    """The record, or why its form is bad."""
    kind, flags, n_span_runs = words[1] & 0xFF, words[1] >> 8 & 0xFF, words[1] >> 16
    n_runs, n_keys = words[6] & 0xFFFFFFFF, words[6] >> 32
    n_spans, n_gathers = words[7] & 0xFFFFFFFF, words[7] >> 32
    if not BEGIN <= kind <= FILL:
        return "kind"
    if flags > 1:
        return "flags"
    if kind in (PUBLISH, FILL) and not flags:
        return "blocks as runs of slots"
    claims = n_runs if kind in (FLUSH, FAIL) else 0
    hashes = 32 * n_runs if kind in (PUBLISH, FILL) else 0
    sizes = [
        4 * n_keys,
        (4 if flags else 8) * n_runs,
        8 * claims,
        hashes,
        16 * n_spans,
        8 * n_span_runs,
        24 * n_gathers,
    ]
    if words[3] != len(payload) or sum(-(-size // 8) * 8 for size in sizes) != len(payload):
        return "sizes"
    record, at = Plain(kind, words[4], words[5]), 0
    parts = []
    for size in sizes:
        parts.append(payload[at : at + size])
        at += -(-size // 8) * 8
    record.keys = [(word & 0xFFFFFF, word >> 24) for (word,) in struct.iter_unpack("<I", parts[0])]
    if flags:
        record.runs = [(slot, 1) for (slot,) in struct.iter_unpack("<I", parts[1])]
    else:
        record.runs = list(struct.iter_unpack("<II", parts[1]))
    record.claims = [claim for (claim,) in struct.iter_unpack("<Q", parts[2])]
    record.spans = [item[:3] for item in struct.iter_unpack("<IIII", parts[4])]
    record.span_runs = list(struct.iter_unpack("<II", parts[5]))
    record.gathers = [
        (span, key, result, offset) for span, key, result, _, offset in struct.iter_unpack("<IIIIQ", parts[6])
    ]
    return record


def fault(record: Plain, bounds: Bounds, sequence: int, epoch: int) -> str | None:
    """Why the record must not be done; None where it may be."""
    kind = record.kind
    if any(mode not in (ROWS, CLAIM, FAILED) for _, mode in record.keys):
        return "mode"
    if kind in (SAVE, LOST, FLUSH, FAIL):
        if not record.runs or any(length < 1 or start + length > bounds.num_slots for start, length in record.runs):
            return "runs"
        total = sum(length for _, length in record.runs)
        if total != record.rows or total > (bounds.capacity if kind in (SAVE, FLUSH) else bounds.num_slots):
            return "rows"
    elif kind in (PUBLISH, FILL):
        blocks = [block for block, _ in record.runs]
        if not blocks or max(blocks) >= bounds.num_blocks or len(set(blocks)) != len(blocks):
            return "blocks"
        if record.rows != len(blocks):
            return "rows"
    elif record.runs:
        return "runs of a kind that has none"
    if kind == RESET and not epoch <= record.rows < 1 << 63:
        return "epoch"
    if kind == RESET and record.page not in (0, (1 << 64) - 1):
        return "page of a reset"
    ids = [key for key, _ in record.keys]
    wanted = {FLUSH: 1, FAIL: 1, CLOSE_KEY: 1, SAVE: len(ids)}.get(kind, 0)
    if len(ids) != wanted or len(set(ids)) != len(ids):
        return "keys"
    if kind != CLOSE_KEY and not set(ids) <= set(bounds.keys):
        return "key not open"
    if (
        kind == FLUSH or (any(mode == ROWS for _, mode in record.keys) and kind == SAVE)
    ) and record.page >= bounds.depth:
        return "page"
    if any(not 1 <= claim < sequence for claim in record.claims):
        return "claim"
    if kind not in (BEGIN, SAVE):
        return "gathers of a kind that has none" if record.gathers or record.spans or record.span_runs else None
    if any(length < 1 or start + length > bounds.num_slots for start, length in record.span_runs):
        return "span runs"
    for first, count, rows in record.spans:
        total = sum(length for _, length in record.span_runs[first : first + count])
        if count < 1 or first + count > len(record.span_runs) or rows != total or rows > bounds.num_slots:
            return "span"
    moved = 0
    for span, key, result, offset in record.gathers:
        if span >= len(record.spans) or key not in bounds.keys or result >= bounds.max_results:
            return "gather"
        size = record.spans[span][2] * bounds.keys[key]
        moved += size
        if offset + size > bounds.arena_bytes:
            return "extent"
    if moved > bounds.arena_bytes:
        return "more than the arena"
    return "span of nobody" if {span for span, *_ in record.gathers} != set(range(len(record.spans))) else None
