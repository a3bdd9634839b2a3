"""Parts of the figures by themselves: what no driver of a whole daemon reaches, and what must hold of each."""

from __future__ import annotations

import asyncio
import gc
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from stagecache_wire import figures, layout
from stagecache_wire.figures import BUCKETS, Daemon, Worker
from stagecache_wire.records import Kind, Record
from stagecache_wire.traces import read_context, write_context
from stagecache_wire.v1 import stagecache_pb2 as pb
from stagecached.budget import Cost
from stagecached.index import Namespace
from stagecached.index.namespace import KeySchema as NamespaceKey
from stagecached.metrics import record_figures
from stagecached.metrics.calls import CallFigures, CallTimer
from stagecached.metrics.catalog import INDEX_METRICS, METRICS
from stagecached.metrics.families import Snapshot, StagecacheCollector, families
from stagecached.metrics.fold import KeyFold, Presence, SessionFold, age_s
from stagecached.metrics.histogram import Histogram
from stagecached.metrics.history import POINTS, History
from stagecached.metrics.journal import Journal
from stagecached.metrics.monitor import Monitor
from stagecached.metrics.pulse import Pulse
from stagecached.metrics.record_figures import RecordFigures
from stagecached.metrics.survey import Survey
from stagecached.metrics.text import TextWriter
from stagecached.metrics.totals import MAX_KEPT, Replicas, Totals
from stagecached.refusal import ERROR_METADATA_KEY, Refusal, internal
from stagecached.shared.figures import IndexTotals
from stagecached.shared.manifest import NamespaceManifest
from stagecached.shared.space import Space
from stagecached.shared.store import NamespaceStore
from stagecached.web.state import history_state, quantile
from tests.unit.server.shared.kit import BLOCK_SIZE, KEYS, Member, digests, new_segment, publish


def fold(session_id: str = "a" * 16, stage: str = "s", replica: str = "0", **words: int) -> SessionFold:
    """A session whose worker words are as given, by name; everything else is small and not zero."""
    worker = [0] * figures.WORKER_WORDS
    for name, value in words.items():
        worker[Worker[name]] = value
    return SessionFold(
        session_id=session_id, model="m", stage=stage, replica=replica, rank=0, pid=1, live=True, failure="",
        adopted=False, attached_unix_s=1.0, worker=worker, daemon=list(range(figures.DAEMON_WORDS)), head=7, consumed=5,
        epoch=1, slots=64, block_size=4, depth=4, arena_bytes=100, memory=Cost(1, 2, 3, 4, 5), oldest_s=0.5,
        idle_s=0.25, lease_s=0.0,
        keys=[KeyFold(0, 'odd "key"\\\n', "float32", (2,), 8, 512, 128, True, 10, 20, Presence(1, 2, 3, 58, 1.0))],
    )  # fmt: skip


# ---------------------------------------------------------------- words


def test_blocks_of_words_fit_their_pages_and_do_not_overlap() -> None:
    assert layout.W_FIGURES + figures.WORKER_WORDS <= layout.W_TIMES
    assert layout.W_TIMES + layout.TIME_ENTRIES <= layout.W_TRACES
    assert layout.W_TRACES + 4 * layout.TRACE_ENTRIES <= layout.D_BASE
    assert ControlWords.entries >= layout.D_FIGURES + figures.DAEMON_WORDS
    assert layout.D_SPANS == layout.D_FIGURES + Daemon.SPANS
    assert layout.D_BUSY_NS == layout.D_FIGURES + Daemon.BUSY_NS
    assert Worker.REFUSED_SAVES + len(figures.REFUSED_SAVES) == Worker.FAILED_MERGES
    assert Worker.FAILED_MERGES + len(figures.FAILED_MERGES) == Worker.FAILED_WRITES
    assert Worker.FAILED_WRITES + len(figures.FAILED_WRITES) == Worker.AWAY
    assert Worker.PATHS + 2 * len(figures.PATHS) == Worker.WAITS
    assert Worker.WAITS + 2 * len(figures.WAITS) == Worker.REFUSED_SAVES
    assert Daemon.KIND_RECORDS + len(figures.KINDS) == Daemon.LAG == len(figures.KINDS) + 9
    assert [kind.name.lower() for kind in Kind] == list(figures.KINDS)


class ControlWords:
    entries = 3 * layout.PAGE // layout.WORD


def test_lag_is_taken_from_the_ring_and_left_out_where_its_entry_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_figures, "MAX_LAG_NS", 10**9)  # a machine need not have run for an hour
    words = memoryview(bytearray(4 * layout.PAGE)).cast("Q")
    noted = RecordFigures(words)
    words[layout.W_HEAD] = 1
    words[layout.W_TIMES] = 1
    noted.done(Record(1, Kind.RESET), 10)  # published at 1 ns: longer ago than a lag can be
    assert sum(words[layout.D_FIGURES + Daemon.LAG + index] for index in range(BUCKETS)) == 0
    import time

    words[layout.W_TIMES] = time.monotonic_ns() - 40_000
    noted.done(Record(1, Kind.SAVE, rows=3), time.monotonic_ns() - 20_000)
    assert sum(words[layout.D_FIGURES + Daemon.LAG + index] for index in range(BUCKETS)) == 1
    assert words[layout.D_FIGURES + Daemon.LAG + BUCKETS] >= 40_000
    words[layout.W_HEAD] = 1 + layout.TIME_ENTRIES
    assert noted.published(1) == 0
    assert [note.sequence for note in noted.recent] == [1, 1]


def test_a_trace_context_is_read_only_by_its_own_record() -> None:
    words = memoryview(bytearray(3 * layout.PAGE)).cast("Q")
    trace_id, span_id = (1 << 127) | 5, (1 << 63) | 7
    write_context(words, 3, trace_id, span_id)
    assert read_context(words, 3) == (trace_id, span_id)
    assert read_context(words, 3 + layout.TRACE_ENTRIES) is None
    write_context(words, 3 + layout.TRACE_ENTRIES, 1, 2)
    assert read_context(words, 3) is None


def test_age_of_another_clock_is_no_age() -> None:
    assert age_s(0, 10) == 0.0
    assert age_s(20, 10) == 0.0
    assert age_s(10**9, 3 * 10**9) == 2.0


# ---------------------------------------------------------------- the exposition


def snapshot(*folds: SessionFold, totals: Totals | None = None) -> Snapshot:
    shot = Snapshot(sessions=list(folds), totals=totals or Totals())
    shot.gauge("stagecache_build_info", 1, "0", "1", "3")
    shot.histogram("stagecache_rpc_seconds", Histogram((0.1,) * 15), "Attach")
    return shot


def samples(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_text_is_what_prometheus_client_itself_writes() -> None:
    shot = snapshot(fold(STEPS=3, HIT_TOKENS=5), fold("b" * 16, replica="1", PREFILL_TOKENS=11))
    registry = CollectorRegistry()
    registry.register(StagecacheCollector(lambda: shot))  # type: ignore[arg-type]
    assert samples(TextWriter().write(families(shot))) == samples(generate_latest(registry).decode())


def test_every_family_of_a_session_is_there_from_its_first_moment() -> None:
    shown = {metric.name for metric, _ in families(snapshot(fold()))}
    wanted = {name for name, metric in METRICS.items() if "replica" in metric.labels}
    assert wanted <= shown


def test_counters_go_on_where_the_session_before_stopped() -> None:
    totals = Totals()
    totals.keep(fold(STEPS=3, LEASES=2))
    totals.keep(fold(STEPS=4))
    text = TextWriter().write(families(snapshot(totals=totals)))
    assert samples(text)["stagecache_steps_total", (("replica", "0"), ("stage", "s"))] == 7
    assert "stagecache_leases" not in text, "gauges go with their session"
    live = samples(TextWriter().write(families(snapshot(fold(STEPS=5, LEASES=1), totals=totals))))
    assert live["stagecache_steps_total", (("replica", "0"), ("stage", "s"))] == 12
    assert live["stagecache_leases", (("replica", "0"), ("stage", "s"))] == 1
    for number in range(2 * MAX_KEPT):
        totals.keep(fold(stage=f"s{number}"))
    assert len(totals.sessions) == len(totals.keys) == MAX_KEPT


def test_replicas_get_the_smallest_free_number_of_their_stage() -> None:
    replicas = Replicas()
    assert [replicas.name(name, "s") for name in "abc"] == ["0", "1", "2"]
    assert replicas.name("x", "t") == "0"
    replicas.drop("b")
    assert [replicas.name(name, "s") for name in "acd"] == ["0", "2", "1"]


def index_samples(totals: IndexTotals) -> dict[str, float]:
    """By name and label values, as one word."""
    return {" ".join((name.removeprefix("stagecache_"), *labels)): value for name, labels, value in totals.samples()}


def test_figures_of_namespaces_end_with_them_and_totals_go_on() -> None:
    schemas = tuple(NamespaceKey(key.name, key.dtype, key.row_shape) for key in KEYS)
    namespace = Namespace("weights 1", "sha256_cbor", "seed", "talker", schemas, "float32", BLOCK_SIZE)
    with new_segment(4) as segment:
        manifest = NamespaceManifest.of(namespace, KEYS, 4, 1.0)
        space = Space.of(manifest, NamespaceStore(segment))
        spaces = [space]
        totals = IndexTotals(lambda: spaces, 1 << 20)
        member = Member(space.store)
        for number in range(5):
            publish(member, number)
        space.leases.acquire("a" * 16, "r", digests(4, 5), member.generation)
        space.store.look(digests(4), member.generation)
        totals.not_joined(3)
        totals.note("recovered", kept=7, dropped=2)
        shown = index_samples(totals)
        assert {name.split()[0] for name in shown} == {name.removeprefix("stagecache_") for name in INDEX_METRICS}
        mine = f"talker {manifest.namespace_id[:12]}"
        expected = {
            "index_namespaces": 1, "index_leases": 1, "index_blocks held": 1, "index_blocks cached": 3,
            "index_bytes limit": 1 << 20, "index_bytes used": space.total_bytes, "index_evictions_total capacity": 1,
            "index_published_blocks_total stored": 5, "index_published_blocks_total not_kept": 3,
            "index_lookup_hashes_total hit": 2, "index_lookup_hashes_total miss": 1, "index_prefixes_total hit": 1,
            "index_prefixes_total miss": 1, "index_recovered_blocks_total kept": 7,
            "index_recovered_blocks_total dropped": 2, f"namespace_blocks {mine} cached": 3,
            f"namespace_stored_blocks_total {mine}": 5, f"namespace_evictions_total {mine}": 1,
            f"namespace_lookup_hashes_total {mine} hit": 2, f"namespace_leases {mine}": 1,
        }  # fmt: skip
        assert {name: shown[name] for name in expected} == expected
        assert 0 < shown[f"namespace_oldest_seconds {mine}"] < 60
        totals.dropping(space)
        spaces.clear()
        left = index_samples(totals)
        assert not [name for name in left if name.startswith("namespace_")]
        assert left["index_published_blocks_total stored"] == 5
        assert left["index_evictions_total request"] == 4
        assert left["index_namespace_events_total dropped"] == 1


def test_a_block_index_is_shown_where_there_is_one() -> None:
    hub, budget = SimpleNamespace(schedulers=lambda: 2), SimpleNamespace(limit_bytes=9, used_bytes=4)
    monitor = Monitor(SimpleNamespace(hub=hub, budget=budget, all=list), Journal())  # type: ignore[arg-type]
    assert not INDEX_METRICS & {metric.name for metric, _ in families(monitor.snapshot([]))}
    monitor.index = SimpleNamespace(samples=lambda: [("stagecache_index_blocks", ("cached",), 2)])
    shown = samples(TextWriter().write(families(monitor.snapshot([]))))
    assert shown["stagecache_index_blocks", (("state", "cached"),)] == 2
    assert shown["stagecache_schedulers", ()] == 2


# ---------------------------------------------------------------- what happens to the daemon


class Context:
    """A gRPC context that is aborted with a refusal."""

    def __init__(self, refusal: Refusal) -> None:
        self._refusal = refusal

    def trailing_metadata(self) -> Any:
        return ((ERROR_METADATA_KEY, self._refusal.to_wire().SerializeToString()),)


@pytest.mark.parametrize(
    "refusal", [internal(), Refusal(pb.REASON_SHUTTING_DOWN, "x"), Refusal(pb.REASON_DEADLINE, "x")]
)
def test_refusals_are_counted_by_reason(refusal: Refusal) -> None:
    import grpc

    counted, told = CallFigures(), []
    timer = CallTimer(counted, lambda method, error: told.append((method, error.reason)))

    async def inner(request: Any, context: Any) -> None:
        raise grpc.aio.AbortError

    async def call() -> None:
        timed = timer.wrap("/stagecache.v1.StageCache/Merge", grpc.unary_unary_rpc_method_handler(inner))
        with pytest.raises(grpc.aio.AbortError):
            await timed.unary_unary(b"", Context(refusal))

    asyncio.run(call())
    assert counted.refused[refusal.reason_name.lower()] == 1
    assert counted.seconds["Merge"].count == 1
    assert told == [("Merge", refusal.reason)]


def test_pauses_of_every_generation_are_counted() -> None:
    pulse = Pulse()
    pulse.watch_gc()
    try:
        for generation in range(3):
            gc.collect(generation)
    finally:
        pulse.unwatch_gc()
    assert all(histogram.count >= 1 for histogram in pulse.gc_pauses.values())
    gc.collect()


def test_journal_counts_repetitions_and_knows_cures() -> None:
    now = [100.0]
    journal = Journal(lambda: now[0])
    journal.notice([fold()])
    after = fold()
    after.worker[Worker.REFUSED_SAVES + figures.REFUSED_SAVES.index("too_large")] = 2
    journal.notice([after])
    after.worker[Worker.FAILED_MERGES] = 1
    now[0] = 101.0
    journal.notice([after])
    newest, first = journal.newest()
    assert (newest.what, newest.count, newest.where) == ("materialize failed: unreadable", 1, "s #0")
    assert (first.what, first.count) == ("save refused: too large", 2)
    assert all(entry.cure for entry in (newest, first))
    journal.log_processor(None, "warning", {"event": "odd", "level": "warning", "key": 1})
    assert journal.newest()[0].text == "key=1"
    assert journal.lines == {"warning": 1, "error": 0}
    journal.log_processor(None, "error", {"event": "session failed", "level": "error"})
    assert journal.lines["error"] == 1
    assert journal.newest()[0].what == "odd", "the manager tells of failed sessions itself, with a cure"
    for number in range(200):
        journal.add("x", str(number))
    assert len(journal.newest()) == 50


# ---------------------------------------------------------------- time


def test_history_is_a_ring_and_sums_sessions_from_now_backwards() -> None:
    history = History()
    for second in range(POINTS + 50):
        folds = [fold(STEPS=2 * second, HIT_TOKENS=30 * second, PREFILL_TOKENS=10 * second)]
        if second >= POINTS:  # another one comes late
            folds.append(fold("b" * 16, STEPS=second, PREFILL_TOKENS=40 * second))
        history.note(folds, float(second))
    track = history.tracks["a" * 16]
    assert len(track) == POINTS
    assert track.moved(10)[1] == 20
    alone = history_state([track])
    assert alone["t"][-1] == 0
    assert set(alone["hit_ratio"]) == {0.75}
    both = history_state(list(history.tracks.values()))
    assert both["hit_ratio"][-1] == pytest.approx(30 / 80)
    assert both["steps"][-1] == pytest.approx(3.0)
    assert both["hit_ratio"][0] == 0.75
    history.note([], 9999.0)
    assert history.tracks == {}
    assert history_state([])["t"] == []


def test_quantiles_lie_inside_their_bucket() -> None:
    assert quantile([0] * BUCKETS, 0.5) is None
    counts = [0] * BUCKETS
    counts[3] = 10  # 25 to 50 µs
    assert 25e-6 < (quantile(counts, 0.5) or 0) < 50e-6
    counts[-1] = 1000
    assert quantile(counts, 0.99) == pytest.approx(1.0)


def test_survey_keeps_to_its_budget_and_comes_round() -> None:
    """A key is looked at again only when its log went on; the one looked at longest ago comes first."""
    clock = [0.0]

    class Store:
        def __init__(self) -> None:
            self.looks = 0
            self.claims = np.zeros(8, np.uint64)

    stores = [Store() for _ in range(4)]
    segments = [
        SimpleNamespace(keys={0: store}, consumed=1, slot_words=np.zeros(8, np.uint64), epoch_sequence=0)
        for store in stores
    ]
    sessions = [SimpleNamespace(segments=one) for one in segments]

    def counted(store: Any, of: Any) -> Presence:
        store.looks += 1
        clock[0] += 0.01
        return Presence(store.looks, 0, 0, 0, 0.0)

    import stagecached.metrics.survey as module

    original = module.count
    module.count = counted  # type: ignore[assignment]
    try:
        survey = Survey(lambda: clock[0])

        def look(consumed: int) -> list[float | None]:
            folds = [fold(f"{index}" * 16) for index in range(4)]
            for one, part in zip(folds, segments, strict=True):
                one.consumed = part.consumed = consumed
                one.keys[0].presence = Presence()
            survey.look(zip(sessions, folds, strict=True), 0.015)  # type: ignore[arg-type]
            return [one.keys[0].presence.age_s for one in folds]

        assert look(1)[2:] == [None, None]
        assert None not in look(1)
        assert [store.looks for store in stores] == [1, 1, 1, 1]
        look(1)
        assert [store.looks for store in stores] == [1, 1, 1, 1], "nothing went on"
        look(2)
        look(2)
        assert [store.looks for store in stores] == [2, 2, 2, 2]
    finally:
        module.count = original
