"""What is served where: figures for machines, the page for people.

/              the page              /metrics            for Prometheus
/static/NAME   its files             /healthz            200 while the daemon serves, 503 else
/events        live state (SSE)      /api/state, /api/history, /api/pool
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from http import HTTPStatus
from importlib.resources import files
from typing import Any, Final

from stagecached.metrics.monitor import Monitor
from stagecached.metrics.survey import pool_map
from stagecached.metrics.text import CONTENT_TYPE
from stagecached.refusal import Refusal
from stagecached.session import Session, State
from stagecached.sessions import SessionManager
from stagecached.web import state
from stagecached.web.http import Request, Response

MAX_STREAMS: Final = 24
SURVEY_S: Final = 0.004
"""Time a second that open pages may have spent on presence counts."""

_TYPES: Final = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}


class Site:
    """Answers requests. On the event loop; what reads tables runs in threads."""

    def __init__(self, monitor: Monitor, manager: SessionManager, socket: str) -> None:
        self.serving = False
        self.why = ""
        """Why it does not serve, where something is stuck."""
        self.url = ""
        """Where the page is, if it listens on TCP."""
        self._monitor = monitor
        self._manager = manager
        self._socket = socket
        self._static = files("stagecached.web") / "static"
        self._streams = 0
        self._beat = asyncio.Event()
        monitor.on_tick.append(self._tick)

    async def __call__(self, request: Request) -> Response:
        path = request.path
        if path == "/metrics":
            return Response((await self._monitor.exposition()).encode(), CONTENT_TYPE)
        if path == "/healthz":
            status = HTTPStatus.OK if self.serving else HTTPStatus.SERVICE_UNAVAILABLE
            said = "ok" if self.serving else f"not serving: {self.why}" if self.why else "not serving"
            return Response(f"{said}\n".encode(), status=status)
        if path == "/":
            return self._file("index.html")
        if path.startswith("/static/"):
            return self._file(path.removeprefix("/static/"))
        if path == "/api/state":
            return _json(await self._state(request.query.get("session", "")))
        if path == "/api/history":
            return self._history(request.query.get("session", ""))
        if path == "/api/pool":
            return await self._pool(request.query)
        if path == "/events":
            return self._events(request.query.get("session", ""))
        return _not_found()

    def _file(self, name: str) -> Response:
        kind = _TYPES.get(name.rpartition(".")[2])
        if kind is None or "/" in name or name.startswith("."):
            return _not_found()
        try:
            return Response((self._static / name).read_bytes(), f"{kind}; charset=utf-8")
        except OSError:
            return _not_found()

    def _tick(self) -> None:
        self._beat.set()
        self._beat = asyncio.Event()

    async def _state(self, selected: str) -> dict[str, Any]:
        monitor = self._monitor
        folds = await monitor.surveyed(SURVEY_S)
        tracks = monitor.history.tracks
        found: dict[str, Any] = {
            "now": time.time(),
            "daemon": state.daemon_state(self._manager, self._socket, self.url, monitor.started_unix_s),
            "sessions": [state.session_state(fold, tracks.get(fold.session_id)) for fold in folds],
            "shared": monitor.index.state() if monitor.index is not None else None,
            "errors": state.errors_state(monitor.journal.newest()),
        }
        session = self._session(selected)
        if session is not None:
            found["timeline"] = state.timeline_state(list(session.consumer.figures.recent), time.monotonic_ns())
        return found

    def _history(self, selected: str) -> Response:
        tracks = self._monitor.history.tracks
        if not selected:
            return _json(state.history_state(list(tracks.values())))
        track = tracks.get(selected)
        return _not_found() if track is None else _json(state.history_state([track]))

    async def _pool(self, query: Any) -> Response:
        session, key = self._session(query.get("session", "")), query.get("key", "")
        store = None if session is None or not key.isdigit() else session.segments.keys.get(int(key))
        if session is None or store is None:
            return _not_found()
        segments = session.segments
        with session.in_use():
            found = await self._manager.background.in_thread(lambda: pool_map(store, segments))
        track = self._monitor.history.tracks.get(session.session_id)
        return _json(state.pool_state(found, track, time.monotonic()))

    def _events(self, selected: str) -> Response:
        if self._streams >= MAX_STREAMS:
            return Response(b"too many pages are open\n", status=HTTPStatus.SERVICE_UNAVAILABLE)
        return Response(self._stream(selected), "text/event-stream; charset=utf-8")

    async def _stream(self, selected: str) -> AsyncIterator[bytes]:
        self._streams += 1
        try:
            yield b"retry: 2000\n\n"
            while True:
                beat = self._beat
                yield b"data: " + _dump(await self._state(selected)) + b"\n\n"
                await beat.wait()
        finally:
            self._streams -= 1

    def _session(self, session_id: str) -> Session | None:
        try:
            session = self._manager.get(session_id)
        except Refusal:
            return None
        return None if session.state is State.ENDED else session


def _dump(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


def _json(value: object) -> Response:
    return Response(_dump(value), "application/json")


def _not_found() -> Response:
    return Response(b"not found\n", status=HTTPStatus.NOT_FOUND)
