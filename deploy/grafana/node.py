"""The dashboard of nodes."""

from __future__ import annotations

from board import BAD, FULL, INSTANCE, NODE, SOURCE, Board, a_step, quantile, rate, ratio
from shared_blocks import shared_blocks


def node() -> Board:
    """Every node at a glance."""
    board = Board(
        "stagecache-node", "stagecache: nodes", "Whether the cache helps, and whether it is well.", [SOURCE, INSTANCE]
    )
    board.row("At a glance")
    board.panel(
        "stat",
        "Hit ratio",
        "Hit tokens of hit and prefilled tokens, over the rate interval.",
        "percentunit",
        (
            f"{rate('stagecache_hit_tokens_total', NODE)} / ({rate('stagecache_queried_tokens_total', NODE)} > 0)",
            "hits",
        ),
        w=4,
        h=5,
        max=1,
    )
    board.panel(
        "stat",
        "Tokens from the cache",
        "Tokens a second whose rows came from the pools.",
        "short",
        (rate("stagecache_hit_tokens_total", NODE), "tokens/s"),
        w=4,
        h=5,
    )
    board.panel(
        "stat",
        "Steps",
        "Steps a second that workers saved.",
        "ops",
        (rate("stagecache_steps_total", NODE), "steps/s"),
        w=4,
        h=5,
    )
    board.panel(
        "stat",
        "Worker time a step",
        "Mean time of begin, save and materialize together.",
        "s",
        (
            a_step(NODE),
            "a step",
        ),
        w=4,
        h=5,
    )
    board.panel(
        "gauge",
        "Memory budget",
        "Shared memory that sessions take, of what they may.",
        "percentunit",
        (f"stagecache_budget_used_bytes{{{NODE}}} / stagecache_budget_bytes{{{NODE}}}", "{{instance}}"),
        w=4,
        h=5,
        max=1,
        steps=FULL,
    )
    board.panel(
        "stat",
        "Failed sessions",
        "Sessions that a bad record ended.",
        "none",
        (f'sum(stagecache_sessions{{{NODE}, state="failed"}})', "failed"),
        w=4,
        h=5,
        steps=BAD,
    )
    board.row("Traffic")
    board.panel(
        "timeseries",
        "Hit ratio by stage",
        "Hit tokens of hit and prefilled tokens.",
        "percentunit",
        (ratio(NODE, "stage"), "{{stage}}"),
        max=1,
    )
    board.panel(
        "timeseries",
        "Tokens a second",
        "Served from the pools, and prefilled because they were not there.",
        "short",
        (rate("stagecache_hit_tokens_total", NODE), "from the cache"),
        (rate("stagecache_prefill_tokens_total", NODE), "prefilled"),
        stack=True,
    )
    board.panel(
        "timeseries",
        "Steps by stage",
        "Steps a second that were saved.",
        "ops",
        (rate("stagecache_steps_total", NODE, "stage"), "{{stage}}"),
    )
    board.panel(
        "timeseries",
        "Bytes by path",
        "Bytes a second of rows on each way: staged by workers, scattered into pools, gathered and merged.",
        "Bps",
        (rate("stagecache_bytes_total", NODE, "path"), "{{path}}"),
    )
    board.panel(
        "timeseries",
        "Worker time a step by stage",
        "Mean time of begin, save and materialize together.",
        "s",
        (
            a_step(NODE, "stage"),
            "{{stage}}",
        ),
    )
    board.panel(
        "timeseries",
        "Record lag, p99",
        "From a record's publication by the worker to its effect in the daemon.",
        "s",
        (quantile(0.99, "stagecache_record_lag_seconds", NODE, "stage"), "{{stage}}"),
    )
    board.row("Memory")
    board.panel(
        "timeseries",
        "Shared memory of sessions",
        "By purpose; the gauge above has it as a share of the budget.",
        "bytes",
        (f"sum by (purpose) (stagecache_memory_bytes{{{NODE}}})", "{{purpose}}"),
        stack=True,
    )
    board.panel(
        "timeseries",
        "/dev/shm",
        "Free bytes, and its size.",
        "bytes",
        (f"stagecache_shm_free_bytes{{{NODE}}}", "free, {{instance}}"),
        (f"stagecache_shm_size_bytes{{{NODE}}}", "size, {{instance}}"),
    )
    board.panel(
        "timeseries",
        "Memory of the daemon",
        "Resident memory; shared are the pools and other segments.",
        "bytes",
        (f"sum by (kind) (stagecache_daemon_memory_bytes{{{NODE}}})", "{{kind}}"),
    )
    shared_blocks(board)
    board.row("Daemon")
    board.panel(
        "timeseries",
        "CPU",
        "Cores that the daemon uses.",
        "short",
        (f'rate(process_cpu_seconds_total{{{NODE}, job=~".*stagecache.*"}}[$__rate_interval])', "{{instance}}"),
    )
    board.panel(
        "timeseries",
        "gRPC calls",
        "Calls a second by method.",
        "ops",
        (rate("stagecache_rpc_seconds_count", NODE, "method"), "{{method}}"),
    )
    board.panel(
        "timeseries",
        "gRPC time, p99",
        "Time of a call in the daemon, by method.",
        "s",
        (quantile(0.99, "stagecache_rpc_seconds", NODE, "method"), "{{method}}"),
    )
    board.panel(
        "timeseries",
        "Event loop lag",
        "How late the loop wakes up: over 10 ms the daemon does not get its cores.",
        "s",
        (quantile(0.5, "stagecache_loop_lag_seconds", NODE), "p50"),
        (quantile(0.99, "stagecache_loop_lag_seconds", NODE), "p99"),
    )
    board.panel(
        "timeseries",
        "Garbage collection",
        "Time a second in pauses of the collector.",
        "percentunit",
        (rate("stagecache_gc_pause_seconds_sum", NODE, "generation"), "generation {{generation}}"),
    )
    board.panel(
        "timeseries",
        "Scrape",
        "Time that the last scrape took in the daemon.",
        "s",
        (f"stagecache_fold_seconds{{{NODE}}}", "{{instance}}"),
    )
    board.panel(
        "table",
        "Sessions",
        "Who is attached.",
        "none",
        (f"stagecache_session_info{{{NODE}}}", "attached"),
        w=24,
        h=7,
    )
    board.panel(
        "table",
        "Daemons",
        "Which release runs where.",
        "none",
        (f"stagecache_build_info{{{NODE}}}", "runs"),
        w=24,
        h=4,
    )
    return board
