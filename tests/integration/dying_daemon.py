"""A daemon that kills itself where its shared blocks come to a point: ``python dying_daemon.py POINT ARGUMENTS``."""

import os
import signal
import sys

from stagecached import config, daemon, logs
from stagecached.shared.store import NamespaceStore

POINT = sys.argv[1]


class Dying(NamespaceStore):
    def point(self, name: str) -> None:
        if name == POINT:
            os.kill(os.getpid(), signal.SIGKILL)


settings = config.load(sys.argv[2:])
logs.configure(settings.log_format, settings.log_level)
daemon.run(settings, make_store=Dying)
