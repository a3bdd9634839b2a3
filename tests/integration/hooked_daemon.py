"""The real daemon with hooks that only tests have: ``python -m tests.integration.hooked_daemon ARGUMENTS``.

STUCK_AT, STUCK_WHILE    a consumer, or a copy into a shared block, that reaches this point waits there for as long as
                         this file exists
SIGRTMIN                 the event loop stands still for as long as that file exists
DAEMON_ABI               the shared-memory ABI of this daemon
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

if "DAEMON_ABI" in os.environ:
    from stagecache_wire import layout

    layout.ABI = int(os.environ["DAEMON_ABI"])

from stagecached import config, logs
from stagecached import main as program
from stagecached.consumer import Consumer
from stagecached.shared.store import NamespaceStore


def wait_while(path: Path) -> None:
    while path.exists():
        time.sleep(0.01)


def stuck_at(name: str) -> None:
    if name == os.environ.get("STUCK_AT"):
        wait_while(Path(os.environ["STUCK_WHILE"]))


class HookedConsumer(Consumer):
    def _point(self, name: str) -> None:
        stuck_at(name)


class HookedStore(NamespaceStore):
    def point(self, name: str) -> None:
        stuck_at(name)


def main() -> None:
    from stagecached import daemon
    from stagecached.ownership import StartError

    settings = config.load(sys.argv[1:])
    logs.configure(settings.log_format, settings.log_level)
    if "STUCK_WHILE" in os.environ:
        signal.signal(signal.SIGRTMIN, lambda *_: wait_while(Path(os.environ["STUCK_WHILE"])))
    try:
        daemon.run(settings, HookedConsumer, HookedStore)
    except StartError as error:
        print(error, file=sys.stderr)
        sys.exit(program.EXIT_CANNOT_START)


if __name__ == "__main__":
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    main()
