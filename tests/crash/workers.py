"""The other end of ``tests.crash.killworker``: starts workers, and knows what became of them."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from typing import Any

from tests.daemon_process import DaemonProcess


class Workers:
    """Workers of which one lives at a time."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.crash.killworker"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._answer("ready")

    def start(self, daemon: DaemonProcess, **item: Any) -> int:
        """Start one; its process id. With ``tell``, once it is attached."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"socket": str(daemon.socket), **item}) + "\n")
        self._process.stdin.flush()
        pid = int(self._answer("pid")["pid"])
        if item.get("tell"):
            self._answer("attached")
        return pid

    def wait(self) -> float:
        """Wait until it was killed; when that was, by time.monotonic()."""
        answer = self._answer("code")
        assert answer["code"] == -signal.SIGKILL, f"the worker ended with {answer['code']}, it did not die as planned"
        return float(answer["died_at"])

    def result(self) -> dict[str, Any]:
        """What a worker with ``tell`` and ``steps`` did, once it has ended."""
        answer = self._answer("rows", "code")
        assert "rows" in answer, f"the worker ended with {answer['code']}; its error is on stderr"
        ended = self._answer("code")
        assert ended["code"] == 0, f"the worker ended with {ended['code']}"
        return answer

    def _answer(self, *keys: str) -> dict[str, Any]:
        """The next answer that has one of these."""
        assert self._process.stdout is not None
        while True:
            line = self._process.stdout.readline()
            assert line, "the process that starts workers has ended"
            answer: dict[str, Any] = json.loads(line)
            if any(key in answer for key in keys):
                return answer

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(30)
        self._process.stdout.close()
