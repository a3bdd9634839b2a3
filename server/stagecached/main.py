"""Command line of the daemon: ``stagecached --socket PATH``.

Exit status: 0 after a stop that was asked for, 2 for settings that cannot be used, 3 where it cannot start here, 4
where it was stuck (``stagecached.watchdog``), 1 for anything else.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import sys
from collections.abc import Sequence

M_MMAP_THRESHOLD = -3
"""Of malloc.h."""

EXIT_BAD_SETTINGS = 2
EXIT_CANNOT_START = 3


def main(argv: Sequence[str] | None = None) -> int:
    """Run a daemon until it is told to stop; returns the exit status."""
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy only copies here: no threads for a BLAS never called
    _give_memory_back()
    _raise_file_limit()
    _import_structlog_alone()
    from stagecached.config import ConfigError, load

    try:
        settings = load(argv)
    except ConfigError as error:
        print(f"stagecached: {error}", file=sys.stderr)
        return EXIT_BAD_SETTINGS
    from stagecached import logs

    logs.configure(settings.log_format, settings.log_level)
    from stagecached.daemon import run
    from stagecached.ownership import StartError

    try:
        run(settings)
    except StartError as error:
        print(f"stagecached: {error}", file=sys.stderr)
        return EXIT_CANNOT_START
    return 0


def _give_memory_back() -> None:
    """Have glibc return every block of 1 MiB and more to the kernel when it is freed. By itself it raises that limit to
    the largest block that it ever saw, up to 32 MiB, and keeps such blocks in an arena a thread: a daemon that once
    looked at a large pool or was sent a large message stayed that large (seen: 57 MiB instead of 44).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, 1 << 20)


def _raise_file_limit() -> None:
    """Take all descriptors that the hard limit allows: each session maps three segments, and each of its keys three."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _import_structlog_alone() -> None:
    """Import structlog without rich, which it takes for tracebacks that a daemon does not print: measured, 80 of 600 ms
    of the start, and 5 MiB.
    """
    if "structlog" in sys.modules or "rich" in sys.modules:
        return
    sys.modules["rich"] = None  # type: ignore[assignment]  # the documented way to make an import fail
    try:
        import structlog  # noqa: F401
    finally:
        del sys.modules["rich"]


if __name__ == "__main__":
    sys.exit(main())
