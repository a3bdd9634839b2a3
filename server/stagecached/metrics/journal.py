"""The last things that went wrong, each with its cure: for the status page, `stagecache top` and people in a hurry.

Lines come from refused calls, failed sessions, the daemon's own log, and from counters of workers that moved.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from typing import Any, Final

from stagecache_wire.figures import FAILED_MERGES, FAILED_WRITES, REFUSED_SAVES, Worker
from stagecached.metrics.catalog import LEVELS
from stagecached.metrics.fold import SessionFold

KEPT: Final = 50

_SAVE_CURES: Final = {
    "too_large": "Attach with staging_capacity_tokens of the engine's max_num_batched_tokens.",
    "slot_mismatch": "save_outputs must be called with the batch of the last new_step_starts.",
    "staging_timeout": "Consume each step id once, by materialize or discard_step, or raise staging_depth.",
    "daemon_lost": "The daemon was gone in the middle of a save; see whether it restarts often.",
    "session_failed": "The session is over: the worker attaches anew by itself; this daemon's log says why it ended.",
    "other": "The worker's log has the traceback.",
}
_MERGE_CURES: Final = {
    "unreadable": "Rows behind published block hashes are gone. `stagecache reset STAGE` makes the engine forget them.",
    "schema_mismatch": "A key changed its dtype or row shape. Declare it global if it is no per-token row.",
    "daemon_lost": "Hits need the daemon: requests with hits fail until it is back.",
    "session_failed": "The session is over: the worker attaches anew by itself; this daemon's log says why it ended.",
    "deadline": "The daemon lives but did not answer in time: look at record lag, and give it cores of its own.",
    "other": "The worker's log has the traceback.",
}
_WRITE_CURES: Final = {
    "flush": "A deferred write failed; its rows are unknown until the engine's prefix cache is reset.",
    "schema": "A key changed its dtype or row shape. Declare it global if it is no per-token row.",
    "unopened": "The key found no room: raise --memory-budget or /dev/shm, or lower num_blocks.",
}

_TOLD_ELSEWHERE: Final = frozenset({"session failed"})
"""Log lines that have an entry of their own already, with a cure."""

_COUNTED: Final = tuple(
    (int(first) + index, f"{what}: {reason.replace('_', ' ')}", cures[reason])
    for what, first, reasons, cures in (
        ("save refused", Worker.REFUSED_SAVES, REFUSED_SAVES, _SAVE_CURES),
        ("materialize failed", Worker.FAILED_MERGES, FAILED_MERGES, _MERGE_CURES),
        ("rows not kept", Worker.FAILED_WRITES, FAILED_WRITES, _WRITE_CURES),
    )
    for index, reason in enumerate(reasons)
)
"""(word, what, cure) of each figure of a worker that says that something went wrong."""


@dataclass(slots=True)
class Entry:
    """One thing that went wrong, ``count`` times. at: Unix time of the last; where: stage and replica, or empty."""

    at: float
    level: str
    what: str
    where: str
    text: str
    cure: str
    count: int = 1


class Journal:
    """The newest ``KEPT`` entries. ``add`` from any thread."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self.lines = dict.fromkeys(LEVELS, 0)
        """Log lines by level."""
        self._clock = clock
        self._lock = threading.Lock()
        self._entries: deque[Entry] = deque(maxlen=KEPT)
        self._seen: dict[str, list[int]] = {}

    def add(self, what: str, text: str, cure: str = "", *, where: str = "", level: str = "error", by: int = 1) -> None:
        """Note something; where the same is among the newest, that one counts up instead."""
        with self._lock:
            for entry in list(self._entries)[-8:]:
                if (entry.what, entry.where, entry.text) == (what, where, text):
                    entry.count += by
                    entry.at = self._clock()
                    return
            self._entries.append(Entry(self._clock(), level, what, where, text, cure, by))

    def newest(self) -> list[Entry]:
        """Newest first."""
        with self._lock:
            numbered = sorted(enumerate(self._entries), key=lambda item: (item[1].at, item[0]), reverse=True)
        return [entry for _, entry in numbered]

    def notice(self, folds: list[SessionFold]) -> None:
        """Note what counters of workers say happened since the last call."""
        seen: dict[str, list[int]] = {}
        for fold in folds:
            now = [fold.worker[word] for word, _, _ in _COUNTED]
            before = self._seen.get(fold.session_id, [0] * len(now))
            seen[fold.session_id] = now
            if now == before:
                continue
            for (_, what, cure), count, earlier in zip(_COUNTED, now, before, strict=True):
                if count > earlier:
                    self.add(what, "", cure, where=f"{fold.stage} #{fold.replica}", by=count - earlier)
        self._seen = seen

    def log_processor(self, logger: Any, method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        """A structlog processor: keeps what is logged as a warning or worse."""
        level = str(event.get("level", method))
        if level in self.lines or level == "critical":
            level = "error" if level == "critical" else level
            with self._lock:
                self.lines[level] += 1
            facts = ", ".join(
                f"{key}={value}"
                for key, value in event.items()
                if key not in ("event", "level", "timestamp", "exc_info", "exception") and not key.startswith("_")
            )
            if event.get("event") not in _TOLD_ELSEWHERE:
                self.add(str(event.get("event", "")), facts, level=level)
        return event
