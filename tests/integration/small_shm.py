"""A node with a /dev/shm of 64 MiB, in a mount namespace of its own: ``python -m tests.integration.small_shm FOLDER``.

Everything in here is an assertion; what was seen goes to stdout for the test that started it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from stagecache.errors import BudgetError
from stagecache_wire import shm
from stagecache_wire.geometry import KeySchema
from tests.crash.by_hand import read, save
from tests.crash.load import Load
from tests.crash.workload import Part, Workload
from tests.daemon_process import DaemonProcess
from tests.integration.helpers import MIB, worker
from tests.integration.worker_process import attach_request, key


def refusal(call: Callable[[], object]) -> BudgetError:
    """What a call is refused with: needed, free and a remedy."""
    with pytest.raises(BudgetError, match="/dev/shm has") as caught:
        call()
    error = caught.value
    assert error.reason == "SHM_FULL", error
    assert int(error.facts["needed_bytes"]) > int(error.facts["shm_free_bytes"]), error
    assert "remount" in error.remedy, error
    return error


def fill() -> Path:
    """Somebody else takes every page that is left."""
    path = Path("/dev/shm/somebody-elses")
    with path.open("wb") as file:
        size = 0
        for piece in (MIB, 4096):
            try:
                while True:
                    os.posix_fallocate(file.fileno(), size, piece)
                    size += piece
            except OSError:
                pass
    assert shm.free_bytes() == 0
    return path


def steps(load: Load, count: int) -> None:
    for _ in range(count):
        load.run_step()


def main(folder: Path) -> None:
    assert os.statvfs("/dev/shm").f_blocks * os.statvfs("/dev/shm").f_frsize == 64 * MIB
    daemon = DaemonProcess(folder, "--memory-budget", "1GiB")
    daemon.start()
    with worker(daemon.socket) as rpc:
        print(refusal(lambda: rpc.attach(attach_request("large", 1 << 18, key()), 20.0)))
    load = Load(
        daemon.socket, 5, workload=Workload(5, resets=0.0, passing_keys=False), extra_blocks=8, daemon_grace_s=60.0
    )
    steps(load, 20)
    filled = fill()
    pid = daemon.pid
    steps(load, 40)
    print(refusal(lambda: load.cache.session.open_key(KeySchema("wide", "float32", (64,)))))
    with worker(daemon.socket) as rpc:
        print(refusal(lambda: rpc.attach(attach_request("late", 1024, key()), 20.0)))
    assert daemon.pid == pid
    daemon.restart()
    steps(load, 20)
    filled.unlink()
    step = save(load, [Part("own", [20, 21], 0, 5)])
    assert len(read(load, step, "own")) == 5
    load.cache.session.open_key(KeySchema("wide", "float32", (64,)))
    steps(load, 20)
    load.finish()
    assert load.cache.counters.renewals == 0
    load.close()
    daemon.close()
    print("done")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
