"""Every figure moves: a daemon and its workers go down every path, and each exported series must have changed."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from stagecache import errors
from stagecache.rpc import Rpc, handshake
from stagecache_wire import shm
from stagecache_wire.records import KeyMode, Kind, Record, key_words
from stagecache_wire.v1 import stagecache_pb2 as pb
from stagecached.metrics.catalog import METRICS
from stagecached.shared.layout import B_HASH, block_word
from stagecached.shared.manager import segment_name
from tests.daemon_process import DaemonProcess, poll_until
from tests.device.cache import DeviceCache
from tests.integration.helpers import worker
from tests.integration.metrics_kit import get, metrics_daemon, url_of
from tests.integration.replica import Replica
from tests.integration.sharing_worker import SharingWorker, acquire, hashes, lookup
from tests.integration.worker_process import WorkerProcess, attach_request, key
from tests.model.real import RealCache
from tests.model.steps import Refused, Rules
from tests.rules.builder import HIDDEN_SCHEMA, NUMBER_SCHEMA, WIDE, Stage, numbers

HOOKED = (sys.executable, "-m", "tests.integration.hooked_daemon")

Series = tuple[str, tuple[tuple[str, str], ...]]

CONSTANT = {
    "stagecache_build_info", "stagecache_start_time_seconds", "stagecache_budget_bytes", "stagecache_shm_size_bytes",
    "stagecache_session_info", "stagecache_slots", "stagecache_staging_pages", "stagecache_arena_bytes",
    "stagecache_key_pool_bytes", "stagecache_key_staging_bytes", "stagecache_key_row_bytes", "stagecache_key_locked",
    "stagecache_memory_bytes", "stagecache_copy_memory_bytes", "stagecache_index_bytes", "stagecache_namespace_bytes",
}  # fmt: skip
"""Series that say how something is made; that they are there and not zero is all that they can show."""

NAMED = ("stage", "replica", "key", "model", "session", "namespace")
"""Labels that workers bring: a series moved when it did for one of them."""


class Scrapes:
    """Least and greatest value of every series over all scrapes."""

    def __init__(self, daemon: DaemonProcess) -> None:
        self.daemon = daemon
        self.low: dict[Series, float] = {}
        self.high: dict[Series, float] = {}
        self.now: dict[Series, float] = {}

    def take(self) -> dict[Series, float]:
        self.now = {}
        for family in text_string_to_metric_families(get(url_of(self.daemon) + "metrics")):
            for sample in family.samples:
                series = (sample.name, tuple(sorted(sample.labels.items())))
                assert series not in self.now, f"twice: {series}"
                self.now[series] = sample.value
                self.low[series] = min(sample.value, self.low.get(series, sample.value))
                self.high[series] = max(sample.value, self.high.get(series, sample.value))
        return self.now

    def value(self, name: str, **labels: str) -> float:
        """Sum of the newest values of all series of that name with these labels."""
        wanted = set(labels.items())
        return sum(value for (found, pairs), value in self.now.items() if found == name and wanted <= set(pairs))

    def still(self) -> list[str]:
        """Series that never moved in any stage."""
        moved: dict[str, bool] = {}
        for series, low in self.low.items():
            name, pairs = series
            if not name.startswith("stagecache_") or name.endswith(("_bucket", "_locked")):
                continue  # the limit of the machine decides what is locked
            labels = {label: value for label, value in pairs if label not in NAMED}
            title = f"{name}{labels}"
            moved[title] = moved.get(title, False) or self.high[series] > (0 if name in CONSTANT else low)
        return sorted(title for title, did in moved.items() if not did)


def stage_of(daemon: DaemonProcess, settings: dict[str, Any] | None = None, **rules: Any) -> Stage:
    rules.setdefault("schemas", {"__hidden_states__": HIDDEN_SCHEMA, "k": NUMBER_SCHEMA})
    return Stage(lambda made: RealCache(made, str(daemon.socket), **{"stage": "s", **(settings or {})}), **rules)


@contextmanager
def stopped(daemon: DaemonProcess, seconds: float) -> Iterator[None]:
    """The daemon stands still for so long, while something waits for it."""
    os.kill(daemon.pid, signal.SIGSTOP)
    timer = threading.Timer(seconds, os.kill, (daemon.pid, signal.SIGCONT))
    timer.start()
    try:
        yield
    finally:
        timer.join()


def refused(call: Any) -> None:
    with pytest.raises((Refused, errors.StageCacheError)):
        call()


# ---------------------------------------------------------------- the paths


def rows_paths(scrapes: Scrapes) -> None:
    """Hits, leftovers, late merges, held tensors, spills, discards, resets, a key that is given up."""
    stage = stage_of(scrapes.daemon, {"arena_bytes": 1 << 16, "num_blocks": 64, "max_results": 16})
    cache: Any = stage.cache
    scrapes.take()
    stage.step("a:[0,1]@0+8", k=1, ref=numbers([1, 2, 3]))
    late = stage.saved("b:[0,2]@4+2", k=2)
    scrapes.take()
    stage.step("c:[0,1,3]@8+1", k=3)
    late.materialize()
    stage.saved("d:[4]@0+1").discard()
    stage.step("d@1+1")  # without k: absent
    big = ",".join(map(str, range(8, 24)))
    held = [stage.step(f"e{n}:[{big}]@0+64" if n == 0 else f"e{n}:[{big},{24 + n}]@64+1", k=4) for n in range(30)]
    many = [f"g{n}:[{big},{30 + n}]@64+1" for n in range(24)]
    stage.step(*many, k=5)  # 24 hits of two keys, 15 results: the rest spills
    scrapes.take()
    cache.held.clear()
    del held
    stage.step("p:[60]@0+1", "q:[61]@0+1", k=1, guess=numbers([1, 2]))  # one row a request: provisional
    stage.step("p@1+2", "q@1+2", k=1, guess=numbers([1, 2]))  # it was no per-token key
    cache.reset()
    stage.step("z:[62]@0+1", k=1)
    scrapes.take()
    assert scrapes.value("stagecache_spilled_merges_total") > 0
    assert scrapes.value("stagecache_copied_merges_total") > 0
    cache.close()


def deferred_paths(scrapes: Scrapes) -> None:
    """Clones, flushes, a flush that fails, pages of a deferred key that are all in use."""
    stage = stage_of(scrapes.daemon, {"stage": "deferred", "num_blocks": 64}, deferred=frozenset({"k"}), depth=2)
    cache: Any = stage.cache
    scrapes.take()
    for req in "abcdef":
        stage.step(f"{req}:[{ord(req) - 97}]@0+4", k=1)
    scrapes.take()  # deferred bytes, pending slots
    saver = cache.cache._saver
    with stopped(scrapes.daemon, 0.3):
        for req in "abc":
            with suppress(Refused):
                stage.begin(finished=req)
                saver.epochs.unlogged = False
    stage.step("g:[8]@0+4", k=1)
    device, stage_rows = saver.deferred._device, saver.deferred._device.stage
    device.stage = lambda page, rows: (_ for _ in ()).throw(OSError("no copy"))
    with suppress(Refused):
        stage.begin(finished="g")
    device.stage = stage_rows
    with suppress(Refused):
        stage.step("h:[9]@0+1", k=1)
    scrapes.take()
    cache.close()


def device_paths(scrapes: Scrapes) -> None:
    """Outputs on a device: memory that is pinned, and memory that cannot be."""
    for refuse in (False, True):
        cache = DeviceCache(
            Rules(schemas={"__hidden_states__": HIDDEN_SCHEMA}),
            str(scrapes.daemon.socket),
            stage="device",
            slab_bytes=1 << 16,
            refuse_pins=refuse,
        )
        scrapes.take()
        cache.close()


def trouble_paths(scrapes: Scrapes) -> None:
    """Every reason for which a save gives no id, a materialize raises, or rows are not kept."""
    settings = {"staging_claim_timeout_s": 0.05, "merge_timeout_s": 0.15, "num_blocks": 64, "stage": "trouble"}
    stage = stage_of(scrapes.daemon, settings, depth=2)
    cache: Any = stage.cache
    scrapes.take()
    refused(lambda: stage.step("a:[0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17]@0+70", k=1))  # too large
    stage.begin("b:[0]@0+4")
    cache.view.show(type(stage.begun)())  # an empty batch: slots do not cover the rows
    refused(lambda: stage.save(k=1))
    stage.begin("c:[1]@0+4")
    stage.begin("c@0+4")  # the step before was never saved
    stage.save(k=1).discard()
    open_steps = [stage.saved("d:[2]@0+1", k=1), stage.saved("d@1+1", k=1)]
    scrapes.take()  # unconsumed steps
    refused(lambda: stage.saved("d@2+1", k=1))  # staging timeout
    for step in open_steps:
        step.discard()
    session = cache.cache.session
    append = session.append
    for error in (errors.DaemonLostError("x"), errors.SessionFailedError("x"), ValueError("x")):

        def fail(record: Record, *, urgent: bool = False, error: Exception = error) -> int:
            raise error

        stage.begin("e:[3]@0+1")
        session.append = fail
        with pytest.raises((Refused, ValueError)):
            stage.save(k=1)
        session.append = append
    refused(lambda: stage.step("f:[40,41]@4+1", k=1))  # unreadable: block 40 was never written
    saved = stage.saved("g:[5]@0+2", hidden=WIDE, k=1)
    refused(saved.materialize)  # schema mismatch
    stage.step("h:[6]@0+4", k=1)
    for error in (errors.DaemonLostError("x"), errors.SessionFailedError("x"), ValueError("x")):
        saved = stage.saved(f"i{type(error).__name__}:[6,7]@4+1", k=1)
        read = cache.cache._hits.read

        def lost(*_: Any, error: Exception = error) -> Any:
            raise error

        cache.cache._hits.read = lost
        with pytest.raises((Refused, ValueError)):
            saved.materialize()
        cache.cache._hits.read = read
    tries = iter("jmnopqrstuv")

    def too_late() -> float:
        with stopped(scrapes.daemon, 0.6):  # On a busy machine it may lag behind, and there is no page.
            refused(lambda: stage.step(f"{next(tries)}:[6,8]@4+1", k=1))
        scrapes.take()
        return scrapes.value("stagecache_failed_merges_total", reason="deadline")

    poll_until(too_late, "a merge past its deadline")
    stage.step("l:[9]@0+1", k=1, wide=Stage._numbers("1", 1))
    scrapes.take()
    cache.close()


def waiting_paths(scrapes: Scrapes) -> None:
    """Room in the log, a hit's rows, a page; the depth of the log while it is worked off; a key without room."""
    stage = stage_of(scrapes.daemon, {"num_blocks": 1 << 14, "stage": "waits"})
    cache: Any = stage.cache
    scrapes.take()
    stage.step("a:[0]@0+4", k=1)
    with stopped(scrapes.daemon, 0.5):
        stage.step("b:[0,1]@4+1", k=1)
    saved = stage.saved("c:[2]@0+1", k=1)
    threading.Timer(0.2, saved.discard).start()
    for number in range(5):
        stage.saved(f"c@{number + 1}+1" if number < 3 else f"d{number}:[{number}]@0+1", k=1).discard()
    session = cache.cache.session
    reset = lambda: Record(0, Kind.RESET, rows=session.epoch)  # noqa: E731
    with stopped(scrapes.daemon, 0.5):
        for _ in range(1030):
            session.append(reset())
    for _ in range(40):
        for _ in range(900):
            session.append(reset())
        scrapes.take()
        if scrapes.value("stagecache_log_depth", stage="waits") and scrapes.value(
            "stagecache_log_oldest_seconds", stage="waits"
        ):
            break
    huge = numbers([1])._replace(dtype="float32", row_shape=(1 << 20,), rows=(b"\0" * (4 << 20),) * 2)
    stage.step("e:[7]@0+2", huge=huge, k=1)  # 256 GiB of pool
    scrapes.take()
    cache.close()


def broken_session(scrapes: Scrapes) -> None:
    """A bad record ends the session: failed, and calls of it are refused."""
    stage = stage_of(scrapes.daemon, {"stage": "broken"})
    cache: Any = stage.cache
    cache.cache._renewals.stop(cache.cache._home)  # which would let the failed session go before a scrape sees it
    stage.step("a:[0]@0+1", k=1)
    scrapes.take()
    cache.cache.session.append(
        Record(0, Kind.SAVE, page=0, rows=1, keys=key_words((99, KeyMode.ROWS)), runs=runs([0, 1]))
    )
    poll_until(cache.cache.session.has_ended, "the session to fail")
    refused(lambda: cache.cache.session.rpc.merge(pb.MergeRequest(sequence=1), 5.0))
    poll_until(lambda: (scrapes.take(), scrapes.value("stagecache_sessions", state="failed"))[1], "the failed session")
    scrapes.take()
    cache.close()


def runs(*start_and_length: list[int]) -> Any:
    return np.array(start_and_length, np.uint32)


def refused_calls(scrapes: Scrapes) -> None:
    """Every reason of a refusal that can be met from outside, and one call of each method."""
    socket = scrapes.daemon.socket
    with Rpc(handshake(socket, "scheduler")) as scheduler:
        watch = scheduler.watch("r")
        next(iter(watch))
        scrapes.take()
        with worker(socket) as rpc:
            wrong_abi = attach_request("r", 16)
            wrong_abi.abi += 1
            refused(lambda: rpc.attach(wrong_abi, 5.0))
            refused(lambda: rpc.lookup(pb.LookupRequest(), 5.0))  # unknown session
            refused(lambda: rpc.attach(attach_request("r", 0), 5.0))
            refused(lambda: rpc.attach(attach_request("r", 1 << 20, key(width=1 << 18)), 5.0))  # 4 TiB: budget
            refused(lambda: rpc.attach(attach_request("r", 1 << 20, key(width=1 << 14)), 5.0))  # 256 GiB: /dev/shm
            rpc.attach(attach_request("r", 16, key(width=1 << 14)), 20.0)
            refused(lambda: rpc.open_key(pb.OpenKeyRequest(key=key(width=17)), 5.0))
            refused(lambda: rpc.lookup(pb.LookupRequest(block_ids=[0], span_tokens=[4], key_ids=[9]), 5.0))
            refused(lambda: rpc.merge(pb.MergeRequest(sequence=10**9), 5.0))
            rpc.lookup(pb.LookupRequest(block_ids=[0], span_tokens=[4]), 5.0)
            with Rpc(handshake(socket, "observer")) as observer:
                observer.stats(5.0)
                refused(lambda: observer.attach(attach_request("r", 16), 5.0))  # an observer may not
                observer.reset(pb.ResetRequest(stage="r", cause="test"), 5.0)
                refused(lambda: observer.reset(pb.ResetRequest(stage="nobody's"), 5.0))
                watch.cancel()
                poll_until(
                    lambda: (scrapes.take(), not scrapes.value("stagecache_schedulers"))[1], "the scheduler to be gone"
                )
                refused(lambda: observer.reset(pb.ResetRequest(stage="r"), 5.0))
            import grpc

            channel = rpc._channel
            with pytest.raises(grpc.RpcError):
                channel.unary_unary("/stagecache.v1.StageCache/Attach")(
                    b"\xff\xff", timeout=5.0, metadata=rpc.credentials.metadata
                )
    large = attach_request("r", 1 << 20)
    large.open_remembered_keys = True
    with worker(socket) as rpc:
        rpc.attach(large, 20.0)  # without its remembered key, which does not fit: a warning in the log
    unlocked = Rpc(handshake(socket, "worker"))
    refused(lambda: unlocked.attach(attach_request("r", 16), 5.0))  # worker lock free
    unlocked.close()
    slow = stage_of(scrapes.daemon, {"stage": "slow", "num_blocks": 1 << 16})
    session = slow.cache.cache.session  # type: ignore[attr-defined]
    every_slot = runs([0, 1 << 18])

    def told_too_late() -> float:
        for _ in range(900):  # a backlog of half a second and more
            session.append(Record(0, Kind.LOST, rows=1 << 18, runs=every_slot))
        with suppress(errors.CallDeadlineError):  # the caller may give up first
            session.rpc.merge(pb.MergeRequest(sequence=session.log.head), 0.1)
        scrapes.take()
        return scrapes.value("stagecache_rpc_refused_total", reason="deadline")

    poll_until(told_too_late, "a refusal for its deadline", 60.0)
    session.rpc.merge(pb.MergeRequest(sequence=1), 5.0)
    crowd = [stage_of(scrapes.daemon, {"stage": "crowd"}) for _ in range(3)]
    refused(lambda: stage_of(scrapes.daemon, {"stage": "crowd"}))  # --max-sessions
    scrapes.take()
    for one in (slow, *crowd):
        one.cache.close()  # type: ignore[attr-defined]
    with WorkerProcess(socket, "dies") as dies:
        scrapes.take()
        dies.kill()
    poll_until(lambda: (scrapes.take(), scrapes.value("stagecache_session_events_total", event="worker_dead"))[1], "it")


def shared_blocks(scrapes: Scrapes) -> None:
    """Blocks that are stored, found, leased, evicted, and dropped with their namespace; calls that are refused."""
    socket = scrapes.daemon.socket
    sharing = SharingWorker(socket)
    unjoined = sharing.save([0], hashes(0))
    sharing.publish([0], hashes(0), unjoined)
    sharing.log_publish([0], hashes(0))
    blocks = sharing.join(sequence=sharing.head).num_blocks
    scrapes.take()
    for number in range(blocks + 2):
        sharing.share(number)
    sharing.share(blocks + 1)
    sharing.publish([9], hashes(blocks + 9), 0)  # never written
    lookup(sharing.rpc, blocks, blocks + 9)
    lookup(sharing.rpc, blocks)
    acquire(sharing.rpc, "r", *range(2, blocks + 2))
    sharing.share(blocks + 10)  # no room: each block is held
    sharing.log_publish([0, 9], hashes(blocks + 10, blocks + 9))
    scrapes.take()
    sharing.rpc.release_blocks(pb.ReleaseBlocksRequest(all=True), 5.0)
    being_copied(scrapes, sharing, blocks + 11)
    refused_namespace = SharingWorker(socket, stage="no room")
    assert not refused_namespace.join().on
    refused_namespace.close()
    scrapes.take()
    refused(lambda: sharing.join(hash_algorithm="xxhash"))
    refused(lambda: lookup(sharing.rpc, 1, namespace=pb.NamespaceRef(namespace_id="0" * 64)))
    sharing.close()
    other = SharingWorker(socket, stage="another")
    assert other.join().on  # in place of the namespace that nobody is in
    scrapes.take()
    other.close()
    replicas = [Replica(socket, stage="replicas") for _ in range(2)]
    prompt = list(range(9))
    for replica in replicas:
        assert replica.join().on
    scrapes.take()
    replicas[0].run(prompt, [0, 1, 2], publish=(0, 1))
    replicas[0].consumed()
    replicas[1].run(prompt, [3, 4, 5], hit=8, fill=(0, 1))
    replicas[1].run(prompt, [3, 4, 5], publish=(0, 1))  # they are known
    replicas[1].run(prompt, [6, 7, 8], fill=(0,), salt="nobody's")
    replicas[1].consumed()
    scrapes.take()
    for replica in replicas:
        replica.cache.reset("other weights")
        replica.run(prompt, [6, 7, 8])
        replica.join()
        replica.consumed()
    scrapes.take()
    for replica in replicas:
        replica.cache.close()


def being_copied(scrapes: Scrapes, sharing: SharingWorker, number: int) -> None:
    """A lookup of a block whose rows are just being copied."""
    stuck = Path(scrapes.daemon.environment["STUCK_WHILE"])
    stuck.touch()
    copying = threading.Thread(target=sharing.share, args=(number,))
    copying.start()
    try:
        pending = pb.BLOCK_STATE_PENDING
        poll_until(lambda: lookup(sharing.rpc, number).states[0] == pending, "the copy to begin")
    finally:
        stuck.unlink()
        copying.join()


def broken_namespaces(scrapes: Scrapes) -> SharingWorker:
    """What the next daemon finds: blocks of which one has a header that is not whole, and a manifest without sense. The
    worker stays in its namespace.
    """
    sharing = SharingWorker(scrapes.daemon.socket, stage="broken")
    joined = sharing.join()
    sharing.share(1, 2)
    segment = shm.open_segment(segment_name(scrapes.daemon.paths.node, joined.namespace_id))
    segment.view.cast("Q")[block_word(0) + B_HASH] ^= 1
    (scrapes.daemon.paths.namespaces / f"{'0' * 64}.json").write_text("{}")
    return sharing


def outage(scrapes: Scrapes) -> None:
    """The daemon is killed under a worker, gone, and back."""
    daemon = scrapes.daemon
    stage = stage_of(daemon, {"stage": "outage", "daemon_grace_s": 0.2})
    cache: Any = stage.cache
    stage.step("a:[0]@0+4", k=1)
    cache.cache.session.watcher.reconnects = 0
    scrapes.take()
    sharing = broken_namespaces(scrapes)
    daemon.kill()
    kept = [stage.saved(f"a@{4 + n}+1", k=1) for n in range(4)]
    for step in kept:
        step.discard()
    stage.step("c:[1]@0+1", k=1)  # waits for a page, once; then the step is local
    stage.step("c@1+1", k=1)
    daemon.start()
    scrapes.take()  # the worker still takes it for gone
    poll_until(lambda: cache.cache.session.watcher.reconnects, "the watch stream to come back", 20.0)
    stage.step("d:[2]@0+1", k=1)
    scrapes.take()
    sharing.close()
    cache.close()


def full_collection(scrapes: Scrapes) -> None:
    """SIGUSR2 has the daemon collect all of its garbage."""
    os.kill(scrapes.daemon.pid, signal.SIGUSR2)
    counted = "stagecache_gc_pause_seconds_count"
    poll_until(lambda: (scrapes.take(), scrapes.value(counted, generation="2"))[1], "a full collection")
    poll_until(lambda: "garbage collected" in scrapes.daemon.log, "the line that tells of it")


def lost_directory(scrapes: Scrapes) -> None:
    """Somebody took the folder away in which sessions are noted down."""
    sessions = scrapes.daemon.paths.sessions
    away = sessions.with_name("away")
    with worker(scrapes.daemon.socket) as rpc:
        sessions.rename(away)
        try:
            with pytest.raises(errors.StageCacheError, match="cannot be noted"):
                rpc.attach(attach_request("lost", 16), 5.0)
        finally:
            away.rename(sessions)
    scrapes.take()


def refused_at_the_end(scrapes: Scrapes) -> None:
    """The daemon is told to stop with a backlog, and works that off: it still answers scrapes, but takes nobody on."""
    slow = stage_of(scrapes.daemon, {"stage": "last", "num_blocks": 1 << 16})
    session = slow.cache.cache.session  # type: ignore[attr-defined]
    with worker(scrapes.daemon.socket) as rpc:
        for _ in range(900):
            session.append(Record(0, Kind.LOST, rows=1 << 18, runs=runs([0, 1 << 18])))
        os.kill(scrapes.daemon.pid, signal.SIGTERM)
        poll_until(lambda: "stopping" in scrapes.daemon.log, "the daemon to stop")
        with pytest.raises(errors.StageCacheError, match="stopping"):
            rpc.attach(attach_request("late", 16), 5.0)
        scrapes.take()
    slow.cache.close()
    process = scrapes.daemon._process
    assert process is not None
    assert process.wait(30) == 0


# ---------------------------------------------------------------- the promise


@pytest.mark.slow
def test_every_exported_series_moves(tmp_path: Path) -> None:
    settings = ("--memory-budget", "1TiB", "--max-sessions", "4", "--shared-bytes", "16KiB")
    hooks = {"STUCK_AT": "after_rows", "STUCK_WHILE": str(tmp_path / "stuck")}
    with metrics_daemon(tmp_path, *settings, program=HOOKED, environment=hooks) as daemon:
        scrapes = Scrapes(daemon)
        first = scrapes.take()
        plain = {name for name, metric in METRICS.items() if "stage" not in metric.labels}
        assert plain <= {name.removesuffix("_count") for name, _ in first}, "every series is there at the start"
        for path in (
            rows_paths, deferred_paths, device_paths, trouble_paths, waiting_paths, broken_session, refused_calls,
            shared_blocks, outage, full_collection, lost_directory, refused_at_the_end,
        ):  # fmt: skip
            path(scrapes)
        still = "\n".join(scrapes.still())
        assert not still, still
        known = {series for metric in METRICS.values() for series in metric.series}
        mine = {name for name, _ in scrapes.low if name.startswith("stagecache_")}
        assert mine <= known, "nothing is exported that the catalog does not name"
