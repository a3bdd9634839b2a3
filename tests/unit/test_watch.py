"""Who is told what over the open streams."""

from __future__ import annotations

import asyncio

from stagecache_wire.v1 import stagecache_pb2 as pb
from stagecached.auth import Caller
from stagecached.watch import MAX_PENDING_EVENTS, Watcher, WatchHub

Kind = pb.WatchEvent


async def drained(watcher: Watcher) -> list[pb.WatchEvent]:
    """All events of a watcher that is closed."""
    watcher.close()
    return [event async for event in watcher.events()]


def kinds(*watchers: Watcher) -> list[list[int]]:
    async def main() -> list[list[int]]:
        return [[event.kind for event in await drained(watcher)] for watcher in watchers]

    return asyncio.run(main())


def test_first_event_has_the_boot_id() -> None:
    watcher = WatchHub(7).open(Caller("s", "worker"), "stage")
    (event,) = asyncio.run(drained(watcher))
    assert (event.kind, event.boot_id) == (Kind.KIND_HELLO, 7)


def test_reset_goes_to_the_schedulers_of_the_stage() -> None:
    hub = WatchHub(7)
    mine = hub.open(Caller("1", "scheduler"), "a")
    other = hub.open(Caller("2", "scheduler"), "b")
    worker = hub.open(Caller("3", "worker"), "a")
    assert (hub.schedulers(), hub.schedulers("a"), hub.schedulers("c")) == (2, 1, 0)
    assert hub.reset_schedulers("a", "weights") == 1
    assert kinds(mine, other, worker) == [[Kind.KIND_HELLO, Kind.KIND_RESET], [Kind.KIND_HELLO], [Kind.KIND_HELLO]]


def test_failure_goes_to_the_sessions_worker_only() -> None:
    hub = WatchHub(7)
    mine, other = hub.open(Caller("1", "worker"), "a"), hub.open(Caller("2", "worker"), "a")
    hub.session_failed("1", "why")
    assert kinds(mine, other) == [[Kind.KIND_HELLO, Kind.KIND_FAILED], [Kind.KIND_HELLO]]


def test_shutdown_ends_every_stream() -> None:
    hub = WatchHub(7)
    watchers = [hub.open(Caller("1", "worker"), "a"), hub.open(Caller("2", "scheduler"), "a")]
    hub.shutdown("drains")
    hub.reset_schedulers("a", "too late")
    assert kinds(*watchers) == [[Kind.KIND_HELLO, Kind.KIND_SHUTDOWN]] * 2


def test_stream_that_does_not_read_is_closed_and_not_buffered_for_ever() -> None:
    hub = WatchHub(7)
    watcher = hub.open(Caller("1", "scheduler"), "a")
    for _ in range(10 * MAX_PENDING_EVENTS):
        hub.reset_schedulers("a", "again")
    (seen,) = kinds(watcher)
    assert len(seen) == MAX_PENDING_EVENTS


def test_closed_watcher_is_told_nothing() -> None:
    hub = WatchHub(7)
    watcher = hub.open(Caller("1", "scheduler"), "a")
    hub.close(watcher)
    assert hub.reset_schedulers("a", "x") == 0
    assert hub.schedulers() == 0
