"""The dashboard of one stage."""

from __future__ import annotations

from board import STAGE, STAGES, Board, mean, quantile, rate, ratio


def stage() -> Board:
    """One stage, or one worker of it."""
    present = f'sum by (key) (stagecache_key_slots{{{STAGE}, presence="present"}})'
    board = Board(
        "stagecache-stage", "stagecache: stage", "What one stage does, and where its time and memory go.", STAGES
    )
    board.row("Hits")
    board.panel(
        "timeseries",
        "Hit ratio",
        "Hit tokens of hit and prefilled tokens, by worker.",
        "percentunit",
        (ratio(STAGE, "stage, replica"), "{{stage}} #{{replica}}"),
        max=1,
    )
    board.panel(
        "timeseries",
        "Tokens a second",
        "From the pools, prefilled, and decoded.",
        "short",
        (rate("stagecache_hit_tokens_total", STAGE), "from the cache"),
        (rate("stagecache_prefill_tokens_total", STAGE), "prefilled"),
        (
            f"{rate('stagecache_computed_tokens_total', STAGE)} - {rate('stagecache_prefill_tokens_total', STAGE)}",
            "decoded",
        ),
        stack=True,
    )
    board.panel(
        "timeseries",
        "Requests that hit",
        "Requests a second that came with a hit span, and gathered spans (some are gathered twice).",
        "ops",
        (rate("stagecache_hit_requests_total", STAGE), "requests"),
        (rate("stagecache_gathered_spans_total", STAGE), "spans"),
    )
    board.row("Time")
    board.panel(
        "timeseries",
        "Worker time a step",
        "Mean of each call of a step.",
        "s",
        (
            mean("stagecache_engine_phase_seconds", STAGE, "phase"),
            "{{phase}}",
        ),
        stack=True,
    )
    board.panel(
        "timeseries",
        "Worker time, p99",
        "One call in a hundred takes longer.",
        "s",
        (quantile(0.99, "stagecache_engine_phase_seconds", STAGE, "phase"), "{{phase}}"),
    )
    board.panel(
        "timeseries",
        "Waits",
        "Share of the time that the worker waits, by what for.",
        "percentunit",
        (rate("stagecache_wait_seconds_total", STAGE, "what"), "{{what}}"),
    )
    board.panel(
        "timeseries",
        "Waits a second",
        "How often the worker had to wait.",
        "ops",
        (rate("stagecache_waits_total", STAGE, "what"), "{{what}}"),
    )
    board.panel(
        "timeseries",
        "Record lag",
        "From a record's publication to its effect.",
        "s",
        (quantile(0.5, "stagecache_record_lag_seconds", STAGE), "p50"),
        (quantile(0.99, "stagecache_record_lag_seconds", STAGE), "p99"),
    )
    board.panel(
        "timeseries",
        "Copies in the daemon, p99",
        "Scatter of a SAVE or FLUSH into pools, gathers of a record.",
        "s",
        (quantile(0.99, "stagecache_scatter_seconds", STAGE), "scatter"),
        (quantile(0.99, "stagecache_gather_seconds", STAGE), "gather"),
    )
    board.panel(
        "timeseries",
        "Consumer",
        "Share of a core that the session's consumer works.",
        "percentunit",
        (rate("stagecache_consumer_seconds_total", STAGE, "stage, replica"), "{{stage}} #{{replica}}"),
    )
    board.panel(
        "timeseries",
        "Log",
        "Records that wait for the daemon, and steps that nobody consumed.",
        "short",
        (f"sum(stagecache_log_depth{{{STAGE}}})", "records waiting"),
        (f"sum(stagecache_unconsumed_steps{{{STAGE}}})", "steps unconsumed"),
        (f"sum(stagecache_staging_pages{{{STAGE}}})", "staging pages"),
    )
    board.panel(
        "timeseries",
        "Records",
        "Records a second by kind.",
        "ops",
        (rate("stagecache_records_total", STAGE, "record"), "{{record}}"),
    )
    board.row("Rows")
    board.panel(
        "timeseries",
        "Rows by path",
        "Rows a second on each way.",
        "ops",
        (rate("stagecache_rows_total", STAGE, "path"), "{{path}}"),
    )
    board.panel(
        "timeseries",
        "Bytes by path",
        "Bytes a second on each way.",
        "Bps",
        (rate("stagecache_bytes_total", STAGE, "path"), "{{path}}"),
    )
    board.panel(
        "timeseries",
        "Span tokens",
        "Tokens a second of gathered spans.",
        "short",
        (rate("stagecache_gathered_span_tokens_total", STAGE), "tokens"),
    )
    board.row("Pools")
    board.panel(
        "timeseries",
        "Presence",
        "Slots of all pools by presence, as of the last look.",
        "short",
        (f"sum by (presence) (stagecache_key_slots{{{STAGE}}})", "{{presence}}"),
        stack=True,
    )
    board.panel(
        "timeseries",
        "Pool in use, by key",
        "Slots whose rows are PRESENT, of all slots.",
        "percentunit",
        (
            f"{present} / sum by (key) (stagecache_key_slots{{{STAGE}}})",
            "{{key}}",
        ),
        max=1,
    )
    board.panel(
        "timeseries",
        "Rows by key",
        "Rows a second out of each key's pool.",
        "ops",
        (rate("stagecache_key_rows_total", STAGE, "key", 'path="gathered"'), "{{key}} out"),
        (rate("stagecache_key_rows_total", STAGE, "key", 'path="scattered"'), "{{key}} in"),
    )
    board.panel(
        "timeseries",
        "Bytes by key",
        "Bytes a second out of each key's pool and into it.",
        "Bps",
        (rate("stagecache_key_bytes_total", STAGE, "key, path"), "{{key}} {{path}}"),
    )
    board.panel(
        "timeseries",
        "Memory by key",
        "Pool and staging pages.",
        "bytes",
        (f"sum by (key) (stagecache_key_pool_bytes{{{STAGE}}})", "{{key}} pool"),
        (f"sum by (key) (stagecache_key_staging_bytes{{{STAGE}}})", "{{key}} staging"),
        stack=True,
    )
    board.panel(
        "table",
        "Keys",
        "Bytes of a row, and whether the key's memory is locked.",
        "none",
        (f"stagecache_key_row_bytes{{{STAGE}}}", "bytes a row"),
        (f"stagecache_key_locked{{{STAGE}}}", "locked"),
    )
    board.row("Arena and device")
    board.panel(
        "timeseries",
        "Arena",
        "Bytes in use by steps and by held tensors, of its size.",
        "bytes",
        (f"sum(stagecache_arena_used_bytes{{{STAGE}}})", "used"),
        (f"sum(stagecache_arena_leased_bytes{{{STAGE}}})", "held by tensors"),
        (f"sum(stagecache_arena_bytes{{{STAGE}}})", "size"),
    )
    board.panel(
        "timeseries",
        "Leases",
        "Merges whose tensors are still held.",
        "short",
        (f"sum(stagecache_leases{{{STAGE}}})", "leases"),
    )
    board.panel(
        "timeseries",
        "Oldest lease",
        "Age of the merge that is held longest.",
        "s",
        (f"max(stagecache_oldest_lease_seconds{{{STAGE}}})", "oldest"),
    )
    board.panel(
        "timeseries",
        "Ways around a full arena",
        "Merges a second that were handed out as copies, and hits that were brought in pieces.",
        "ops",
        (rate("stagecache_copied_merges_total", STAGE), "copied"),
        (rate("stagecache_spilled_merges_total", STAGE), "in pieces"),
    )
    board.panel(
        "timeseries",
        "Device clones",
        "Bytes of deferred rows that wait for their flush.",
        "bytes",
        (f"sum(stagecache_deferred_bytes{{{STAGE}}})", "waiting"),
    )
    board.panel(
        "timeseries",
        "Memory for copies from the device",
        "Host memory that workers pinned, or could not pin: copies into it are slower then.",
        "bytes",
        (f"sum by (state) (stagecache_copy_memory_bytes{{{STAGE}}})", "{{state}}"),
    )
    board.panel(
        "timeseries",
        "Age of the presence counts",
        "Counts of large pools are taken in turn.",
        "s",
        (f"max(stagecache_survey_age_seconds{{{STAGE}}})", "oldest"),
    )
    return board
