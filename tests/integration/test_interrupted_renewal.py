"""A step that is interrupted anywhere while it takes over the session that came in the background (R5, W8).

Whatever was cut short, the next step goes on with that session, no row of before is read, and when this session is over
another one comes.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from stagecache import reattach
from stagecache.cache import StageCache
from stagecache.control import Observer
from stagecache.errors import DaemonUnavailableError, UnreadableHitError
from stagecache.latecache import LateCache
from stagecache.reattach import Renewals
from stagecache.session import Session
from stagecache.stream_device import StreamDevice
from tests.daemon_process import DaemonProcess, poll_until
from tests.device.fake import FakeStreams
from tests.integration.helpers import own_daemon
from tests.integration.replica import HIDDEN, MODEL, Replica, rows_of, same
from tests.integration.test_sharing_ends import (
    OLD,
    PROMPT,
    SHARED,
    next_session_is_there,
    shares,
    step_without_requests,
)
from tests.interrupts import Interrupter

TAKING = ("reattach.py", "watcher.py", "sharing.py")


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    with own_daemon(tmp_path_factory.mktemp("node"), *SHARED) as daemon:
        yield daemon


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between sessions that lived shortly."""
    monkeypatch.setattr(reattach, "SHORT_LIFE_S", 0.0)


def sessions_of(node: DaemonProcess, stage: str) -> list[str]:
    with Observer(node.socket) as observer:
        return [session.session_id for session in observer.stats().sessions if session.stage == stage]


def end_session(replica: Replica) -> None:
    """As the daemon says that it is over; the next one waits to be taken."""
    replica.cache.session.watcher._tell_over()
    next_session_is_there(replica)


def check_anew(replica: Replica, where: str) -> None:
    """Rows of before are gone; what is saved from now on is read and shared."""
    with pytest.raises(UnreadableHitError):
        replica.run([*OLD[:4], 1, 2], [0, 2], hit=4)
    replica.run(PROMPT[:8], [0, 1])
    _, rows = replica.run(PROMPT[:10], [0, 1, 2], hit=8)
    assert same(rows[HIDDEN.name], rows_of(HIDDEN, PROMPT, 0, 10)), where
    poll_until(lambda: shares(replica), f"the join, after an interrupt at {where}")


def interrupt_each(replica: Replica, *, over: bool = False, within: tuple[str, ...] = ("",)) -> int:
    """Take a session over with an interrupt at each place; how many places there are.

    over: the session that comes is over before it is taken.

    Raises:
        AssertionError: a step could not go on; the text says where the interrupt was.
    """
    cache = replica.cache
    interrupted, nth = True, 0
    while interrupted:
        nth += 1
        replica.run(OLD, [0, 1])
        end_session(replica)
        before, renewals = cache.session.session_id, cache.counters.renewals
        attacher = cache._renewals.pending
        assert attacher is not None
        assert attacher.session is not None
        if over:
            attacher.session.watcher._tell_over()
        interrupter = Interrupter(nth, once=True, within=within)
        interrupted = interrupter.run(lambda: step_without_requests(replica))
        step_without_requests(replica)
        assert cache.session is cache._home.session is attacher.session, interrupter.where
        assert cache.session.session_id != before, interrupter.where
        assert cache.counters.renewals == renewals + 1, interrupter.where
        if over:
            next_session_is_there(replica)
            step_without_requests(replica)
            assert cache.counters.renewals == renewals + 2, interrupter.where
        assert cache._renewals.pending is None, interrupter.where
        check_anew(replica, interrupter.where)
    return nth - 1


@pytest.mark.parametrize("over", [False, True])
def test_whatever_interrupts_it_the_next_step_goes_on_with_the_session_that_came(
    node: DaemonProcess, over: bool
) -> None:
    replica = Replica(node.socket)
    assert replica.join().on
    places = interrupt_each(replica, over=over, within=TAKING if over else ("",))
    assert places > (15 if over else 120), "the interrupt has many places to be"
    assert sessions_of(node, "shared") == [replica.cache.session.session_id], "no session was left behind"
    replica.close()


def senders() -> int:
    return sum(thread.name == "stagecache-sender" for thread in threading.enumerate())


def test_whatever_interrupts_it_memory_is_pinned_once_and_one_sender_runs(node: DaemonProcess) -> None:
    """Where rows come from a device."""
    streams, before = FakeStreams(), senders()
    device = StreamDevice(streams, slab_bytes=1 << 16)
    replica = Replica(node.socket, device=device)
    assert replica.join().on
    held = len(streams.pinned)
    places = interrupt_each(replica, within=("stream_path.py", "pins.py", "sender.py", "attachment.py"))
    assert places > 30
    gc.collect()
    poll_until(lambda: senders() == before + 1, "senders of sessions that are over to end")
    poll_until(lambda: len(streams.pinned) == held, "memory of sessions that are over to be unpinned")
    assert not device.pins.cause
    replica.close()
    assert not streams.pinned
    assert not streams.wrong


def test_a_session_that_is_taken_before_it_is_used_would_be_lost(
    node: DaemonProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: forgotten when it is handed out, as it was once."""
    inner = Renewals.session

    def take(self: Renewals) -> Session | None:
        session = inner(self)
        if session is not None:
            self.pending = None
        return session

    monkeypatch.setattr(Renewals, "session", take)
    replica = Replica(node.socket, stage="forgets")
    replica.join()
    with pytest.raises(AssertionError):
        interrupt_each(replica, within=("keys.py",))
    replica.close()


def test_whatever_interrupts_it_a_late_cache_comes_with_the_next_step(node: DaemonProcess) -> None:
    first = Replica(node.socket, stage="late")
    asked: dict[str, Any] = {"model": "m", "stage": "late", "geometry": first.cache.session.geometry}
    interrupted, nth = True, 0
    while interrupted:
        nth += 1
        late = LateCache(
            DaemonUnavailableError("nobody."),
            socket=node.socket,
            view=first,
            keys=first.keys,
            namespace=MODEL,
            **asked,
        )
        poll_until(lambda late=late: late._attacher.session, "a session")
        interrupter = Interrupter(nth, once=True, within=("latecache.py", "cache.py", *TAKING))
        interrupted = interrupter.run(late.take)
        cache = late.take()
        assert isinstance(cache, StageCache)
        first.cache.close()
        first.cache = cache
        check_anew(first, interrupter.where)
        assert sessions_of(node, "late") == [cache.session.session_id], interrupter.where
    assert nth > 30
    first.close()
