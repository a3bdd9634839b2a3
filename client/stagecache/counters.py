"""What one worker's cache did, as plain integers that only it writes."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Counters:
    """Totals since attach. Times are of the thread that made the call, in nanoseconds.

    steps: saves that gave a step id. lost_steps: steps whose slots became UNKNOWN. local_steps: steps that were not
    logged, since the daemon was away. hits: requests that had a hit span. hit_rows, computed_rows: hidden rows (or
    positions, where hidden is not kept) of hits and of steps. copied_extents: merges handed out as copies, because
    tensors held too much of the arena. unopened: outputs whose key could not be opened, so that they were not kept.
    renewals: sessions that took the place of one that was over.
    """

    steps: int = 0
    lost_steps: int = 0
    local_steps: int = 0
    hits: int = 0
    hit_rows: int = 0
    computed_rows: int = 0
    materialized: int = 0
    discarded: int = 0
    refused_saves: int = 0
    copied_extents: int = 0
    resets: int = 0
    unopened: int = 0
    renewals: int = 0
    phase_ns: dict[str, int] = field(default_factory=lambda: {"begin": 0, "save": 0, "materialize": 0})
