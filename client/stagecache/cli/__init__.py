"""The ``stagecache`` command. Heavy packages are imported by the commands that need them, when they run."""

from __future__ import annotations

import sys

from stagecache.cli import doctor, drain, index, plan  # noqa: F401  each registers its command
from stagecache.cli.app import app
from stagecache.cli.console import show_error
from stagecache.errors import StageCacheError
from stagecache.local_engine import Interrupts

__all__ = ["app", "main"]

EXIT_INTERRUPTED = 130


def main() -> None:
    """Run the command line; errors of the cache are shown as text, with the remedy, and end with status 1.

    Ctrl-C and SIGTERM unwind, so that no command leaves a daemon, a directory or a changed terminal behind; the status
    is then 130 or 143.
    """
    try:
        with Interrupts():
            app()
    except StageCacheError as error:
        show_error(error)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
