"""``stagecache top``: what a daemon does, live in a terminal; the same figures as on its status page."""

from __future__ import annotations

import http.client
import json
import socket as sockets
import time
from collections import deque
from pathlib import Path
from typing import Any, Final

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from stagecache.cli.console import out
from stagecache.errors import DaemonUnavailableError
from stagecache_wire.names import RunPaths

Json = dict[str, Any]

HISTORY: Final = 60
_SPARKS: Final = " ▁▂▃▄▅▆▇█"
_ERRORS: Final = 5
NOTHING: Final = "-"


class _UnixConnection(http.client.HTTPConnection):
    """HTTP over the daemon's Unix socket."""

    def __init__(self, path: Path, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


def read_state(socket: Path, timeout_s: float) -> Json:
    """The daemon's state, as its page shows it.

    Raises:
        DaemonUnavailableError: nobody answers there.
    """
    connection = _UnixConnection(RunPaths.of(socket).http_socket, timeout_s)
    try:
        connection.request("GET", "/api/state")
        answer = connection.getresponse()
        body = answer.read()
        if answer.status != http.client.OK:
            raise DaemonUnavailableError(f"stagecached at {socket} answers with status {answer.status}.")
        state: Json = json.loads(body)
        return state
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise DaemonUnavailableError(
            f"no stagecached at {socket}: {getattr(error, 'strerror', None) or error}.",
            remedy=f"Start one with `stagecached --socket {socket}`, as the same user.",
        ) from error
    finally:
        connection.close()


def show_top(socket: Path, *, interval_s: float, once: bool, timeout_s: float, console: Console = out) -> None:
    """Show the state again and again until interrupted; with ``once`` one time, without rates.

    Raises:
        DaemonUnavailableError: nobody answers at the start. Later, the screen says so and goes on asking.
    """
    state = read_state(socket, timeout_s)
    ratios: deque[float | None] = deque(maxlen=HISTORY)
    if once:
        console.print(frame(state, ratios))
        return
    with Live(frame(state, ratios), console=console, screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(interval_s)
            try:
                state = read_state(socket, timeout_s)
                ratios.append(hit_ratio(state["sessions"]))
                live.update(frame(state, ratios), refresh=True)
            except DaemonUnavailableError as error:
                live.update(Panel(Text(str(error)), title="waiting for the daemon", style="red"), refresh=True)


def hit_ratio(sessions: list[Json]) -> float | None:
    """Hit ratio of all sessions over the last seconds; None where nothing was prefilled."""
    hits = sum(session["rates"].get("hit_tokens", 0.0) for session in sessions)
    prefilled = sum(session["rates"].get("prefill_tokens", 0.0) for session in sessions)
    return hits / (hits + prefilled) if hits + prefilled else None


def frame(state: Json, ratios: deque[float | None]) -> RenderableType:
    """Everything as one renderable."""
    parts: list[RenderableType] = [_head(state), Text(), _glance(state, ratios), Text()]
    if state["sessions"]:
        parts += [_sessions(state["sessions"]), Text(), _keys(state)]
    else:
        parts.append(Text("No worker is attached.", style="dim"))
    if state["shared"] is not None and state["shared"]["namespaces"]:
        parts += [Text(), _shared(state["shared"])]
    parts.append(_errors(state))
    return Group(*parts)


def _head(state: Json) -> Text:
    daemon = state["daemon"]
    text = Text()
    text.append(f" stagecached {daemon['version']} ", style="bold white on dark_cyan")
    text.append(f"  {daemon['socket']}  pid {daemon['pid']}  up {age(daemon['uptime_s'])}", style="dim")
    if daemon["url"]:
        text.append(f"  {daemon['url']}", style="cyan")
    return text


def _glance(state: Json, ratios: deque[float | None]) -> Table:
    sessions, daemon = state["sessions"], state["daemon"]
    rate = {
        name: sum(session["rates"].get(name, 0.0) for session in sessions)
        for name in ("steps", "hit_tokens", "prefill_tokens")
    }
    share = daemon["used_bytes"] / daemon["budget_bytes"] if daemon["budget_bytes"] else 0.0
    table = Table.grid(padding=(0, 3))
    table.add_row(
        Text.assemble(("hits ", "dim"), (percent(hit_ratio(sessions)), "bold green"), " ", (spark(ratios), "green")),
        Text.assemble(("from cache ", "dim"), (f"{count(rate['hit_tokens'])} tok/s", "bold")),
        Text.assemble(("prefilled ", "dim"), (f"{count(rate['prefill_tokens'])} tok/s", "bold")),
        Text.assemble(("steps ", "dim"), (f"{count(rate['steps'])}/s", "bold")),
        Text.assemble(
            ("memory ", "dim"), bar(share, 12, "red" if share > 0.95 else "yellow" if share > 0.85 else "cyan"),
            f" {size(daemon['used_bytes'])} of {size(daemon['budget_bytes'])}",
        ),
    )  # fmt: skip
    return table


def _sessions(sessions: list[Json]) -> Table:
    table = Table(title="sessions", title_justify="left", expand=True, box=None, header_style="dim", pad_edge=False)
    for name, justify in (
        ("stage", "left"), ("state", "left"), ("steps/s", "right"), ("hit ratio", "left"), ("from cache", "right"),
        ("time a step", "right"), ("lag p50", "right"), ("p99", "right"), ("waiting", "right"), ("leases", "right"),
        ("memory", "right"),
    ):  # fmt: skip
        table.add_column(name, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    for one in sessions:
        spent, ratio = one["step_s"], one["hit_ratio_1m"]
        table.add_row(
            Text.assemble((f"{one['stage']} #{one['replica']}", "bold"), (f" {one['model']}", "dim")),
            _state_of(one),
            count(one["rates"].get("steps", 0.0)),
            Text.assemble(bar(ratio or 0.0, 10, "green"), f" {percent(ratio)}"),
            f"{count(one['rates'].get('hit_tokens', 0.0))} tok/s",
            seconds(sum(spent.values()) if spent else None),
            seconds(one["lag_s"]["p50"]),
            seconds(one["lag_s"]["p99"]),
            str(one["waiting"]),
            str(one["arena"]["leases"]),
            size(one["memory_bytes"]),
        )
    return table


def _state_of(one: Json) -> Text:
    if not one["live"]:
        return Text("failed", style="bold red")
    if one["away"]:
        return Text("away", style="red")
    if not one["steps"]:
        return Text("attached", style="dim")
    if one["idle_s"] > 5:
        return Text(f"idle {age(one['idle_s'])}", style="dim")
    return Text("working", style="green")


def _keys(state: Json) -> Table:
    found: dict[str, list[float]] = {}
    for session in state["sessions"]:
        for key in session["keys"]:
            entry = found.setdefault(key["name"], [0.0, 0.0, 0.0, 0.0])
            entry[0] += key["pool_bytes"] + key["staging_bytes"] + 8 * session["slots"]
            entry[1] += key["presence"][0]
            entry[2] += session["slots"]
            entry[3] += key["rows_out"]
    used = max(state["daemon"]["used_bytes"], 1)
    table = Table(title="keys", title_justify="left", expand=True, box=None, header_style="dim", pad_edge=False)
    for name, justify in (
        ("key", "left"),
        ("memory", "right"),
        ("of all", "left"),
        ("present", "left"),
        ("read", "right"),
    ):
        table.add_column(name, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    for name, (total, present, slots, read) in sorted(found.items(), key=lambda item: -item[1][0])[:12]:
        filled = present / slots if slots else 0.0
        table.add_row(
            escape(name),
            size(total),
            bar(total / used, 16, "cyan"),
            Text.assemble(bar(filled, 16, "green"), f" {percent(filled)}"),
            f"{count(read)} rows",
        )
    return table


def _shared(shared: Json) -> Table:
    """A line a namespace. Used: blocks with content; taken: blocks whose rows a session took."""
    title = f"shared blocks, {size(shared['used_bytes'])} of {size(shared['limit_bytes'])}"
    table = Table(title=title, title_justify="left", expand=True, box=None, header_style="dim", pad_edge=False)
    for name, justify in (
        ("namespace", "left"), ("sessions", "right"), ("used", "left"), ("held", "right"), ("leases", "right"),
        ("hashes hit", "left"), ("stored", "right"), ("taken", "right"), ("evicted", "right"), ("oldest", "right"),
    ):  # fmt: skip
        table.add_column(name, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    for one in shared["namespaces"]:
        used, ratio = (one["blocks"] - one["free"]) / one["blocks"], one["hit_ratio"]
        table.add_row(
            Text.assemble((one["stage"], "bold"), (f" {one['id']}", "dim")),
            str(one["sessions"]),
            Text.assemble(bar(used, 10, "cyan"), f" of {count(one['blocks'])}"),
            count(one["held"]),
            str(one["leases"]),
            Text.assemble(bar(ratio or 0.0, 10, "green"), f" {percent(ratio)}"),
            count(one["stored"]),
            count(one["filled"]),
            count(one["evicted"]),
            age(one["oldest_s"]),
        )
    return table


def _errors(state: Json) -> RenderableType:
    if not state["errors"]:
        return Text("\nNothing went wrong since this daemon started.", style="green")
    text = Text("\nlast errors\n")
    for entry in state["errors"][:_ERRORS]:
        style = "yellow" if entry["level"] == "warning" else "red"
        text.append(f"{age(state['now'] - entry['at']):>9} ago  ", style="dim")
        text.append(entry["what"], style=f"bold {style}")
        text.append(f" {entry['where']}" if entry["where"] else "")
        text.append(f" ({entry['count']} times)" if entry["count"] > 1 else "")
        text.append(f"\n{'':15}{entry['cure'] or entry['text']}\n", style="default")
    return text


# ---------------------------------------------------------------- numbers for people


def bar(share: float, width: int, style: str) -> Text:
    """A bar of ``width`` cells."""
    filled = round(min(max(share, 0.0), 1.0) * width)
    return Text.assemble(("━" * filled, style), ("╌" * (width - filled), "grey50"))


def spark(values: deque[float | None]) -> str:
    """A line of blocks for shares of 0 to 1."""
    return "".join(" " if value is None else _SPARKS[1 + round(min(value, 1.0) * 7)] for value in values)


def percent(value: float | None) -> str:
    """``83 %``; a dash for nothing."""
    return NOTHING if value is None else f"{100 * value:.0f} %"


def count(value: float) -> str:
    """A number in short: ``12.3 k``."""
    for unit, scale in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= 10 * scale or (unit != "k" and value >= scale):
            return f"{value / scale:.1f} {unit}"
    return f"{value:,.0f}" if value >= 10 or value == int(value) else f"{value:.1f}"


def size(value: float) -> str:
    """Bytes in short: ``1.5 GiB``."""
    for unit, scale in (("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if value >= 1 << scale:
            return f"{value / (1 << scale):.1f} {unit}"
    return f"{value:.0f} B"


def seconds(value: float | None) -> str:
    """``340 µs``, ``1.2 ms``, ``2.0 s``."""
    if value is None:
        return NOTHING
    if value < 1e-3:
        return f"{value * 1e6:.0f} µs"
    return f"{value * 1e3:.1f} ms" if value < 1 else f"{value:.1f} s"


def age(value: float) -> str:
    """``12 s``, ``5 min``, ``3 h 05 min``."""
    whole = max(0, int(value))
    if whole < 60:
        return f"{whole} s"
    return f"{whole // 60} min" if whole < 3600 else f"{whole // 3600} h {whole // 60 % 60:02d} min"
