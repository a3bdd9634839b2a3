"""The figures as JSON values: one state of everything, the past of a session, the map of a pool."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np

from stagecache_wire.figures import BUCKETS, FAILED_MERGES, FAILED_WRITES, KINDS, REFUSED_SAVES, WAITS, Daemon, Worker
from stagecached.metrics.catalog import PURPOSES, STEP_BOUNDS_S
from stagecached.metrics.fold import KeyFold, SessionFold
from stagecached.metrics.history import Field, Points, Track
from stagecached.metrics.journal import Entry
from stagecached.metrics.process import memory_bytes, shm_bytes
from stagecached.metrics.record_figures import RecordNote
from stagecached.metrics.survey import PoolMap
from stagecached.sessions import SessionManager
from stagecached.stats import package_version

RATE_POINTS: Final = 5
RATIO_POINTS: Final = 60
BIN_POINTS: Final = 5
TIMELINE_S: Final = 10.0
TIMELINE_RECORDS: Final = 512

Json = dict[str, Any]


def daemon_state(manager: SessionManager, socket: str, url: str, started_unix_s: float) -> Json:
    """The daemon itself and the node's memory."""
    size, free = shm_bytes()
    return {
        "version": package_version(),
        "pid": os.getpid(),
        "socket": socket,
        "url": url,
        "boot_id": f"{manager.boot_id:016x}",
        "uptime_s": time.time() - started_unix_s,
        "resident": memory_bytes(),
        "budget_bytes": manager.budget.limit_bytes,
        "used_bytes": manager.budget.used_bytes,
        "shm_size_bytes": size,
        "shm_free_bytes": free,
        "schedulers": manager.hub.schedulers(),
    }


def session_state(fold: SessionFold, track: Track | None) -> Json:
    """One session: figures of now, and how fast they move."""
    worker, daemon = fold.worker, fold.daemon
    queried = worker[Worker.HIT_TOKENS] + worker[Worker.PREFILL_TOKENS]
    return {
        "id": fold.session_id,
        "model": fold.model,
        "stage": fold.stage,
        "replica": fold.replica,
        "rank": fold.rank,
        "pid": fold.pid,
        "live": fold.live,
        "failure": fold.failure,
        "adopted": fold.adopted,
        "attached_unix_s": fold.attached_unix_s,
        "away": bool(worker[Worker.AWAY]),
        "idle_s": fold.idle_s,
        "epoch": fold.epoch,
        "steps": worker[Worker.STEPS],
        "unconsumed": worker[Worker.UNCONSUMED_STEPS],
        "depth": fold.depth,
        "waiting": fold.waiting,
        "oldest_s": fold.oldest_s,
        "slots": fold.slots,
        "block_size": fold.block_size,
        "hit_requests": worker[Worker.HIT_REQUESTS],
        "hit_tokens": worker[Worker.HIT_TOKENS],
        "queried_tokens": queried,
        "hit_ratio": worker[Worker.HIT_TOKENS] / queried if queried else None,
        "memory": {purpose: getattr(fold.memory, purpose) for purpose in PURPOSES},
        "memory_bytes": fold.memory.total,
        "arena": {
            "size": fold.arena_bytes,
            "used": worker[Worker.ARENA_USED_BYTES],
            "leased": worker[Worker.ARENA_LEASED_BYTES],
            "leases": worker[Worker.LEASES],
            "oldest_s": fold.lease_s,
        },
        "lag_s": {
            "p50": quantile(daemon[Daemon.LAG : Daemon.LAG + BUCKETS], 0.5),
            "p99": quantile(daemon[Daemon.LAG : Daemon.LAG + BUCKETS], 0.99),
        },
        "trouble": {
            "refused_saves": _named(worker, Worker.REFUSED_SAVES, REFUSED_SAVES),
            "failed_merges": _named(worker, Worker.FAILED_MERGES, FAILED_MERGES),
            "failed_writes": _named(worker, Worker.FAILED_WRITES, FAILED_WRITES),
            "lost_steps": worker[Worker.LOST_STEPS],
            "unknown_rows": daemon[Daemon.UNKNOWN_ROWS],
            "wait_s": {name: worker[Worker.WAITS + 2 * i + 1] / 1e9 for i, name in enumerate(WAITS)},
        },
        "keys": [_key_state(key) for key in fold.keys],
        **_speed(track),
    }


def _key_state(key: KeyFold) -> Json:
    presence = key.presence
    return {
        "id": key.key_id,
        "name": key.name,
        "dtype": key.dtype,
        "shape": key.row_shape,
        "row_bytes": key.row_bytes,
        "pool_bytes": key.pool_bytes,
        "staging_bytes": key.staging_bytes,
        "locked": key.locked,
        "rows_in": key.scattered,
        "rows_out": key.gathered,
        "presence": [presence.present, presence.absent, presence.pending, presence.unknown],
        "surveyed_s": presence.age_s,
    }


def _named(words: Sequence[int], first: int, names: Iterable[str]) -> dict[str, int]:
    return {name: words[first + index] for index, name in enumerate(names)}


def _speed(track: Track | None) -> Json:
    """Rates over the last seconds, hit ratio over the last minute, engine-thread seconds a step."""
    if track is None:
        return {"rates": {}, "hit_ratio_1m": None, "step_s": None}
    moved, minute = track.moved(RATE_POINTS), track.moved(RATIO_POINTS)
    elapsed = moved[Field.AT] or 1.0
    hits, computed = minute[Field.HIT_TOKENS], minute[Field.PREFILL_TOKENS]
    steps = minute[Field.STEPS]
    return {
        "rates": {
            field.name.lower(): float(moved[field] / elapsed)
            for field in (
                Field.STEPS,
                Field.HIT_TOKENS,
                Field.PREFILL_TOKENS,
                Field.COMPUTED_TOKENS,
                Field.CONSUMED,
                Field.SCATTERED_BYTES,
                Field.GATHERED_BYTES,
            )
        },
        "hit_ratio_1m": float(hits / (hits + computed)) if hits + computed else None,
        "step_s": {
            field.name.lower().removesuffix("_ns"): float(minute[field] / steps / 1e9)
            for field in (Field.BEGIN_NS, Field.SAVE_NS, Field.MATERIALIZE_NS)
        }
        if steps
        else None,
    }


def errors_state(entries: Iterable[Entry]) -> list[Json]:
    """Entries of the journal, newest first."""
    return [
        {
            "at": entry.at,
            "level": entry.level,
            "what": entry.what,
            "where": entry.where,
            "text": entry.text,
            "cure": entry.cure,
            "count": entry.count,
        }
        for entry in entries
    ]


def history_state(tracks: Sequence[Track]) -> Json:
    """The sum of some sessions over time, in bins of ``BIN_POINTS`` points, oldest first.

    t: seconds before now of each bin's end. Where a bin saw no queried token (or no step) its ratio (or time) is null.
    """
    moved = _binned([track.points() for track in tracks])
    if not len(moved):
        return {"t": [], "hit_ratio": [], "hit_tokens": [], "prefill_tokens": [], "steps": [], "step_us": []}
    seconds = np.maximum(moved[:, Field.AT], 1e-9)
    hits, computed, steps = moved[:, Field.HIT_TOKENS], moved[:, Field.PREFILL_TOKENS], moved[:, Field.STEPS]
    spent = moved[:, Field.BEGIN_NS] + moved[:, Field.SAVE_NS] + moved[:, Field.MATERIALIZE_NS]
    count = len(moved)
    return {
        "t": [-(count - 1 - index) * BIN_POINTS for index in range(count)],
        "hit_ratio": _ratios(hits, hits + computed, 1.0),
        "hit_tokens": np.round(hits / seconds, 1).tolist(),
        "prefill_tokens": np.round(computed / seconds, 1).tolist(),
        "steps": np.round(steps / seconds, 2).tolist(),
        "step_us": _ratios(spent, steps, 1e-3),
    }


def _binned(points: list[Points]) -> Points:
    """[bins, fields]: growth in each bin, summed over sessions whose newest points are at one moment."""
    grown = [np.diff(rows[::-1][::BIN_POINTS][::-1], axis=0) for rows in points if len(rows) > BIN_POINTS]
    total: Points = np.zeros((max(map(len, grown), default=0), len(Field)))
    for rows in grown:
        total[-len(rows) :, 1:] += rows[:, 1:]
        total[-len(rows) :, 0] = rows[:, 0]
    return total


def _ratios(of: Points, by: Points, scale: float) -> list[float | None]:
    return [round(a * scale / b, 5) if b > 0 else None for a, b in zip(of.tolist(), by.tolist(), strict=True)]


def timeline_state(notes: Iterable[RecordNote], now_ns: int) -> list[list[float | str]]:
    """The newest records: [kind, sequence, rows, gathers, published, begun, done, gather ms], in ms before now."""
    found: list[list[float | str]] = []
    for note in notes:
        if now_ns - note.done > TIMELINE_S * 1e9:
            continue
        found.append(
            [
                KINDS[note.kind - 1],
                note.sequence,
                note.rows,
                note.gathers,
                round((now_ns - note.published) / 1e6, 3),
                round((now_ns - note.begun) / 1e6, 3),
                round((now_ns - note.done) / 1e6, 3),
                round(note.gather_ns / 1e6, 3),
            ]
        )
    return found[-TIMELINE_RECORDS:]


def pool_state(found: PoolMap, track: Track | None, now: float) -> Json:
    """A pool's map; ages in seconds, null where nothing is, from when the log had come so far. now: monotonic()."""
    ages: list[float | None] = [None] * len(found.newest)
    if track is not None and len(track):
        points = track.points()
        newest = np.array(found.newest, np.float64)
        at = np.interp(newest, points[:, Field.CONSUMED], points[:, Field.AT])
        ages = [round(now - float(when), 1) if written else None for written, when in zip(newest, at, strict=True)]
    return {
        "num_blocks": found.num_blocks,
        "blocks_a_cell": found.blocks_a_cell,
        "present": found.present,
        "absent": found.absent,
        "pending": found.pending,
        "age_s": ages,
    }


def quantile(buckets: Sequence[int], q: float) -> float | None:
    """A quantile of a histogram in seconds, straight between the bounds of its bucket; null where it is empty."""
    total = sum(buckets)
    if not total:
        return None
    rank, below, low = q * total, 0, 0.0
    for count, bound in zip(buckets, STEP_BOUNDS_S, strict=False):
        if below + count >= rank and count:
            return low + (bound - low) * (rank - below) / count
        below, low = below + count, bound
    return low
