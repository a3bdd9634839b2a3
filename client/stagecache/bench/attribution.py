"""Where our engine-thread time goes, and how many bytes move: a pass of its own, never the one that is timed.

Parts of a live cache are wrapped with clocks. Each clock costs about half a microsecond, so the parts show proportions;
the timed figures come without them.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any, Final

from stagecache import cache as cache_module
from stagecache import device
from stagecache.bench.contenders import Ours
from stagecache.bench.measure import run_step, settle
from stagecache.bench.workloads import Lane, Workload
from stagecache_wire import figures, layout

_Wrapped = Callable[..., Any]


WHOLE_STEP: Final = "whole step"
"""begin + save + materialize of the same pass, clocks included: what the parts are shares of."""


def _parts(cache: Any) -> list[tuple[str, Any, str]]:
    """(what it is, owner, attribute) of every part that is timed; in brackets the rules whose work it is.

    What has no rule behind it is what any cache does: find the slots, copy the rows in and out, tell the other side.
    """
    return [
        ("begin: step never saved (W8)", cache, "_abandon"),
        ("begin: epoch (R5)", cache._saver.epochs, "follow"),
        ("begin: plan (H2, H3, R1 to R3)", cache._planner, "plan"),
        ("begin: hits", cache._saver, "begin_hits"),
        ("save: slots (W6)", cache._batches, "read"),
        ("save: split (K1 to K5)", cache._saver.keys, "split"),
        ("save: claim a page (W2)", cache._saver, "_claim_page"),
        ("save: copy into the page", cache._saver._device, "stage"),
        ("save: publish", cache.session, "append"),
        ("save: figures", cache._export, "saved"),
        ("materialize: take the step (S1, S2, R3)", cache, "_take"),
        ("materialize: wait for the hit", cache._hits, "read"),
        ("materialize: copy out and merge", cache_module, "assemble"),
        ("materialize: delivery (R3)", cache, "_delivered"),
        ("materialize: end the step", cache, "_end_step"),
        ("materialize: figures", cache._export, "handed_out"),
    ]


@contextmanager
def _clocks(cache: Any, spent: dict[str, int]) -> Iterator[None]:
    restore: list[tuple[Any, str, bool, Any]] = []

    def clocked(what: str, call: _Wrapped) -> _Wrapped:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            begun = time.perf_counter_ns()
            try:
                return call(*args, **kwargs)
            finally:
                spent[what] += time.perf_counter_ns() - begun

        return wrapper

    try:
        for what, owner, attribute in _parts(cache):
            call = getattr(owner, attribute, None)
            if call is not None:
                own = attribute in vars(owner)
                restore.append((owner, attribute, own, call))
                setattr(owner, attribute, clocked(what, call))
        yield
    finally:
        for owner, attribute, own, call in restore:
            if own:
                setattr(owner, attribute, call)
            else:
                delattr(owner, attribute)


@contextmanager
def counted_moves(moved: dict[str, int]) -> Iterator[None]:
    """Count the host copies of the worker, and their bytes, under ``copies`` and ``engine``."""
    kept = device._holding, device._releasing

    def counted(move: _Wrapped) -> _Wrapped:
        def wrapper(target: int, source: int, size: int) -> Any:
            moved["copies"] = moved.get("copies", 0) + 1
            moved["engine"] = moved.get("engine", 0) + size
            return move(target, source, size)

        return wrapper

    changed: Any = device
    changed._holding, changed._releasing = counted(kept[0]), counted(kept[1])
    try:
        yield
    finally:
        changed._holding, changed._releasing = kept


def attribute(ours: Ours, workload: Workload, lane: Lane, blocks: int = 3) -> tuple[dict[str, float], dict[str, int]]:
    """Microseconds a step of each part (medians; the daemon's are means), and bytes moved a block by both sides."""
    spent: dict[str, int] = defaultdict(int)
    by_step: dict[str, list[int]] = defaultdict(list)
    moved: dict[str, int] = {}
    steps = 0
    daemon = _daemon_words(ours)
    with _clocks(ours.cache, spent), counted_moves(moved):
        for _ in range(blocks):
            for step in workload.block(lane):
                spent.clear()
                sample, _, _ = run_step(ours, step)
                spent[WHOLE_STEP] = sample.total
                steps += 1
                for what, nanoseconds in spent.items():
                    by_step[what].append(nanoseconds)
    settle(ours)
    after = {name: value - daemon[name] for name, value in _daemon_words(ours).items()}
    parts = {what: median(nanoseconds) / 1e3 for what, nanoseconds in by_step.items()}
    parts |= {f"daemon: {name}": after[name] / steps / 1e3 for name in ("busy", "scatter", "gather")}
    bytes_moved = {
        "engine": moved.get("engine", 0) // blocks,
        "daemon": (after["scattered bytes"] + after["gathered bytes"]) // blocks,
    }
    return parts, bytes_moved


def _daemon_words(ours: Ours) -> dict[str, int]:
    words, at = ours.cache.session.control.words, layout.D_FIGURES
    daemon = figures.Daemon
    return {
        "busy": words[at + daemon.BUSY_NS],
        "scatter": words[at + daemon.SCATTER + figures.BUCKETS],
        "gather": words[at + daemon.GATHER + figures.BUCKETS],
        "scattered bytes": words[at + daemon.SCATTERED_BYTES],
        "gathered bytes": words[at + daemon.GATHERED_BYTES],
    }
