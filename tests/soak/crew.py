"""The other end of ``tests.soak.hands``: gives orders, and knows what the workers told."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from tests.daemon_process import poll_until

STOP_S = 90.0


class Crew:
    """Workers by name. A context: they are all gone at its end.

    Attributes:
        pids: of those that live. told: the last figures of each. codes: exit statuses of those that ended.
        wrong: what workers found that must not be.
    """

    def __init__(self) -> None:
        self.pids: dict[str, int] = {}
        self.told: dict[str, dict[str, int]] = {}
        self.codes: dict[str, int] = {}
        self.wrong: list[str] = []
        self._ready = False
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.soak.hands"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Crew:
        poll_until(lambda: self._ready, "the process that starts workers", 60.0)
        return self

    def __exit__(self, *error: object) -> None:
        self.end()

    def start(self, socket: Path, name: str, kind: str, **order: Any) -> None:
        """Start a worker; see ``tests.soak.hands``."""
        self.told.pop(name, None)
        self.codes.pop(name, None)
        self._order({"start": name, "kind": kind, "socket": str(socket), **order})

    def stop(self) -> None:
        """Ask all workers to finish what they have open and to detach, and wait until they are gone."""
        for name in list(self.pids):
            self._order({"stop": name})
        poll_until(lambda: not self.pids, "the workers to end", STOP_S)

    def steps(self, name: str) -> int:
        """Steps that a worker has told of."""
        return self.told.get(name, {}).get("steps", 0)

    def end(self) -> None:
        """End the process that starts workers, and all of them."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            raise AssertionError(f"workers did not end within {STOP_S:g} s: {sorted(self.pids)}") from None
        self._reader.join(STOP_S)

    def _order(self, order: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        self._process.stdin.flush()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            event = json.loads(line)
            name = event.pop("name")
            if "ready" in event:
                self._ready = True
            elif "pid" in event:
                self.pids[name] = event["pid"]
            elif "wrong" in event:
                self.wrong.append(f"{name}: {event['wrong']}")
            elif "code" in event:
                self.pids.pop(name, None)
                self.codes[name] = event["code"]
            else:
                self.told[name] = event
        self._process.stdout.close()
