"""``stagecache status``, ``ping`` and ``reset``: what a running daemon says."""

from __future__ import annotations

import json
import time
from pathlib import Path

from rich.markup import escape
from rich.table import Table

from stagecache.cli.console import out, show_table
from stagecache.control import Observer, ping, stats_to_dict
from stagecache_wire.v1 import stagecache_pb2 as pb


def show_ping(socket: Path, *, timeout_s: float) -> None:
    """Print that the daemon serves, and how long it took to answer; raises where it does not."""
    started = time.perf_counter()
    ping(socket, timeout_s=timeout_s)
    out.print(f"stagecached at {escape(str(socket))} serves ({1e3 * (time.perf_counter() - started):.1f} ms)")


def show_reset(socket: Path, stage: str, *, force: bool, timeout_s: float) -> None:
    """Ask for the reset and print who will see it."""
    with Observer(socket, timeout_s=timeout_s) as daemon:
        answer = daemon.reset(stage, force=force)
    out.print(
        f"stage {escape(stage)}: {answer.sessions} session(s) will forget their rows, "
        f"{answer.schedulers} scheduler(s) were told"
    )


def show_status(socket: Path, *, as_json: bool, timeout_s: float) -> None:
    """Print one snapshot."""
    with Observer(socket, timeout_s=timeout_s) as daemon:
        stats = daemon.stats()
    if as_json:
        print(json.dumps(stats_to_dict(stats), indent=2))
        return
    used = f"{_bytes(stats.budget_used_bytes)} of {_bytes(stats.budget_bytes)}" if stats.budget_bytes else "no budget"
    out.print(
        f"[bold]stagecached {stats.version}[/] at {escape(str(socket))}: up {_duration(stats.uptime_s)}, pools {used}, "
        f"process {_bytes(stats.resident_bytes)}, {stats.schedulers} scheduler(s), boot {stats.boot_id:x}"
    )
    if stats.shared_limit_bytes:
        out.print(_shared_line(stats))
    if not stats.sessions:
        out.print("No sessions: no worker is attached.")
        return
    show_table(_session_table(stats))
    show_table(_key_table(stats))
    for why in _unlocked(stats):
        out.print(why)


def _shared_line(stats: pb.StatsResponse) -> str:
    """Shared blocks in a line; `stagecache index` has the rest."""
    spaces = stats.namespaces
    asked, hit = sum(one.lookup_hashes for one in spaces), sum(one.hit_hashes for one in spaces)
    locked = sum(one.locked for one in spaces)
    stored, blocks = sum(one.num_blocks - one.free for one in spaces), sum(one.num_blocks for one in spaces)
    return (
        f"shared blocks {_bytes(stats.shared_used_bytes)} of {_bytes(stats.shared_limit_bytes)}: "
        f"{len(spaces)} namespace(s), {locked} of them locked in memory, "
        f"{stored:,} of {blocks:,} blocks stored, "
        + (f"{hit / asked:.0%} of {asked:,} hashes hit" if asked else "nothing asked for")
    )


def _session_table(stats: pb.StatsResponse) -> Table:
    table = Table(title="sessions", title_justify="left")
    names = "session stage rank pid state blocks memory pinned steps hits hit-rows lag"
    for name in names.split():
        left = name in ("session", "stage", "state")
        table.add_column(name.replace("-", " "), justify="left" if left else "right")
    for one in stats.sessions:
        state = f"[red]{one.state}: {escape(one.failure)}[/]" if one.failure else one.state
        table.add_row(
            one.session_id[:12],
            f"{escape(one.stage)} ({escape(one.model)})",
            str(one.rank),
            str(one.pid),
            state + (" (adopted)" if one.adopted else ""),
            f"{one.geometry.num_blocks} x {one.geometry.block_size}",
            _bytes(one.bytes),
            _pinned(one),
            f"{one.steps:,}",
            f"{one.hits:,}",
            f"{one.hit_rows:,}" + (f" [red]({one.unknown_rows:,} unknown)[/]" if one.unknown_rows else ""),
            str(one.head - one.consumed),
        )
    return table


def _key_table(stats: pb.StatsResponse) -> Table:
    table = Table(title="keys", title_justify="left")
    for name in ("session", "key", "dtype", "row", "pool", "staging", "written", "read", "present", "locked"):
        table.add_column(name, justify="left" if name in ("session", "key", "dtype", "row", "locked") else "right")
    for session in stats.sessions:
        for key in session.keys:
            table.add_row(
                session.session_id[:12],
                escape(key.key.name),
                key.key.dtype,
                "x".join(map(str, key.key.row_shape)) or "scalar",
                _bytes(key.pool_bytes),
                _bytes(key.staging_bytes),
                f"{key.rows_scattered:,}",
                f"{key.rows_gathered:,}",
                f"{key.present_slots:,}",
                _bytes(key.locked_bytes)
                if key.locked
                else f"[red]{_bytes(key.locked_bytes)}[/] of {_bytes(key.lockable_bytes)}",
            )
    return table


def _unlocked(stats: pb.StatsResponse) -> list[str]:
    """For each reason why memory is not locked: of how many keys, how many bytes."""
    missing: dict[str, list[int]] = {}
    for session in stats.sessions:
        for key in session.keys:
            if not key.locked:
                missing.setdefault(key.unlocked_why, []).append(key.lockable_bytes - key.locked_bytes)
    return [
        f"Not locked in memory: {_bytes(sum(found))} of {len(found)} key(s): {escape(why)}"
        for why, found in missing.items()
    ]


def _pinned(one: pb.SessionStats) -> str:
    """Of the host memory that the worker's device copies into: what is pinned; a dash where there is no device."""
    if one.unpinned_bytes:
        return f"[red]{_bytes(one.unpinned_bytes)} not[/]"
    return _bytes(one.pinned_bytes) if one.pinned_bytes else "-"


def _bytes(count: float) -> str:
    """``12.5 MiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError


def _duration(seconds: float) -> str:
    """``3 h 05 min``, ``4 min 10 s`` or ``12 s``."""
    whole = int(seconds)
    if whole >= 3600:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 60} min {whole % 60:02d} s" if whole >= 60 else f"{whole} s"
