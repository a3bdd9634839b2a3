"""Rows that stay on the device until they must be written: finish, abort, preemption, a hit, or the budget (W3).

The step that computed them claims their slots; the rows wait in a clone. A flush writes them only where the claim
still stands, so that it can never overwrite a new tenant.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from stagecache.device import CpuDevice
from stagecache.errors import FailedWriteError
from stagecache.mapping import StagedKey
from stagecache.writes import Write, WriteState
from stagecache_wire.records import KeyMode, Kind, Record, key_words

if TYPE_CHECKING:
    from stagecache.copies import Copies


@dataclass(slots=True)
class StepClone:
    """One key's rows of one step on the device. Its bytes are charged once, and returned with its last holder.

    rows: [n, *row_shape]. slots: int64 [n]. sequence: the record that claimed them.
    """

    key: StagedKey
    rows: torch.Tensor
    slots: NDArray[np.int64]
    sequence: int
    holders: int

    @property
    def nbytes(self) -> int:
        return int(self.rows.nbytes)


@dataclass(slots=True)
class OpenWrite:
    """What a request still has open: (clone, first row, end row), oldest first. A flush closes it; the next save
    opens another with write_n + 1.
    """

    write_n: int
    pieces: list[tuple[StepClone, int, int]] = field(default_factory=list)


class DeferredRows:
    """Open deferred writes of all requests. Engine thread only."""

    def __init__(
        self,
        budget_bytes: int,
        device: CpuDevice,
        claim_page: Callable[[StagedKey], int],
        append: Callable[[Record, Copies | None, Sequence[Write]], int],
        logged: Callable[[StagedKey, int, int], None],
    ) -> None:
        """budget_bytes: device bytes that clones may take. claim_page(key), append(record, copies, writes) and
        logged(key, page, sequence) are the log's side of a flush; the first two raise StageCacheError where they
        cannot.
        """
        self.budget_bytes = budget_bytes
        self.used_bytes = 0
        self.open: dict[str, OpenWrite] = {}
        self.errors: list[FailedWriteError] = []
        """Failed flushes, to be reported by the next call (W5)."""
        self.flushes = 0
        self.cloned_rows = self.cloned_bytes = self.flushed_rows = self.flushed_bytes = self.failed_flushes = 0
        """Totals, for metrics."""
        self._write_n: dict[str, int] = {}
        self._device = device
        self._claim_page = claim_page
        self._append = append
        self._logged = logged

    def note_failed(self, writes: Sequence[Write], error: Exception) -> None:
        """The copy of a flush, or of a step, failed on its way; the log says so already (W5, W8)."""
        for write in writes:
            if write.state < WriteState.WRITTEN:
                write.advance(WriteState.FAILED, cause=str(error))
        more = f" and {len(writes) - 1} more" if len(writes) > 1 else ""
        report = FailedWriteError(
            f"{writes[0].what}{more}: the copy to host memory failed: {error}. Their rows are unknown now.",
            remedy="Later hits on them fail until the engine's prefix cache is reset.",
        )
        report.__cause__ = error
        self.errors.append(report)

    def make_room(self, nbytes: int) -> None:
        """Flush the oldest requests until ``nbytes`` fit into the budget, or nothing is open."""
        while self.open and self.used_bytes + nbytes > self.budget_bytes:
            self.flush([next(iter(self.open))])

    def add(self, clone: StepClone, parts: list[tuple[str, int, int]]) -> None:
        """Rows of a step that was just logged. parts: (request, first row, end row), rows of the clone."""
        clone.holders = len(parts)
        if not parts:
            return
        self.used_bytes += clone.nbytes
        self.cloned_rows += len(clone.slots)
        self.cloned_bytes += clone.nbytes
        for req_id, start, end in parts:
            write = self.open.get(req_id)
            if write is None:
                number = self._write_n.get(req_id, 0) + 1
                self._write_n[req_id] = number
                write = self.open[req_id] = OpenWrite(number)
            write.pieces.append((clone, start, end))
        self.make_room(0)

    def forget(self, req_id: str) -> None:
        """The request ended, and what it had open was flushed: its writes are counted anew if the id comes again."""
        self._write_n.pop(req_id, None)

    def touching(self, blocks: set[int], block_size: int) -> list[str]:
        """Requests with rows open in any of these blocks."""
        found = []
        for req_id, write in self.open.items():
            for clone, start, end in write.pieces:
                if not blocks.isdisjoint((clone.slots[start:end] // block_size).tolist()):
                    found.append(req_id)
                    break
        return found

    def drop_all(self) -> None:
        """Forget every open row: a new epoch made them unreadable (R5)."""
        self.open.clear()
        self.used_bytes = 0

    def take_error(self) -> FailedWriteError:
        """The first failed flush that was not reported yet; its text counts the others, which are reported with it."""
        first, others = self.errors[0], self.errors[1:]
        self.errors.clear()
        if not others:
            return first
        joined = FailedWriteError(f"{first} There were {len(others)} more such failures.")
        joined.__cause__ = first
        return joined

    def flush(self, req_ids: Iterable[str]) -> None:
        """Write what these requests have open. A failure makes exactly those rows UNKNOWN and is kept in ``errors``."""
        by_key: dict[int, list[tuple[StepClone, int, int, Write]]] = {}
        for req_id in req_ids:
            write = self.open.pop(req_id, None)
            if write is None:
                continue
            for clone, start, end in write.pieces:
                name = clone.key.schema.name
                note = Write(f"request {req_id}, key {name}, write {write.write_n}")
                by_key.setdefault(clone.key.key_id, []).append((clone, start, end, note))
                clone.holders -= 1
                if clone.holders == 0:
                    self.used_bytes -= clone.nbytes
        for pieces in by_key.values():
            self._flush_key(pieces)

    def _flush_key(self, pieces: list[tuple[StepClone, int, int, Write]]) -> None:
        key = pieces[0][0].key
        capacity = key.geometry.staging_capacity_tokens
        at = 0
        while at < len(pieces):
            batch: list[tuple[StepClone, int, int, Write]] = []
            rows = 0
            while at < len(pieces) and (not batch or rows + pieces[at][2] - pieces[at][1] <= capacity):
                batch.append(pieces[at])
                rows += pieces[at][2] - pieces[at][1]
                at += 1
            self._flush_batch(key, batch, rows)

    def _flush_batch(self, key: StagedKey, batch: list[tuple[StepClone, int, int, Write]], rows: int) -> None:
        slots = np.concatenate([clone.slots[start:end] for clone, start, end, _ in batch]).astype(np.uint32)
        claims = np.concatenate([np.full(end - start, clone.sequence, np.uint64) for clone, start, end, _ in batch])
        record = Record(
            0,
            Kind.FLUSH,
            rows=rows,
            unit_runs=True,
            keys=key_words((key.key_id, KeyMode.ROWS)),
            runs=slots,
            claims=claims,
        )
        try:
            record.page = self._claim_page(key)
            for *_, note in batch:
                note.advance(WriteState.QUEUED)
                note.advance(WriteState.COPYING)
            device = self._device
            device.gather(key.pages[record.page][:rows], [clone.rows[start:end] for clone, start, end, _ in batch])
            copies = device.seal()
            notes = [note for *_, note in batch]
            sequence = self._append(record, copies, notes)
            if copies is None:
                for note in notes:
                    note.advance(WriteState.HOST_READY, sequence=sequence)
            self._logged(key, record.page, sequence)
            self.flushes += 1
            self.flushed_rows += rows
            self.flushed_bytes += rows * key.schema.row_bytes
        except Exception as error:
            self._failed(record, batch, error)

    def _failed(self, record: Record, batch: list[tuple[StepClone, int, int, Write]], error: Exception) -> None:
        for *_, note in batch:
            note.advance(WriteState.FAILED, cause=str(error))
        self.failed_flushes += 1
        record.kind = Kind.FAIL
        report = FailedWriteError(
            f"{batch[0][3].what} and {len(batch) - 1} more were not written: {error}. Their rows are unknown now.",
            remedy="Later hits on them fail until the engine's prefix cache is reset.",
        )
        report.__cause__ = error
        self.errors.append(report)
        self._append(record, None, ())
