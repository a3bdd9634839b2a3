"""The part of the nodes' dashboard that shows shared blocks: of all namespaces together, and of each."""

from __future__ import annotations

from board import NODE, Board, rate

NAMESPACE = "stage, namespace"


def shared_blocks(board: Board) -> None:
    """Add the row."""
    board.row("Shared blocks")

    def asked(result: str = "") -> str:
        return rate("stagecache_index_lookup_hashes_total", NODE, more=f'result="{result}"' if result else "")

    def of_each(result: str = "") -> str:
        more = f'result="{result}"' if result else ""
        return rate("stagecache_namespace_lookup_hashes_total", NODE, NAMESPACE, more=more)

    board.panel(
        "timeseries",
        "Blocks",
        "Held ones are leased, read or being copied; cached ones may be evicted.",
        "short",
        (f"sum by (state) (stagecache_index_blocks{{{NODE}}})", "{{state}}"),
        (f"sum(stagecache_index_leases{{{NODE}}})", "leases"),
        stack=True,
    )
    board.panel(
        "timeseries",
        "Hit ratio",
        "Of the block hashes that schedulers and tools asked for.",
        "percentunit",
        (f"{asked('hit')} / {asked()}", "hit"),
        max=1,
    )
    board.panel(
        "timeseries",
        "Blocks in, out and gone",
        "Blocks a second: published, taken by sessions, evicted.",
        "ops",
        (rate("stagecache_index_published_blocks_total", NODE, "outcome"), "published: {{outcome}}"),
        (rate("stagecache_index_filled_blocks_total", NODE), "filled"),
        (rate("stagecache_index_evictions_total", NODE, "cause"), "evicted: {{cause}}"),
    )
    board.panel(
        "timeseries",
        "Prefixes asked for",
        "Prefixes a second by their end: stored as a whole, a block that is just being copied, one that is not there.",
        "ops",
        (rate("stagecache_index_prefixes_total", NODE, "result"), "{{result}}"),
        stack=True,
    )
    board.panel(
        "timeseries",
        "Blocks that workers gave and took",
        "Blocks a second: what logs published, and what filled a worker's pool; missing ones are UNKNOWN there.",
        "ops",
        (rate("stagecache_shared_blocks_total", NODE, "stage, outcome"), "{{stage}}: {{outcome}}"),
    )
    board.panel(
        "timeseries",
        "Hit ratio by namespace",
        "Of the block hashes that were asked for in each.",
        "percentunit",
        (
            f"{of_each('hit')} / ({of_each()} > 0)",
            "{{stage}} {{namespace}}",
        ),
        max=1,
    )
    board.panel(
        "timeseries",
        "Blocks by namespace",
        "Blocks with content; at the budget, each new one evicts another.",
        "short",
        (
            f'sum by (stage, namespace) (stagecache_namespace_blocks{{{NODE}, state!="free"}})',
            "{{stage}} {{namespace}}",
        ),
        stack=True,
    )
    board.panel(
        "timeseries",
        "Age at eviction",
        "Since the block that goes next was used: short times under load say that the budget is too small.",
        "s",
        (f"max by (stage, namespace) (stagecache_namespace_oldest_seconds{{{NODE}}})", "{{stage}} {{namespace}}"),
    )
    board.panel(
        "timeseries",
        "Stored, taken and evicted by namespace",
        "Blocks a second.",
        "ops",
        (rate("stagecache_namespace_stored_blocks_total", NODE, NAMESPACE), "stored: {{stage}} {{namespace}}"),
        (rate("stagecache_namespace_filled_blocks_total", NODE, NAMESPACE), "filled: {{stage}} {{namespace}}"),
        (rate("stagecache_namespace_evictions_total", NODE, NAMESPACE), "evicted: {{stage}} {{namespace}}"),
    )
    board.panel(
        "table",
        "Namespaces",
        "What is kept for whom; `stagecache index` has more.",
        "none",
        *(
            (f"sum by (instance, stage, namespace) (stagecache_namespace_{name}{{{NODE}}})", title)
            for name, title in (("members", "sessions"), ("leases", "leases"), ("bytes", "bytes"), ("locked", "locked"))
        ),
        w=16,
        h=7,
    )
    board.panel(
        "stat",
        "Namespaces and starts",
        "Namespaces that are there; what a start of the daemon kept and dropped; joins that found no room.",
        "none",
        (f"sum(stagecache_index_namespaces{{{NODE}}})", "namespaces"),
        (f"sum by (outcome) (stagecache_index_recovered_blocks_total{{{NODE}}})", "blocks {{outcome}} at the start"),
        (f'sum(stagecache_index_namespace_events_total{{{NODE}, event="refused"}})', "joins refused"),
        w=8,
        h=7,
    )
    board.panel(
        "timeseries",
        "Shared memory of the index",
        "What namespaces take, and the budget.",
        "bytes",
        (f"sum by (which) (stagecache_index_bytes{{{NODE}}})", "{{which}}"),
    )
