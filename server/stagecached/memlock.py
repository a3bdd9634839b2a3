"""What the log says where memory may not be locked: how much, which limit, what to do."""

from __future__ import annotations

import structlog

from stagecached.budget import mib
from stagecached.memory_limits import MEMLOCK_REMEDY, memlock_room

log = structlog.get_logger()


def tell_not_locked(what: str, needed_bytes: int, **names: str) -> str:
    """Log that ``what`` ("key is") "not locked in memory": a warning only where there is swap.

    Returns the limit and the remedy, to be put behind the kernel's reason.
    """
    room = memlock_room()
    (log.warning if room.swap else log.info)(
        f"{what} not locked in memory",
        **names,
        needed_mib=mib(needed_bytes),
        rlimit_memlock_mib=mib(room.limit_bytes),
        locked_mib=mib(room.locked_bytes),
        remedy=MEMLOCK_REMEDY,
    )
    return f" (RLIMIT_MEMLOCK of the daemon is {mib(room.limit_bytes)} MiB). {MEMLOCK_REMEDY}"
