"""Locks that say who lives: the kernel gives them back, a fork does not keep them."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from stagecache_wire.locks import LifeLock, LockHeldError, is_held
from tests.daemon_process import poll_until

HOLD = """
import sys
from pathlib import Path
from stagecache_wire.locks import LifeLock
lock = LifeLock(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "a.lock"


def holder(path: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def bury(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        assert stream is not None
        stream.close()


def test_a_held_lock_is_refused_and_seen(path: Path) -> None:
    lock = LifeLock(path)
    assert is_held(path)
    with pytest.raises(LockHeldError, match=path.name):
        LifeLock(path)
    lock.release()
    assert not is_held(path)
    LifeLock(path).release(unlink=True)
    assert not path.exists()


def test_a_killed_process_gives_its_lock_back(path: Path) -> None:
    process = holder(path)
    try:
        assert is_held(path)
        with pytest.raises(LockHeldError):
            LifeLock(path)
    finally:
        bury(process)
    assert not is_held(path)
    LifeLock(path).release()


def test_asking_takes_nothing(path: Path) -> None:
    """Many who ask are in nobody's way: a daemon that starts meanwhile gets its lock."""
    LifeLock(path).release()
    stop = threading.Event()

    def ask() -> None:
        while not stop.is_set():
            is_held(path)

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(300):
            LifeLock(path).release()
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_a_missing_file_is_not_held_and_not_made(path: Path) -> None:
    assert not is_held(path)
    assert not path.exists()
    with pytest.raises(FileNotFoundError):
        LifeLock(path, create=False)


def test_a_forked_child_does_not_keep_its_parents_lock(path: Path) -> None:
    lock = LifeLock(path)
    to_child, from_parent = os.pipe()
    to_parent, from_child = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(from_child, b".")
        select.select([to_child], [], [], 30.0)
        os._exit(0)
    try:
        os.read(to_parent, 1)
        lock.release()
        assert not is_held(path), "the child still holds it"
        LifeLock(path).release()
    finally:
        os.write(from_parent, b".")
        os.waitpid(child, 0)
        for fd in (to_child, from_parent, to_parent, from_child):
            os.close(fd)


def test_a_started_program_does_not_inherit_it(path: Path) -> None:
    lock = LifeLock(path)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, close_fds=False) as program:
        lock.release()
        poll_until(lambda: not is_held(path), "the program to be without the lock")
        program.communicate(b"\n")


def test_a_file_that_was_replaced_guards_nothing(path: Path) -> None:
    """A lock on an unlinked file is not taken for the lock of the file that is there now."""
    first = LifeLock(path)
    path.unlink()
    second = LifeLock(path)
    assert is_held(path)
    first.release()
    assert is_held(path)
    second.release()


def test_a_wait_for_a_lock_ends_with_its_holder_or_in_time(path: Path) -> None:
    lock = LifeLock(path)
    started = time.monotonic()
    with pytest.raises(LockHeldError):
        LifeLock.wait(path, 0.05)
    assert time.monotonic() - started >= 0.05
    threading.Timer(0.05, lock.release).start()
    LifeLock.wait(path, 10.0).release()


def test_release_may_be_repeated(path: Path) -> None:
    lock = LifeLock(path)
    lock.release()
    other = LifeLock(path)
    lock.release()
    lock.release(unlink=True)
    assert is_held(path)
    other.release()
