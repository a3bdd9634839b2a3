"""The dashboard of what goes wrong."""

from __future__ import annotations

from board import BAD, NODE, STAGE, STAGES, Board, rate

NO_REASON = 'label_replace(vector(0), "reason", "none", "", "")'
"""A zero where no reason has counted anything, so that the panel does not look broken."""


def reliability() -> Board:
    """What goes wrong, and how often."""
    board = Board("stagecache-reliability", "stagecache: reliability", "What goes wrong, how often, and why.", STAGES)
    board.row("Now")
    board.panel(
        "stat",
        "Daemons up",
        "Daemons that answer scrapes.",
        "none",
        (f'sum(up{{{NODE}, job=~".*stagecache.*"}})', "up"),
        w=4,
        h=5,
    )
    board.panel(
        "stat",
        "Sessions",
        "Live sessions.",
        "none",
        (f'sum(stagecache_sessions{{{NODE}, state="live"}})', "live"),
        w=4,
        h=5,
    )
    board.panel(
        "stat",
        "Failed sessions",
        "Sessions that a bad record ended.",
        "none",
        (f"sum(1 - stagecache_session_live{{{STAGE}}})", "failed"),
        w=4,
        h=5,
        steps=BAD,
    )
    board.panel(
        "stat",
        "Workers away",
        "Workers that take the daemon for gone.",
        "none",
        (f"sum(stagecache_worker_away{{{STAGE}}})", "away"),
        w=4,
        h=5,
        steps=BAD,
    )
    board.panel(
        "stat",
        "Oldest record",
        "How long the oldest record has waited.",
        "s",
        (f"max(stagecache_log_oldest_seconds{{{STAGE}}})", "oldest"),
        w=4,
        h=5,
        steps=[(None, "green"), (1, "orange"), (2, "red")],
    )
    board.panel(
        "stat",
        "Scheduler-side shims",
        "Shims that watch for resets.",
        "none",
        (f"sum(stagecache_schedulers{{{NODE}}})", "shims"),
        w=4,
        h=5,
    )
    board.row("Requests that fail")
    board.panel(
        "timeseries",
        "Failed merges",
        "Materialize calls a second that raised, by reason.",
        "ops",
        (rate("stagecache_failed_merges_total", STAGE, "reason"), "{{reason}}"),
    )
    board.panel(
        "timeseries",
        "Refused saves",
        "Saves a second that gave no step id, by reason.",
        "ops",
        (rate("stagecache_refused_saves_total", STAGE, "reason"), "{{reason}}"),
    )
    board.panel(
        "timeseries",
        "Rows not kept",
        "Times a second that rows of a key were not kept, by reason.",
        "ops",
        (rate("stagecache_failed_writes_total", STAGE, "reason"), "{{reason}}"),
    )
    board.panel(
        "timeseries",
        "Rows of hits that were not there",
        "Gathered rows a second that were UNKNOWN.",
        "ops",
        (rate("stagecache_unknown_rows_total", STAGE, "stage"), "{{stage}}"),
    )
    board.panel(
        "timeseries",
        "Lost and local steps",
        "Steps a second whose slots became UNKNOWN, and steps that were not logged.",
        "ops",
        (rate("stagecache_lost_steps_total", STAGE), "lost"),
        (rate("stagecache_local_steps_total", STAGE), "local"),
    )
    board.panel(
        "timeseries",
        "Steps consumed",
        "Steps a second that were handed out or given up.",
        "ops",
        (rate("stagecache_steps_consumed_total", STAGE, "outcome"), "{{outcome}}"),
    )
    board.row("Outages and resets")
    board.panel(
        "timeseries",
        "Uptime",
        "Since each daemon started.",
        "s",
        (f"time() - stagecache_start_time_seconds{{{NODE}}}", "{{instance}}"),
    )
    board.panel(
        "timeseries",
        "Session events",
        "Attached, adopted, failed, detached, died: events in five minutes.",
        "short",
        (f"sum by (event) (increase(stagecache_session_events_total{{{NODE}}}[5m]))", "{{event}}"),
    )
    board.panel(
        "timeseries",
        "Reconnects and calls of workers",
        "Times a second that workers found the daemon again, and gRPC calls that they made.",
        "ops",
        (rate("stagecache_reconnects_total", STAGE), "reconnects"),
        (rate("stagecache_worker_calls_total", STAGE), "calls"),
    )
    board.panel(
        "timeseries",
        "Resets",
        "New epochs in five minutes.",
        "short",
        (f"sum by (stage) (increase(stagecache_resets_total{{{STAGE}}}[5m]))", "{{stage}}"),
    )
    board.panel(
        "timeseries",
        "Epoch",
        "Epoch of each session.",
        "short",
        (f"stagecache_epoch{{{STAGE}}}", "{{stage}} #{{replica}}"),
    )
    board.panel(
        "timeseries",
        "Idle workers",
        "Since each worker's last step.",
        "s",
        (f"stagecache_worker_idle_seconds{{{STAGE}}}", "{{stage}} #{{replica}}"),
    )
    board.row("The daemon says no")
    board.panel(
        "timeseries",
        "Refused calls",
        "gRPC calls a second that were refused, by reason.",
        "ops",
        (f"({rate('stagecache_rpc_refused_total', NODE, 'reason')} > 0) or on() {NO_REASON}", "{{reason}}"),
    )
    board.panel(
        "timeseries",
        "Log lines",
        "Lines a second that report trouble.",
        "ops",
        (rate("stagecache_log_lines_total", NODE, "level"), "{{level}}"),
    )
    board.panel(
        "timeseries",
        "Memory left",
        "Budget that is not used, and what /dev/shm has free.",
        "bytes",
        (f"stagecache_budget_bytes{{{NODE}}} - stagecache_budget_used_bytes{{{NODE}}}", "budget"),
        (f"stagecache_shm_free_bytes{{{NODE}}}", "/dev/shm"),
    )
    board.panel(
        "table",
        "Slots mirrored",
        "Token slots of each session.",
        "short",
        (f"stagecache_slots{{{STAGE}}}", "slots"),
        w=24,
        h=6,
    )
    return board
