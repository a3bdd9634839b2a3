"""W3: rows that wait on the device: what flushes them, what they cost, and what a failed flush says."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from stagecache.deferred import DeferredRows, StepClone
from stagecache.device import CpuDevice
from stagecache.errors import DaemonLostError, StageCacheError
from stagecache.mapping import StagedKey
from stagecache_wire.geometry import KeySchema
from stagecache_wire.records import Kind, Record
from tests.unit.client.key_kit import GEOMETRY, staged

LATE = KeySchema("late", "float32", (2,))
OTHER = KeySchema("other", "int64", ())


class Log:
    """The log's side of a flush: two pages a key, records kept."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.pages: list[tuple[str, int, int]] = []
        self.copied: list[torch.Tensor] = []
        self.page_error: StageCacheError | None = None
        self.append_error: StageCacheError | None = None
        self._page = 0

    def claim_page(self, key: StagedKey) -> int:
        if self.page_error is not None:
            raise self.page_error
        self._page ^= 1
        return self._page

    def append(self, record: Record, *_: object) -> int:
        if self.append_error is not None:
            raise self.append_error
        record.sequence = 100 + len(self.records)
        self.records.append(record)
        return record.sequence

    def logged(self, key: StagedKey, page: int, sequence: int) -> None:
        self.pages.append((key.schema.name, page, sequence))
        rows = self.records[-1].rows
        self.copied.append(key.pages[page][:rows].clone())


@pytest.fixture
def log() -> Log:
    return Log()


@pytest.fixture
def late() -> StagedKey:
    return staged(0, LATE)


@pytest.fixture
def deferred(log: Log) -> DeferredRows:
    return DeferredRows(1 << 20, CpuDevice(), log.claim_page, log.append, log.logged)


def step(key: StagedKey, sequence: int, first_slot: int, rows: int) -> StepClone:
    values = torch.arange(sequence * 100, sequence * 100 + rows).to(key.dtype)
    shaped = values[:, None].expand(rows, 2).contiguous() if key.schema.row_shape else values
    return StepClone(key, shaped, np.arange(first_slot, first_slot + rows, dtype=np.int64), sequence, 0)


def test_a_finish_writes_what_the_request_has_open_over_its_steps(
    deferred: DeferredRows, log: Log, late: StagedKey
) -> None:
    """One record, with the claim of each row's own step."""
    deferred.add(step(late, 5, 0, 4), [("a", 0, 3), ("b", 3, 4)])
    deferred.add(step(late, 8, 10, 2), [("b", 0, 1), ("a", 1, 2)])
    deferred.flush(["a"])
    (record,) = log.records
    assert (record.kind, record.rows, record.page) == (Kind.FLUSH, 4, log.pages[0][1])
    assert (record.slots().tolist(), record.claims.tolist()) == ([0, 1, 2, 11], [5, 5, 5, 8])
    assert log.copied[0][:, 0].tolist() == [500, 501, 502, 801]
    assert list(deferred.open) == ["b"]


def test_a_flush_closes_a_write_and_the_next_save_opens_another(deferred: DeferredRows, late: StagedKey) -> None:
    deferred.add(step(late, 5, 0, 1), [("a", 0, 1)])
    assert deferred.open["a"].write_n == 1
    deferred.flush(["a"])
    deferred.add(step(late, 6, 1, 1), [("a", 0, 1)])
    assert deferred.open["a"].write_n == 2
    deferred.flush(["a", "never seen"])
    assert deferred.open == {}


def test_each_key_is_flushed_by_a_record_of_its_own(deferred: DeferredRows, log: Log, late: StagedKey) -> None:
    other = staged(1, OTHER)
    deferred.add(step(late, 5, 0, 2), [("a", 0, 2)])
    deferred.add(step(other, 5, 0, 2), [("a", 0, 2)])
    deferred.flush(["a"])
    assert [record.keyed_modes()[0][0] for record in log.records] == [0, 1]


def test_a_flush_larger_than_a_page_is_several_records(deferred: DeferredRows, log: Log, late: StagedKey) -> None:
    for number in range(5):
        deferred.add(step(late, number + 1, number * 4, 6), [("a", 0, 6)])
    deferred.flush(["a"])
    assert [record.rows for record in log.records] == [12, 12, 6]
    assert all(record.rows <= GEOMETRY.staging_capacity_tokens for record in log.records)
    assert log.pages[0][1] != log.pages[1][1]


def test_bytes_of_a_clone_are_charged_once_and_returned_with_its_last_holder(
    deferred: DeferredRows, late: StagedKey
) -> None:
    deferred.add(step(late, 5, 0, 4), [("a", 0, 2), ("b", 2, 4)])
    assert deferred.used_bytes == 4 * 8
    deferred.flush(["a"])
    assert deferred.used_bytes == 4 * 8, "b still holds the clone"
    deferred.flush(["b"])
    assert deferred.used_bytes == 0


def test_a_step_that_nobody_holds_costs_nothing(deferred: DeferredRows, late: StagedKey) -> None:
    deferred.add(step(late, 5, 0, 4), [])
    assert (deferred.used_bytes, deferred.open) == (0, {})


def test_the_budget_flushes_the_oldest_first(log: Log, late: StagedKey) -> None:
    deferred = DeferredRows(100, CpuDevice(), log.claim_page, log.append, log.logged)
    for number, name in enumerate("abc"):
        deferred.make_room(4 * 8)
        deferred.add(step(late, number + 1, number * 4, 4), [(name, 0, 4)])
    assert list(deferred.open) == ["a", "b", "c"]
    deferred.make_room(4 * 8)
    assert list(deferred.open) == ["b", "c"]
    assert log.records[0].slots().tolist() == [0, 1, 2, 3]
    deferred.make_room(1000)
    assert (deferred.open, deferred.used_bytes) == ({}, 0)


def test_a_clone_larger_than_the_budget_is_written_at_once(log: Log, late: StagedKey) -> None:
    deferred = DeferredRows(8, CpuDevice(), log.claim_page, log.append, log.logged)
    deferred.add(step(late, 1, 0, 4), [("a", 0, 4)])
    assert (len(log.records), deferred.open, deferred.used_bytes) == (1, {}, 0)


def test_requests_with_rows_in_a_block_are_found(deferred: DeferredRows, late: StagedKey) -> None:
    deferred.add(step(late, 5, 0, 8), [("a", 0, 3), ("b", 3, 6), ("c", 6, 8)])
    assert deferred.touching({0}, 4) == ["a", "b"]
    assert deferred.touching({1}, 4) == ["b", "c"]
    assert deferred.touching({2, 9}, 4) == []


def test_a_failed_flush_makes_its_rows_unknown_and_is_told_once(
    deferred: DeferredRows, log: Log, late: StagedKey
) -> None:
    """W5"""
    log.page_error = DaemonLostError("no page")
    deferred.add(step(late, 5, 0, 3), [("a", 0, 1), ("b", 1, 3)])
    deferred.flush(["a", "b"])
    (record,) = log.records
    assert (record.kind, record.slots().tolist(), record.claims.tolist()) == (Kind.FAIL, [0, 1, 2], [5, 5, 5])
    (error,) = deferred.errors
    for part in ("request a", "key late", "write 1", "1 more", "no page"):
        assert part in str(error)
    assert error.__cause__ is log.page_error
    assert (deferred.used_bytes, log.pages) == (0, [])
    log.page_error = None
    deferred.add(step(late, 6, 0, 1), [("a", 0, 1)])
    deferred.flush(["a"])
    assert log.records[-1].kind is Kind.FLUSH, "the cache goes on"


def test_a_copy_that_fails_is_a_failed_flush(log: Log, late: StagedKey) -> None:
    class Broken(CpuDevice):
        def stage(self, page: torch.Tensor, rows: torch.Tensor) -> None:
            raise RuntimeError("device lost")

    deferred = DeferredRows(1 << 20, Broken(), log.claim_page, log.append, log.logged)
    deferred.add(step(late, 5, 0, 1), [("a", 0, 1)])
    deferred.flush(["a"])
    assert log.records[0].kind is Kind.FAIL
    assert "device lost" in str(deferred.errors[0])


def test_a_flush_that_cannot_even_be_told_is_an_error_of_the_call(
    deferred: DeferredRows, log: Log, late: StagedKey
) -> None:
    """The caller raises the epoch then: the rows can never be told from older ones."""
    log.append_error = DaemonLostError("away")
    deferred.add(step(late, 5, 0, 1), [("a", 0, 1)])
    with pytest.raises(DaemonLostError):
        deferred.flush(["a"])


def test_a_new_epoch_forgets_what_is_open(deferred: DeferredRows, log: Log, late: StagedKey) -> None:
    """R5"""
    deferred.add(step(late, 5, 0, 4), [("a", 0, 4)])
    deferred.drop_all()
    deferred.flush(["a"])
    assert (deferred.open, deferred.used_bytes, log.records) == ({}, 0, [])
