"""An engine command in a process apart, so that a crash of native code is told and nothing is left behind.

An engine runs compiled kernels. Where one of them uses an instruction that this CPU lacks, or memory runs out, the
kernel ends the whole process: no exception, no clean-up. So the command's own process keeps the directory and waits.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

from stagecache.cli.console import err, out, show_error
from stagecache.errors import StageCacheError
from stagecache.local_engine import file_tail

ENGINE_LOG: Final = "engine.log"
"""File in the directory to which the engine's stderr goes."""
_PR_SET_PDEATHSIG: Final = 1

_CAUSES: Final = {
    signal.SIGILL: (
        "a kernel of the engine used an instruction that this CPU lacks",
        "Try another --dtype: float32 needs the fewest. `stagecache doctor` says what the engine takes of this CPU.",
    ),
    signal.SIGKILL: ("somebody killed it, most often the kernel for want of memory", "Free memory, or use less."),
    signal.SIGBUS: ("memory that it had mapped could not be given", "Look at the room in /dev/shm and in memory."),
}
_CRASH: Final = ("native code of the engine crashed", "The engine's own log, above, may name the place.")


class EngineCrashedError(StageCacheError):
    """A signal ended the engine; the text says which, what it means, and what the log ends with."""


def run_apart(prefix: str, body: Callable[[Path], int], *, keep: bool = False) -> int:
    """Run ``body(directory)`` in a child process; its status. The directory is temporary, named with the prefix.

    SIGINT, SIGTERM and SIGHUP are passed on, and the child is waited for. It is told to end should this process be
    killed. Call it before threads are started and before the engine is imported.

    Raises:
        EngineCrashedError: a signal ended the child that nobody sent through this process.
    """
    directory = Path(tempfile.mkdtemp(prefix=prefix))
    try:
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        child = os.fork()
        if child == 0:
            os._exit(_run_child(body, directory, parent))
        return _status_of(_wait(child), directory)
    finally:
        if keep:
            out.print(f"Kept in [bold]{directory}[/]: checkpoint, stagecached.log, {ENGINE_LOG}", highlight=False)
        else:
            shutil.rmtree(directory, ignore_errors=True)


def _run_child(body: Callable[[Path], int], directory: Path, parent: int) -> int:
    """The child's life; never raises."""
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:
            return 1
        faulthandler.enable()  # into whatever stderr is at that moment: the engine's log
        return body(directory)
    except StageCacheError as error:
        show_error(error)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 1
    except BaseException:
        err.print_exception()
        return 1
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()


def _wait(child: int) -> int:
    """Exit status of the child, negative for a signal. What interrupts the wait is passed on to the child first."""
    interrupt: BaseException | None = None
    while True:
        try:
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            break
        except KeyboardInterrupt as error:
            interrupt, number = error, int(signal.SIGINT)
        except SystemExit as error:
            interrupt, number = error, int(error.code or 0) - 128
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, number)
    if interrupt is not None:
        raise interrupt
    return code


def _status_of(code: int, directory: Path) -> int:
    if code >= 0:
        return code
    number = signal.Signals(-code)
    means, remedy = _CAUSES.get(number, _CRASH)
    tail = file_tail(directory / ENGINE_LOG)
    raise EngineCrashedError(f"the engine was ended by {number.name}: {means}.\n{tail}".rstrip(), remedy=remedy)
