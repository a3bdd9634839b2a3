"""Every metric that a scrape may show: name, kind, labels and what it means. Labels take values of closed sets only,
but for the names that a worker brings: stage, key and model.

docs/metrics.md has this as a table; a test holds the two equal, and every name in rules and dashboards to this.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Literal

from stagecache_wire import figures
from stagecache_wire.v1 import stagecache_pb2 as pb

Kind = Literal["counter", "gauge", "histogram"]

SHARED_METHODS: Final = ("JoinNamespace", "LookupBlocks", "AcquireBlocks", "ReleaseBlocks", "PublishBlocks")
METHODS: Final = ("Attach", "OpenKey", "Merge", "Lookup", "Reset", "Stats", "Detach", *SHARED_METHODS)
REASONS: Final = tuple(name.removeprefix("REASON_").lower() for name in pb.Reason.keys())  # noqa: SIM118
SESSION_STATES: Final = ("live", "failed")
SESSION_EVENTS: Final = ("attached", "adopted", "failed", "detached", "worker_dead")
PURPOSES: Final = ("pools", "staging", "tables", "arena", "control")
PRESENCES: Final = ("present", "absent", "pending", "unknown")
PATHS: Final = ("staged", "scattered", "gathered", *figures.PATHS[1:])
KEY_PATHS: Final = ("scattered", "gathered")
MEMORY_KINDS: Final = ("anonymous", "file", "shared")
LEVELS: Final = ("warning", "error")
GENERATIONS: Final = ("0", "1", "2")
OUTCOMES: Final = ("materialized", "discarded")
PIN_STATES: Final = ("pinned", "unpinned")
INDEX_STATES: Final = ("held", "cached", "free")
EVICTIONS: Final = ("capacity", "reset", "request")
LOOKUPS: Final = ("hit", "miss")
PREFIXES: Final = ("hit", "pending", "miss")
PUBLISHES: Final = ("stored", "known", "not_present", "no_room", "not_kept")
SHARED_BLOCKS: Final = (*PUBLISHES, "filled", "missing")
NAMESPACE_EVENTS: Final = ("made", "recovered", "given_up", "dropped", "refused")
RECOVERED: Final = ("kept", "dropped")
INDEX_BYTES: Final = ("used", "limit")

STEP_BOUNDS_S: Final = tuple(bound / 1e9 for bound in figures.BOUNDS_NS)
CALL_BOUNDS_S: Final = (
    50e-6, 100e-6, 250e-6, 500e-6, 1e-3, 2.5e-3, 5e-3, 10e-3, 25e-3, 50e-3, 0.1, 0.25, 0.5, 1.0, 5.0,
)  # fmt: skip

SESSION: Final = ("stage", "replica")
KEY: Final = ("stage", "replica", "key")
NAMESPACE: Final = ("stage", "namespace")


@dataclass(frozen=True)
class Metric:
    """One family. labels: names in order; values: closed sets of those labels that have one."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    values: tuple[tuple[str, tuple[str, ...]], ...] = ()
    bounds_s: tuple[float, ...] = ()

    @property
    def series(self) -> tuple[str, ...]:
        """Names under which its samples appear."""
        if self.kind != "histogram":
            return (self.name,)
        return (f"{self.name}_bucket", f"{self.name}_sum", f"{self.name}_count")


METRICS: Final[dict[str, Metric]] = {}


def _metric(
    name: str,
    kind: Kind,
    text: str,
    labels: tuple[str, ...] = (),
    bounds_s: tuple[float, ...] = (),
    /,
    **values: tuple[str, ...],
) -> None:
    METRICS[name] = Metric(name, kind, text, labels + tuple(values), tuple(values.items()), bounds_s)


def _daemon() -> None:
    _metric("stagecache_build_info", "gauge", "Always 1; what runs.", ("version", "abi", "python"))
    _metric("stagecache_start_time_seconds", "gauge", "Unix time at which the daemon started.")
    _metric("stagecache_daemon_memory_bytes", "gauge", "Resident memory of the daemon; shared: pools and other parts.",
            kind=MEMORY_KINDS)  # fmt: skip
    _metric("stagecache_budget_bytes", "gauge", "Shared memory that all sessions together may take.")
    _metric("stagecache_budget_used_bytes", "gauge", "Shared memory that sessions take or have set aside.")
    _metric("stagecache_shm_size_bytes", "gauge", "Size of /dev/shm.")
    _metric("stagecache_shm_free_bytes", "gauge", "Free bytes of /dev/shm.")
    _metric("stagecache_sessions", "gauge", "Attached sessions.", state=SESSION_STATES)
    _metric("stagecache_schedulers", "gauge", "Scheduler-side shims that watch for resets.")
    _metric("stagecache_session_events_total", "counter", "What happened to sessions.", event=SESSION_EVENTS)
    _metric(
        "stagecache_rpc_seconds", "histogram", "Time of a gRPC call in the daemon.", (), CALL_BOUNDS_S, method=METHODS
    )
    _metric("stagecache_rpc_refused_total", "counter", "gRPC calls that were refused.", reason=REASONS)
    _metric("stagecache_loop_lag_seconds", "histogram", "How late the event loop wakes up.", (), CALL_BOUNDS_S)
    _metric("stagecache_gc_pause_seconds", "histogram", "Pauses of the garbage collector.", (), CALL_BOUNDS_S,
            generation=GENERATIONS)  # fmt: skip
    _metric("stagecache_log_lines_total", "counter", "Lines of the daemon's log that report trouble.", level=LEVELS)
    _metric("stagecache_fold_seconds", "gauge", "Time that the scrape before this one took in the daemon.")


def _session() -> None:
    _metric("stagecache_session_info", "gauge", "Always 1; who is attached.", (*SESSION, "model", "rank", "session"))
    _metric("stagecache_session_live", "gauge", "1 while the session works, 0 where a bad record ended it.", SESSION)
    _metric("stagecache_worker_away", "gauge", "1 while the worker takes the daemon for gone.", SESSION)
    _metric("stagecache_worker_idle_seconds", "gauge", "Since the worker's last step.", SESSION)
    _metric("stagecache_epoch", "gauge", "Epoch of the session.", SESSION)
    _metric("stagecache_slots", "gauge", "Token slots that the session mirrors.", SESSION)
    _metric("stagecache_staging_pages", "gauge", "Steps that may be unconsumed at once.", SESSION)
    _metric("stagecache_unconsumed_steps", "gauge", "Steps neither materialized nor discarded.", SESSION)
    _metric("stagecache_log_depth", "gauge", "Records that wait for the daemon.", SESSION)
    _metric(
        "stagecache_log_oldest_seconds", "gauge", "Age of the oldest record that waits; 0 where none does.", SESSION
    )
    _metric("stagecache_memory_bytes", "gauge", "Shared memory of a session.", SESSION, purpose=PURPOSES)
    _metric("stagecache_arena_bytes", "gauge", "Size of the merge arena.", SESSION)
    _metric("stagecache_arena_used_bytes", "gauge", "Arena bytes in use, by steps and by leases.", SESSION)
    _metric("stagecache_arena_leased_bytes", "gauge", "Arena bytes that tensors hold.", SESSION)
    _metric("stagecache_leases", "gauge", "Merges whose tensors are still held.", SESSION)
    _metric("stagecache_oldest_lease_seconds", "gauge", "Age of the oldest lease; 0 where there is none.", SESSION)
    _metric("stagecache_deferred_bytes", "gauge", "Device bytes of rows that wait for their flush.", SESSION)
    _metric("stagecache_copy_memory_bytes", "gauge",
            "Host memory that a worker's device copies into.", SESSION,
            state=PIN_STATES)  # fmt: skip
    _metric("stagecache_survey_age_seconds", "gauge", "Age of the presence counts.", SESSION)


def _work() -> None:
    _metric("stagecache_steps_total", "counter", "Steps that were saved.", SESSION)
    _metric("stagecache_steps_consumed_total", "counter", "Steps that were handed out or given up.", SESSION,
            outcome=OUTCOMES)  # fmt: skip
    _metric("stagecache_lost_steps_total", "counter", "Steps whose slots became UNKNOWN.", SESSION)
    _metric("stagecache_local_steps_total", "counter", "Steps that were not logged, the daemon being away.", SESSION)
    _metric("stagecache_hit_requests_total", "counter", "Requests that came with a hit span.", SESSION)
    _metric("stagecache_hit_tokens_total", "counter", "Tokens whose rows came from the pools.", SESSION)
    _metric("stagecache_prefill_tokens_total", "counter", "Tokens computed but for one a request and step.", SESSION)
    _metric("stagecache_computed_tokens_total", "counter", "Tokens whose rows a step brought.", SESSION)
    _metric(
        "stagecache_queried_tokens_total", "counter", "Hit tokens and prefill tokens: what could have hit.", SESSION
    )
    _metric("stagecache_rows_total", "counter", "Rows of all keys, by their way; of leftovers the values.", SESSION,
            path=PATHS)  # fmt: skip
    _metric("stagecache_bytes_total", "counter", "Bytes of these rows.", SESSION, path=PATHS)
    _metric("stagecache_engine_phase_seconds", "histogram", "Time of one call in the worker.", SESSION, STEP_BOUNDS_S,
            phase=figures.PHASES)  # fmt: skip
    _metric("stagecache_waits_total", "counter", "Times that the worker had to wait.", SESSION, what=figures.WAITS)
    _metric("stagecache_wait_seconds_total", "counter", "Time of these waits.", SESSION, what=figures.WAITS)
    _metric("stagecache_records_total", "counter", "Records that the daemon worked off.", SESSION, record=figures.KINDS)
    _metric("stagecache_record_lag_seconds", "histogram", "From a record's publication to its effect.", SESSION,
            STEP_BOUNDS_S)  # fmt: skip
    _metric("stagecache_scatter_seconds", "histogram", "Effect of a SAVE or FLUSH record.", SESSION, STEP_BOUNDS_S)
    _metric("stagecache_gather_seconds", "histogram", "Gathers of a record.", SESSION, STEP_BOUNDS_S)
    _metric("stagecache_consumer_seconds_total", "counter", "Time that the consumer worked.", SESSION)
    _metric("stagecache_gathered_spans_total", "counter", "Hit spans that were gathered.", SESSION)
    _metric("stagecache_gathered_span_tokens_total", "counter", "Tokens of these spans.", SESSION)
    _metric("stagecache_shared_blocks_total", "counter", "Blocks that the log gave to the node, or took from it.",
            SESSION, outcome=SHARED_BLOCKS)  # fmt: skip


def _trouble() -> None:
    _metric("stagecache_refused_saves_total", "counter", "Saves that gave no step id.", SESSION,
            reason=figures.REFUSED_SAVES)  # fmt: skip
    _metric("stagecache_failed_merges_total", "counter", "Materialize calls that raised.", SESSION,
            reason=figures.FAILED_MERGES)  # fmt: skip
    _metric("stagecache_failed_writes_total", "counter", "Times that rows of a key were not kept.", SESSION,
            reason=figures.FAILED_WRITES)  # fmt: skip
    _metric("stagecache_unknown_rows_total", "counter", "Gathered rows that were UNKNOWN.", SESSION)
    _metric("stagecache_copied_merges_total", "counter", "Merges handed out as copies: tensors held too much.", SESSION)
    _metric("stagecache_spilled_merges_total", "counter", "Hits that found no room in the arena.", SESSION)
    _metric("stagecache_resets_total", "counter", "New epochs.", SESSION)
    _metric("stagecache_reconnects_total", "counter", "Times that the worker found the daemon again.", SESSION)
    _metric("stagecache_worker_calls_total", "counter", "gRPC calls that the worker made.", SESSION)


def _keys() -> None:
    _metric("stagecache_key_slots", "gauge", "Slots of a key's pool, by presence.", KEY, presence=PRESENCES)
    _metric("stagecache_key_rows_total", "counter", "Rows of a key, into its pool and out of it.", KEY, path=KEY_PATHS)
    _metric("stagecache_key_bytes_total", "counter", "Bytes of these rows.", KEY, path=KEY_PATHS)
    _metric("stagecache_key_pool_bytes", "gauge", "Size of a key's pool.", KEY)
    _metric("stagecache_key_staging_bytes", "gauge", "Size of a key's staging pages.", KEY)
    _metric("stagecache_key_row_bytes", "gauge", "Bytes of one row.", KEY)
    _metric("stagecache_key_locked", "gauge", "1 where the key's memory is locked.", KEY)


def _index() -> None:
    """Shown by a daemon that keeps shared blocks; names say index for their store."""
    _metric("stagecache_index_namespaces", "gauge", "Namespaces that are there.")
    _metric("stagecache_index_namespace_events_total", "counter", "What happened to namespaces.",
            event=NAMESPACE_EVENTS)  # fmt: skip
    _metric("stagecache_index_recovered_blocks_total", "counter", "Blocks that an earlier daemon left.",
            outcome=RECOVERED)  # fmt: skip
    _metric("stagecache_index_blocks", "gauge", "Shared blocks; cached ones may still be hit.", state=INDEX_STATES)
    _metric("stagecache_index_evictions_total", "counter", "Shared blocks whose content went.", cause=EVICTIONS)
    _metric("stagecache_index_leases", "gauge", "Spans of shared blocks that are held.")
    _metric("stagecache_index_lookup_hashes_total", "counter", "Block hashes that were asked for.", result=LOOKUPS)
    _metric("stagecache_index_prefixes_total", "counter", "Prefixes that were asked for, by how they ended.",
            result=PREFIXES)  # fmt: skip
    _metric("stagecache_index_published_blocks_total", "counter", "Blocks that were to be kept.", outcome=PUBLISHES)
    _metric("stagecache_index_filled_blocks_total", "counter", "Shared blocks whose rows a session took.")
    _metric("stagecache_index_bytes", "gauge", "Shared memory of shared blocks, and its budget.", which=INDEX_BYTES)


def _namespaces() -> None:
    """Of each namespace that is there, ``--shared-namespaces`` at most; they go with it."""
    _metric("stagecache_namespace_members", "gauge", "Sessions that have joined.", NAMESPACE)
    _metric("stagecache_namespace_leases", "gauge", "Spans of its blocks that are held.", NAMESPACE)
    _metric("stagecache_namespace_bytes", "gauge", "Shared memory of the namespace.", NAMESPACE)
    _metric("stagecache_namespace_locked", "gauge", "1 where the namespace's memory is locked.", NAMESPACE)
    _metric("stagecache_namespace_oldest_seconds", "gauge", "Since the block that is evicted next was used.", NAMESPACE)
    _metric("stagecache_namespace_blocks", "gauge", "Its blocks; cached ones may still be hit.", NAMESPACE,
            state=INDEX_STATES)  # fmt: skip
    _metric("stagecache_namespace_lookup_hashes_total", "counter", "Block hashes that were asked for.", NAMESPACE,
            result=LOOKUPS)  # fmt: skip
    _metric("stagecache_namespace_stored_blocks_total", "counter", "Blocks that were stored.", NAMESPACE)
    _metric("stagecache_namespace_filled_blocks_total", "counter", "Blocks whose rows a session took.", NAMESPACE)
    _metric("stagecache_namespace_evictions_total", "counter", "Blocks whose content went.", NAMESPACE)


for _define in (_daemon, _session, _work, _trouble, _keys, _index, _namespaces):
    _define()

INDEX_METRICS: Final = frozenset(name for name in METRICS if re.match("stagecache_(index|namespace)_", name))
