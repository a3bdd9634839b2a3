"""Calls and waits that an interrupt cannot leave locked: they do what threading's own do."""

from __future__ import annotations

import signal
import threading
from threading import Thread

import pytest

from stagecache.interrupts import Latch, Wakeups, uninterrupted


def test_a_call_of_the_main_thread_runs_on_another_and_gives_its_answer_or_its_error() -> None:
    assert uninterrupted(threading.get_ident) != threading.get_ident()
    with pytest.raises(ZeroDivisionError):
        uninterrupted(lambda: 1 // 0)


def test_a_call_of_another_thread_runs_there() -> None:
    found = []
    thread = Thread(target=lambda: found.append(uninterrupted(threading.get_ident) == threading.get_ident()))
    thread.start()
    thread.join()
    assert found == [True]


def test_an_interrupt_ends_the_wait_and_not_the_call() -> None:
    begun, go_on, over = threading.Event(), threading.Event(), threading.Event()

    def call() -> None:
        begun.set()
        go_on.wait(10.0)
        over.set()

    def interrupt() -> None:
        begun.wait(10.0)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    thread = Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        uninterrupted(call)
    thread.join()
    go_on.set()
    assert over.wait(10.0)


def test_all_that_sleep_are_woken_and_none_that_looked_before_oversleeps() -> None:
    wakeups = Wakeups()
    early = wakeups.sleeper()
    woken: list[bool] = []
    sleepers = [wakeups.sleeper() for _ in range(4)]
    threads = [Thread(target=lambda sleep=sleep: woken.append(sleep(10.0))) for sleep in sleepers]
    for thread in threads:
        thread.start()
    wakeups.wake()
    for thread in threads:
        thread.join(10.0)
    assert woken == [True] * 4
    assert early(0.0), "it was woken before it slept"
    assert not wakeups.sleeper()(0.0), "a wake is for those that are there"


def test_nothing_is_left_of_those_that_nobody_woke() -> None:
    wakeups = Wakeups()
    for _ in range(3):
        assert not wakeups.sleeper()(0.001)
    assert len(wakeups.sleepers) == 0


def test_a_latch_is_waited_for_on_any_thread() -> None:
    latch = Latch()
    assert not latch.wait(0.0)
    found: list[bool] = []
    threads = [Thread(target=lambda: found.append(latch.wait(10.0))) for _ in range(3)]
    for thread in threads:
        thread.start()
    latch.set()
    for thread in threads:
        thread.join(10.0)
    assert found == [True] * 3
    assert latch.is_set()
    assert latch.wait(0.0)
