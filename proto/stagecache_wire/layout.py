"""Byte layout of the control segment. docs/memory-layout.md is this module as a table.

Every shared word has one writer. Indices are the truth; semaphores are doorbells.

    header         the daemon, once, at creation (the boot id is a daemon word)
    worker words   the worker
    daemon words   the daemon
    entry ring     the worker: one 64-byte entry a record, at ``(sequence - 1) % log_entries``
    payload ring   the worker: variable-length payloads, never wrapping inside one
    result table   the daemon: one 64-byte entry, at the index that the worker chose

Sequences start at 1; ``head`` is the last published one, ``consumed`` the last whose effect is in place.
"""

from __future__ import annotations

from dataclasses import dataclass

from stagecache_wire.geometry import LOG_ENTRIES, Geometry

MAGIC = int.from_bytes(b"STGCACHE", "little")
ABI = 2
"""Raised whenever a byte of any segment or record changes its meaning."""

MAX_SEQUENCE = (1 << 62) - 1
"""Claim words hold a sequence above two bits. No log gets so far, but a word that somebody scribbled on may say so."""

WORD = 8
ENTRY_WORDS = 8
RESULT_WORDS = 8
PAGE = 4096

# Header words (offset 0).
H_MAGIC = 0
H_ABI = 1
H_SESSION_LOW = 2
H_SESSION_HIGH = 3
H_NUM_BLOCKS = 4
H_BLOCK_SIZE = 5
H_CAPACITY = 6
H_DEPTH = 7
H_ARENA_BYTES = 8
H_MAX_RESULTS = 9
H_LOG_ENTRIES = 10
H_PAYLOAD_BYTES = 11
H_TOTAL_BYTES = 12

# Worker words (one page further).
W_BASE = PAGE // WORD
W_HEAD = W_BASE + 0
W_FIGURES = W_BASE + 8
"""Figures that the worker exports (``figures.Worker``); folded into metrics at scrape."""
W_STEPS = W_FIGURES
W_TIMES = W_BASE + 128
"""Ring of ``TIME_ENTRIES`` words: time.monotonic_ns() at which a record was published."""
W_TRACES = W_BASE + 256
"""Ring of ``TRACE_ENTRIES`` entries of four words, written only while tracing is on: sequence, trace id (low, high),
span id."""
TIME_ENTRIES = 128
TRACE_ENTRIES = 64

# Daemon words (another page further).
D_BASE = 2 * PAGE // WORD
D_CONSUMED = D_BASE + 0
D_BOOT_ID = D_BASE + 8
D_STATUS = D_BASE + 9
D_FAIL_REASON = D_BASE + 10
D_FAIL_SEQUENCE = D_BASE + 11
D_EPOCH = D_BASE + 12
D_EPOCH_SEQUENCE = D_BASE + 13
"""Slots whose last writer is not younger than this record are of an older epoch (R5)."""
D_SHARED_GENERATION = D_BASE + 14
"""Generation of the session in the namespace of shared blocks that it has joined; 0: none."""
D_FIGURES = D_BASE + 16
"""Figures that the daemon counts (``figures.Daemon``)."""
D_SPANS = D_BASE + 16
D_SPAN_ROWS = D_BASE + 17
D_UNKNOWN_ROWS = D_BASE + 18
D_RECORDS = D_BASE + 19
D_SCATTERED_BYTES = D_BASE + 20
D_GATHERED_BYTES = D_BASE + 21
D_BUSY_NS = D_BASE + 22
D_ASLEEP = D_BASE + 128
"""1: the consumer sleeps until it is rung for; 0: it looks at ``head`` by itself, within 20 ms. A hint: a
worker that rings for no reason, or does not ring, costs time and nothing else."""

STATUS_LIVE = 0
STATUS_FAILED = 1
STATUS_ENDED = 2

# Entry words.
E_SEQUENCE = 0
E_KIND = 1
E_PAYLOAD_POSITION = 2
E_PAYLOAD_LENGTH = 3
E_PAGE = 4
E_ROWS = 5
E_COUNTS_A = 6
E_COUNTS_B = 7

# Result words.
R_SEQUENCE = 0
R_KEY = 1
R_ARENA_OFFSET = 2
R_ROWS = 3
R_UNKNOWN_RANGE = 4
R_ABSENT_RANGE = 5
R_COUNTS = 6
R_PENDING = 7


@dataclass(frozen=True)
class ControlLayout:
    """Word offsets of the variable parts, derived from the geometry alone."""

    log_entries: int
    payload_bytes: int
    max_results: int

    @classmethod
    def of(cls, geometry: Geometry) -> ControlLayout:
        return cls(LOG_ENTRIES, geometry.payload_bytes, geometry.max_results)

    @property
    def entries_word(self) -> int:
        return 3 * PAGE // WORD

    @property
    def payload_word(self) -> int:
        return self.entries_word + self.log_entries * ENTRY_WORDS

    @property
    def results_word(self) -> int:
        return self.payload_word + self.payload_bytes // WORD

    @property
    def total_bytes(self) -> int:
        return (self.results_word + self.max_results * RESULT_WORDS) * WORD

    def entry_word(self, sequence: int) -> int:
        """Word index of the entry of ``sequence`` (1, 2, ...)."""
        return self.entries_word + (sequence - 1) % self.log_entries * ENTRY_WORDS

    def result_word(self, index: int) -> int:
        return self.results_word + index * RESULT_WORDS


def header_words(session_id: str, geometry: Geometry) -> list[tuple[int, int]]:
    """Header words and the values that they hold: written by the daemon, held against by whoever maps the segment.

    session_id: hex digits. geometry: as granted.
    """
    identity, control = int(session_id, 16), ControlLayout.of(geometry)
    return [
        (H_MAGIC, MAGIC),
        (H_ABI, ABI),
        (H_SESSION_LOW, identity & (1 << 64) - 1),
        (H_SESSION_HIGH, identity >> 64),
        (H_NUM_BLOCKS, geometry.num_blocks),
        (H_BLOCK_SIZE, geometry.block_size),
        (H_CAPACITY, geometry.staging_capacity_tokens),
        (H_DEPTH, geometry.staging_depth),
        (H_ARENA_BYTES, geometry.arena_bytes),
        (H_MAX_RESULTS, geometry.max_results),
        (H_LOG_ENTRIES, control.log_entries),
        (H_PAYLOAD_BYTES, control.payload_bytes),
        (H_TOTAL_BYTES, control.total_bytes),
    ]
