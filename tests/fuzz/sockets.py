"""Bytes for the daemon's two raw sockets, the peer's and the one of figures: grown from what they understand."""

from __future__ import annotations

import contextlib
import json
import os
import socket as sockets
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from stagecache_wire.layout import ABI

NUMBERS = (0, -1, 1, 2, 1 << 31, 1 << 63, 1 << 64, 10**400, 1.0, 0.5, 1e308)
TEXTS = ("", "worker", "root", "\ud800", "\0", "x" * 3000, "é", "a" * 16, "0" * 16, "G" * 16, "\x1b[2J")


def question(rng: Random) -> dict[str, Any]:
    """A valid handshake. Roles without a lock file, so that it costs the daemon nothing to keep."""
    return {"abi": ABI, "role": rng.choice(("observer", "scheduler")), "pid": rng.randrange(1 << 22)}


def any_value(rng: Random, depth: int = 0) -> Any:
    how = rng.randrange(7)
    if how == 0:
        return rng.choice(NUMBERS)
    if how == 1:
        return rng.choice(TEXTS)
    if how == 2:
        return rng.choice((None, True, False))
    if how == 3 and depth < 3:
        return [any_value(rng, depth + 1) for _ in range(rng.randint(0, 3))]
    if how == 4 and depth < 3:
        return {rng.choice(TEXTS[:5]): any_value(rng, depth + 1) for _ in range(rng.randint(0, 3))}
    return rng.choice((*NUMBERS, *TEXTS))


def nested(rng: Random) -> str:
    """Brackets in brackets, some as deep as a line allows."""
    depth = rng.choice((10, 300, 900, 980, 1000, 1900))
    left, right = rng.choice((("[", "]"), ('{"a":', "}")))
    depth = min(depth, 3600 // (len(left) + len(right)))
    return left * depth + "0" + right * depth


def peer_line(rng: Random, token: str, session_id: str) -> bytes:
    """A mutated handshake. token, session_id: of a worker, good."""
    ask = question(rng)
    how = rng.randrange(8)
    if how == 0:
        ask |= {"role": "worker", "session_id": session_id, "token": token}
    for _ in range(rng.choice((1, 1, 2, 3))):
        name = rng.choice(("abi", "role", "pid", "session_id", "token", "extra"))
        if rng.random() < 0.15:
            ask.pop(name, None)
        elif name == "role":  # not "worker" by chance: it would get a lock file, for as long as this process lives
            ask[name] = rng.choice(
                (any_value(rng, 3) if how else "worker ", "observer", "scheduler", "root", ["worker"], 7)
            )
        else:
            ask[name] = any_value(rng)
    if ask.get("role") == "worker" and not ask.get("session_id"):
        ask["role"] = "observer"
    text = json.dumps(ask)
    if how == 1:
        text = text.replace(str(ask.get("pid")), nested(rng), 1)
    elif how == 2:
        text = json.dumps({**question(rng), "abi": 0}).replace("0", nested(rng), 1)
    raw = bytearray(text.encode() + b"\n")
    if how == 3:
        for _ in range(rng.randint(1, 5)):
            raw[rng.randrange(len(raw))] = rng.randrange(256)
    elif how == 4:
        del raw[rng.randrange(len(raw)) :]
    elif how == 5:
        raw = bytearray(rng.randbytes(rng.choice((0, 1, 100, 4095, 4096, 4097, 20_000))) + b"\n")
    return bytes(raw)


def http_bytes(rng: Random) -> bytes:
    """A mutated request of the status page."""
    path = rng.choice(("/", "/metrics", "/api/state", "/api/history", "/api/pool", "/healthz", "/nope", "/app.js", "*"))
    query = rng.choice(
        ("", "", "?session=" + rng.choice(TEXTS[:3]), "?session=%00&key=%ff", "?" + "a=1&" * 500, "?key=-1")
    )
    method = rng.choice(("GET", "GET", "HEAD", "POST", "OPTIONS", "get", "", "PRI"))
    version = rng.choice(("HTTP/1.1", "HTTP/1.1", "HTTP/1.0", "HTTP/2.0", "HTTP/1.x", ""))
    host = rng.choice(("localhost", "127.0.0.1:9", "[::1]:9", "evil.example", "", "[", "localhost\r\nhost: x"))
    headers = [
        f"Host: {host}",
        rng.choice(("Connection: close", "Connection: keep-alive", "A", ": b", "X: " + "y" * 5000)),
    ]
    raw = bytearray(
        (f"{method} {path}{query} {version}\r\n" + "\r\n".join(headers) + "\r\n\r\n").encode("latin-1", "replace")
    )
    how = rng.randrange(5)
    if how == 0:
        for _ in range(rng.randint(1, 6)):
            raw[rng.randrange(len(raw))] = rng.randrange(256)
    elif how == 1:
        raw = bytearray(rng.randbytes(rng.choice((0, 1, 500, 20_000))))
    elif how == 2:
        del raw[rng.randrange(len(raw)) :]
    return bytes(raw)


def exchange(path: Path, raw: bytes, rng: Random, timeout_s: float = 20.0) -> bytes:
    """Send bytes, in one piece or in two, perhaps close one half, and read what comes until the other side closes.

    Half of the senders are gone before they have read anything.
    """
    with sockets.socket(sockets.AF_UNIX) as connection:
        connection.settimeout(timeout_s)
        connection.connect(os.fspath(path))
        middle = rng.randrange(len(raw) + 1)
        try:
            connection.sendall(raw[:middle])
            connection.sendall(raw[middle:])
            connection.shutdown(sockets.SHUT_WR)
            if rng.random() < 0.3:
                return b""
            answer = b""
            while chunk := connection.recv(1 << 16):
                answer += chunk
                if len(answer) > 1 << 22 or b"text/event-stream" in answer[:400]:
                    break
            return answer
        except (BrokenPipeError, ConnectionResetError):
            return b""


def crowd(path: Path, count: int, first: Callable[[int], bytes]) -> list[sockets.socket]:
    """Connections that say ``first(index)`` and then nothing: slow ones."""
    made = []
    for index in range(count):
        connection = sockets.socket(sockets.AF_UNIX)
        connection.settimeout(20.0)
        deadline = time.monotonic() + 20.0
        while True:
            try:
                connection.connect(os.fspath(path))
                break
            except BlockingIOError:  # the queue of those that wait to be accepted is full
                assert time.monotonic() < deadline, "the daemon accepts nobody"
                time.sleep(0.005)
        with contextlib.suppress(BrokenPipeError):  # one too many, and closed already
            connection.sendall(first(index))
        made.append(connection)
    return made
