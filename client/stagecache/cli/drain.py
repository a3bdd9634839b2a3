"""``stagecache drain``: stop a daemon as a signal would, and wait until it is gone."""

from __future__ import annotations

import os
import select
import signal
from pathlib import Path
from typing import Annotated

import typer

from stagecache.cli.app import SOCKET, SocketOption, _examples, app
from stagecache.cli.console import out
from stagecache.errors import DaemonUnavailableError, StageCacheError


class DrainError(StageCacheError):
    """The daemon cannot be told to stop, or has not stopped in time; the text says why."""


@app.command(
    epilog=_examples(
        "stagecache drain",
        "stagecache drain --keep-sessions   # then start the new release: workers go on",
    )
)
def drain(
    socket: SocketOption = SOCKET,
    keep_sessions: Annotated[
        bool,
        typer.Option("--keep-sessions", help="Hand over: the next daemon on this socket goes on with the sessions."),
    ] = False,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Wait until it is gone.")] = True,
    timeout: Annotated[float, typer.Option("--timeout", min=0.1, help="Seconds to wait until it is gone.")] = 30.0,
) -> None:
    """Stop a daemon gracefully: logs are worked off, then all shared memory is given back.

    With --keep-sessions it keeps the sessions, for an upgrade: start the next one within two seconds, and no request
    fails. It needs the daemon's user, and its pid namespace: in a container, run it there. Status 1 where none runs.
    """
    from rich.markup import escape

    with _Daemon(socket) as daemon:
        daemon.tell(signal.SIGUSR1 if keep_sessions else signal.SIGTERM)
        what = "keeps its sessions" if keep_sessions else "ends its sessions"
        if not wait:
            out.print(f"stagecached (pid {daemon.pid}) at {escape(str(socket))} was told to stop; it {what}")
            return
        if not daemon.wait_gone(timeout):
            raise DrainError(
                f"stagecached (pid {daemon.pid}) did not stop within {timeout:g} s.",
                remedy="Its log says what it waits for; --drain-timeout-s bounds that.",
            )
    out.print(f"stagecached (pid {daemon.pid}) at {escape(str(socket))} is gone; it {what.replace('s its', 'ed its')}")


class _Daemon:
    """The daemon that holds the lock of a socket, by a pidfd: no other process can be hit.

    Raises:
        DaemonUnavailableError: nobody holds the lock.
        DrainError: who holds it cannot be told from here, or is not this user's to stop.
    """

    def __init__(self, socket: Path) -> None:
        from stagecache.doctor.subject import holder_pid, listener, lock_is_held
        from stagecache_wire.names import RunPaths

        lock = RunPaths.of(socket).lock
        held = lock_is_held(lock)
        if held is False:
            raise DaemonUnavailableError(f"no stagecached runs at {socket}.", remedy="There is nothing to drain.")
        written, (seen, _) = holder_pid(lock), listener(socket)
        if held is None or written is None:
            raise DrainError(
                f"the lock of {socket} cannot be read by uid {os.geteuid()}.", remedy="Run this as the daemon's user."
            )
        if seen != written and not _is_daemon(written):
            raise DrainError(
                f"the daemon of {socket} has pid {written} in its own container, and cannot be seen from here.",
                remedy="Run this in the daemon's container, or send it SIGTERM (SIGUSR1 keeps the sessions).",
            )
        self.pid = written
        self._pidfd = os.pidfd_open(self.pid)
        if lock_is_held(lock) is False:
            os.close(self._pidfd)
            raise DaemonUnavailableError(f"the stagecached at {socket} has just stopped.")

    def __enter__(self) -> _Daemon:
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._pidfd)

    def tell(self, number: signal.Signals) -> None:
        try:
            signal.pidfd_send_signal(self._pidfd, number)
        except PermissionError as error:
            raise DrainError(
                f"uid {os.geteuid()} may not stop the daemon (pid {self.pid}).", remedy="Run this as its user."
            ) from error

    def wait_gone(self, timeout_s: float) -> bool:
        """Whether its process ended within ``timeout_s`` seconds."""
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        return bool(poll.poll(1000 * timeout_s))


def _is_daemon(pid: int) -> bool:
    """Whether a process here looks like a daemon: for the moment in which it holds its lock and does not listen yet."""
    try:
        return b"stagecached" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
