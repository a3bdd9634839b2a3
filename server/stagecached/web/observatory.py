"""Everything by which a daemon is seen, as one part of it: figures, HTTP, and the journal that listens to the log."""

from __future__ import annotations

from pathlib import Path

import structlog

from stagecached import logs
from stagecached.access import Access
from stagecached.metrics.calls import CallTimer
from stagecached.metrics.journal import Journal
from stagecached.metrics.monitor import Monitor
from stagecached.ownership import StartError
from stagecached.sessions import SessionManager
from stagecached.web.http import HttpServer
from stagecached.web.site import Site

log = structlog.get_logger()


class Observatory:
    """Made before the daemon adopts anything, so that no event is missed. On the event loop."""

    def __init__(self, manager: SessionManager, socket: Path) -> None:
        self._journal = Journal()
        logs.listen(self._journal.log_processor)
        self.monitor = Monitor(manager, self._journal)
        self._site = Site(self.monitor, manager, str(socket))
        self._http = HttpServer(self._site)
        self._unix: Path | None = None

    def call_timer(self) -> CallTimer:
        """Times calls; stands before all else."""
        return self.monitor.call_timer()

    async def start(self, unix: Path, access: Access, address: str, port: int | None) -> None:
        """Answer on the Unix socket, and on TCP where a port is given; not yet as serving.

        Raises:
            StartError: the address or port cannot be had.
        """
        self._unix = unix
        self._remove_socket()  # a dead daemon's: the run directory is ours
        await self._http.start_unix(unix)
        access.open_file(unix)
        if port is not None:
            try:
                host, bound = await self._http.start_tcp(address, port)
            except OSError as error:
                self._remove_socket()
                raise StartError(
                    f"metrics cannot be served at {address}, port {port}: {error.strerror}. Choose another "
                    "--metrics-port or --metrics-address."
                ) from error
            self._site.url = f"http://[{host}]:{bound}/" if ":" in host else f"http://{host}:{bound}/"
            log.info("metrics and status page", url=self._site.url)
        self.monitor.start()

    def serving(self, yes: bool, why: str = "") -> None:
        """What /healthz says; ``why`` not, where there is more to say than that it starts or stops."""
        self._site.serving = yes
        self._site.why = why

    async def stop(self) -> None:
        """End every connection; remove the Unix socket."""
        self.monitor.stop()
        await self._http.stop()
        logs.unlisten(self._journal.log_processor)
        self._remove_socket()

    def _remove_socket(self) -> None:
        if self._unix is not None:
            self._unix.unlink(missing_ok=True)
