"""The session beside what is fuzzed: it works on, every row of it is checked, and it is asked for by others."""

from __future__ import annotations

from pathlib import Path

from stagecache.control import connect_observer
from tests.crash.load import Load
from tests.crash.workload import Workload


class Beside:
    """A worker in this process, with rows that it knows. A context."""

    stage = "bystander"

    def __init__(self, socket: Path) -> None:
        self._socket = socket
        self.load = Load(socket, 77, workload=Workload(77, passing_keys=False), stage=self.stage)

    def __enter__(self) -> Beside:
        return self

    def __exit__(self, *error: object) -> None:
        self.load.close()

    def look(self, steps: int = 3) -> None:
        """Some steps, each with all of its rows exact; and the daemon still tells of this session.

        Raises:
            WrongError: a row is not what it must be, or something did not end in time.
        """
        for _ in range(steps):
            self.load.run_step()
        with connect_observer(self._socket, timeout_s=20.0) as observer:
            found = {session.session_id: session for session in observer.stats().sessions}
        session = found[self.load.cache.session.session_id]
        assert (session.state, session.stage) == ("LIVE", self.stage)

    def end(self) -> None:
        """Consume what is open; nothing was lost."""
        self.load.finish()
