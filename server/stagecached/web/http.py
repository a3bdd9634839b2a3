"""HTTP/1.1, as much of it as a scraper and a browser need: GET and HEAD, keep-alive, event streams.

Requests are short and trusted no further than that: a request that is too long, too slow or no GET is answered and the
connection closed. Where the server listens on a loopback address only, it answers to loopback names only, so that no
web page can reach it through a name of its own (DNS rebinding).
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Final
from urllib.parse import parse_qsl, unquote, urlsplit

import structlog

MAX_HEAD_BYTES: Final = 16 << 10
MAX_CONNECTIONS: Final = 64
"""Of one socket: who fills the port does not shut out who comes through the Unix socket."""
HEAD_TIMEOUT_S: Final = 10.0
IDLE_TIMEOUT_S: Final = 75.0
SEND_TIMEOUT_S: Final = 20.0

_COMMON_HEADERS: Final = (
    "Cache-Control: no-store\r\n"
    "X-Content-Type-Options: nosniff\r\n"
    "Referrer-Policy: no-referrer\r\n"
    "Content-Security-Policy: default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'\r\n"
)

log = structlog.get_logger()


@dataclass(frozen=True)
class Request:
    """A GET or HEAD. path: decoded; query: last value of each name."""

    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]


@dataclass(frozen=True)
class Response:
    """body: bytes, or an iterator of server-sent events, which lasts until one side goes."""

    body: bytes | AsyncIterator[bytes] = b""
    content_type: str = "text/plain; charset=utf-8"
    status: HTTPStatus = HTTPStatus.OK
    headers: Mapping[str, str] = field(default_factory=dict)


Handler = Callable[[Request], Awaitable[Response]]


class _Bad(Exception):
    """A request that is answered with this status and the end of its connection."""

    def __init__(self, status: HTTPStatus) -> None:
        super().__init__(status.phrase)
        self.status = status


class HttpServer:
    """Serves one handler on any number of sockets, on the event loop."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self._servers: list[asyncio.AbstractServer] = []
        self._connections: list[set[asyncio.Task[None]]] = []

    async def start_tcp(self, address: str, port: int) -> tuple[str, int]:
        """Listen on an address; port 0 takes a free one. Returns what it is bound to.

        Raises:
            OSError: the address or port cannot be had.
        """
        accept = self._acceptor(local=_is_loopback(address))
        server = await asyncio.start_server(accept, address, port, limit=MAX_HEAD_BYTES)
        self._servers.append(server)
        bound = server.sockets[0].getsockname()
        return str(bound[0]), int(bound[1])

    async def start_unix(self, path: Path) -> None:
        """Listen on a Unix socket, at a path where nothing is; who may is the caller's business."""
        accept = self._acceptor(local=False)
        self._servers.append(await asyncio.start_unix_server(accept, str(path), limit=MAX_HEAD_BYTES))

    async def stop(self) -> None:
        """Stop listening and end every connection."""
        for server in self._servers:
            server.close()
        open_ones = [task for tasks in self._connections for task in tasks]
        for task in open_ones:
            task.cancel()
        if open_ones:
            await asyncio.wait(open_ones, timeout=1.0)

    def _acceptor(self, *, local: bool) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], None]:
        """What a listening socket calls for each connection. local: it is bound to a loopback address."""
        tasks: set[asyncio.Task[None]] = set()
        self._connections.append(tasks)

        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if len(tasks) >= MAX_CONNECTIONS:
                writer.close()
                return
            task = asyncio.get_running_loop().create_task(self._serve(reader, writer, local))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

        return accept

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, local: bool) -> None:
        try:
            timeout_s = HEAD_TIMEOUT_S
            while await self._exchange(reader, writer, local, timeout_s):
                timeout_s = IDLE_TIMEOUT_S
        except (OSError, asyncio.TimeoutError, asyncio.IncompleteReadError):
            pass
        except asyncio.CancelledError:
            pass  # the server stops
        except Exception:
            log.exception("HTTP connection failed")
        finally:
            writer.close()

    async def _exchange(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, local: bool, timeout_s: float
    ) -> bool:
        """One request and its answer. Whether the connection stays open."""
        try:
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), timeout_s)
            request = _parse(head, local)
        except asyncio.LimitOverrunError:
            await self._send(writer, None, Response(b"too long\n", status=HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE))
            return False
        except _Bad as bad:
            await self._send(writer, None, Response(f"{bad}\n".encode(), status=bad.status))
            return False
        try:
            response = await self._handler(request)
        except Exception:
            log.exception("HTTP request failed", path=request.path)
            response = Response(b"the daemon's log has the details\n", status=HTTPStatus.INTERNAL_SERVER_ERROR)
        return await self._send(writer, request, response)

    async def _send(self, writer: asyncio.StreamWriter, request: Request | None, response: Response) -> bool:
        body = response.body
        keep = (
            isinstance(body, bytes) and request is not None and request.headers.get("connection", "").lower() != "close"
        )
        lines = [f"HTTP/1.1 {response.status.value} {response.status.phrase}", f"Content-Type: {response.content_type}"]
        if isinstance(body, bytes):
            lines.append(f"Content-Length: {len(body)}")
        lines += [f"{name}: {value}" for name, value in response.headers.items()]
        lines.append(f"Connection: {'keep-alive' if keep else 'close'}")
        writer.write(("\r\n".join(lines) + "\r\n" + _COMMON_HEADERS + "\r\n").encode("latin-1"))
        if request is None or request.method == "GET":
            if isinstance(body, bytes):
                writer.write(body)
            else:
                await self._stream(writer, body)
        await asyncio.wait_for(writer.drain(), SEND_TIMEOUT_S)
        return keep

    @staticmethod
    async def _stream(writer: asyncio.StreamWriter, body: AsyncIterator[bytes]) -> None:
        async with contextlib.aclosing(body) as events:  # type: ignore[type-var]
            async for event in events:
                writer.write(event)
                await asyncio.wait_for(writer.drain(), SEND_TIMEOUT_S)


def _parse(head: bytes, local: bool) -> Request:
    """Raises: _Bad."""
    try:
        first, *rest = head.decode("latin-1").split("\r\n")
        method, target, version = first.split(" ")
        headers = {}
        for line in rest:
            if line:
                name, _, value = line.partition(":")
                headers[name.strip().lower()] = value.strip()
        url = urlsplit(target)
        path, query = unquote(url.path), dict(parse_qsl(url.query))
    except ValueError:
        raise _Bad(HTTPStatus.BAD_REQUEST) from None
    if not version.startswith("HTTP/1."):
        raise _Bad(HTTPStatus.HTTP_VERSION_NOT_SUPPORTED)
    if method not in ("GET", "HEAD"):
        raise _Bad(HTTPStatus.METHOD_NOT_ALLOWED)
    if local and not _is_loopback(_host_name(headers.get("host", ""))):
        raise _Bad(HTTPStatus.MISDIRECTED_REQUEST)
    return Request(method, path, query, headers)


def _host_name(host: str) -> str:
    """The name of a Host header without its port."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


def _is_loopback(name: str) -> bool:
    if name.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
