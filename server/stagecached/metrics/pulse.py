"""How well the process breathes: how late its event loop wakes up, and how long the garbage collector holds it."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from stagecached.metrics.catalog import CALL_BOUNDS_S, GENERATIONS
from stagecached.metrics.histogram import Histogram

BEAT_S: Final = 0.25


class Pulse:
    """Two sets of histograms. The collector calls back under the interpreter lock, one collection at a time."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.loop_lag = Histogram(CALL_BOUNDS_S)
        self.gc_pauses = {generation: Histogram(CALL_BOUNDS_S) for generation in GENERATIONS}
        self._clock = clock
        self._gc_begun = 0.0

    async def beat(self) -> None:
        """Measure the loop's lag, ``BEAT_S`` seconds apart, until cancelled."""
        while True:
            due = self._clock() + BEAT_S
            await asyncio.sleep(BEAT_S)
            self.loop_lag.observe(max(self._clock() - due, 0.0))

    def watch_gc(self) -> None:
        gc.callbacks.append(self._on_gc)

    def unwatch_gc(self) -> None:
        if self._on_gc in gc.callbacks:
            gc.callbacks.remove(self._on_gc)

    def _on_gc(self, phase: str, info: Mapping[str, Any]) -> None:
        if phase == "start":
            self._gc_begun = self._clock()
        elif self._gc_begun:
            self.gc_pauses[str(info["generation"])].observe(self._clock() - self._gc_begun)
