"""The GPU path with one wait, or one clone, taken out: what each must break, and the order of streams that shows it.

A mutant that no story catches means that the wait is not tested, or not needed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from stagecache.copies import Copies
from stagecache.sender import LogSender
from stagecache.stream_device import StreamDevice
from stagecache.stream_path import StreamPath
from stagecache_wire.records import Record
from tests.device import scenarios
from tests.device.fake import FakeStreams

Patch = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True)
class Mutant:
    """name: what is wrong with it. order: of the streams. story: the one that catches it."""

    name: str
    order: str
    story: Callable[[scenarios.Make], None]
    patch: Patch


def _stage_live_rows(patch: pytest.MonkeyPatch) -> None:
    def stage(self: StreamDevice, page: torch.Tensor, rows: torch.Tensor) -> None:
        self._pairs.append((page, rows))

    patch.setattr(StreamDevice, "stage", stage)


def _leftovers_of_live_tensors(patch: pytest.MonkeyPatch) -> None:
    def to_host(self: StreamDevice, rows: torch.Tensor) -> torch.Tensor:
        taken = self.slab.take(rows)
        assert taken is not None
        self._pairs.append((taken[0], rows))
        return taken[0]

    patch.setattr(StreamDevice, "to_host", to_host)


def _deferred_without_clone(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StreamDevice, "clone", lambda self, rows: rows)


def _copies_do_not_wait_for_the_forward(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FakeStreams, "hold_copies", lambda self, event: None)


def _record_does_not_wait_for_its_copies(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Copies, "land", lambda self: self._landed.set())


def _materialize_does_not_wait(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Copies, "wait", lambda self, timeout_s, what: None)


def _begin_overtakes(patch: pytest.MonkeyPatch) -> None:
    append = LogSender.append

    def straight(self: LogSender, record: Record, copies: Any = None, writes: Any = (), *, urgent: bool = True) -> int:
        if copies is None:
            return self._log.append(record, 1.0)
        return append(self, record, copies, writes, urgent=urgent)

    patch.setattr(LogSender, "append", straight)


def _newest_first(patch: pytest.MonkeyPatch) -> None:
    def take(self: LogSender) -> Any:
        self._ahead.append(self._inbox.get())
        while not self._inbox.empty():
            self._ahead.append(self._inbox.get())
        return self._ahead.pop()

    patch.setattr(LogSender, "_take", take)


def _sources_are_freed_at_once(patch: pytest.MonkeyPatch) -> None:
    start = Copies.start

    def forgetful(self: Copies) -> None:
        start(self)
        self._pairs = ()

    patch.setattr(Copies, "start", forgetful)


def _page_is_free_under_a_copy(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Copies, "done", property(lambda self: True))


def _failed_copies_are_published(patch: pytest.MonkeyPatch) -> None:
    land = Copies.land

    def cheerful(self: Copies) -> None:
        land(self)
        self.error = None

    patch.setattr(Copies, "land", cheerful)


def _unpinned_at_once(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StreamPath, "closed", lambda self, key: self.device.pins.remove(key.segment.map))


def _engine_copies_to_unpinned_memory(patch: pytest.MonkeyPatch) -> None:
    init = Copies.__init__

    def eager(self: Copies, streams: Any, ready: Any, pairs: Any, late: Any, *more: Any) -> None:
        init(self, streams, ready, [*pairs, *late], (), *more)

    patch.setattr(Copies, "__init__", eager)
    patch.setattr(FakeStreams, "patience_s", 0.2)


MUTANTS = (
    Mutant("pages are filled from live buffers", "compute first", scenarios.overwritten_buffers, _stage_live_rows),
    Mutant(
        "leftovers are copied from live tensors",
        "compute first",
        scenarios.overwritten_buffers,
        _leftovers_of_live_tensors,
    ),
    Mutant("deferred rows stay in live buffers", "compute first", scenarios.deferred_flush, _deferred_without_clone),
    Mutant(
        "the copy stream does not wait for the clones",
        "copies first",
        scenarios.overwritten_buffers,
        _copies_do_not_wait_for_the_forward,
    ),
    Mutant(
        "the copy stream does not wait for a flush's cat",
        "copies first",
        scenarios.deferred_flush,
        _copies_do_not_wait_for_the_forward,
    ),
    Mutant(
        "a record is published before its copies landed",
        "lazy",
        scenarios.pool_rows,
        _record_does_not_wait_for_its_copies,
    ),
    Mutant(
        "materialize reads before the copies landed", "lazy", scenarios.materialize_waits, _materialize_does_not_wait
    ),
    Mutant("BEGIN overtakes the SAVE before it", "lazy", scenarios.begin_behind_save, _begin_overtakes),
    Mutant("records are published newest first", "lazy", scenarios.begin_behind_save, _newest_first),
    Mutant(
        "sources are freed under their copies",
        "compute first",
        scenarios.overwritten_buffers,
        _sources_are_freed_at_once,
    ),
    Mutant("a page is given out under a copy", "lazy", scenarios.page_under_a_copy, _page_is_free_under_a_copy),
    Mutant("a failed copy is published", "lazy", scenarios.failed_copy, _failed_copies_are_published),
    Mutant("memory is unpinned under a copy", "lazy", scenarios.key_given_up, _unpinned_at_once),
    Mutant(
        "the engine thread copies into unpinned memory",
        "lazy",
        scenarios.memory_that_cannot_be_pinned,
        _engine_copies_to_unpinned_memory,
    ),
)
