"""Node-shared blocks through a real daemon: what one session stored another finds, and nobody finds what is not his."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

import pytest

from stagecache import errors
from stagecache.control import connect_observer, ping
from stagecache.rpc import Rpc, handshake
from stagecache_wire.locks import LifeLock
from stagecache_wire.shm import SHM_DIRECTORY
from stagecache_wire.v1 import stagecache_pb2 as pb
from stagecached.index import BlockHasher, ExtraKeys, MultiModalSpan
from stagecached.shared.layout import B_SEAL
from stagecached.shared.manager import segment_name
from stagecached.shared.manifest import NamespaceManifests
from stagecached.shared.segment import SharedSegment
from tests.daemon_process import DaemonProcess, poll_until
from tests.integration.helpers import own_daemon
from tests.integration.sharing_worker import (
    BLOCK_SIZE,
    Holder,
    SharingWorker,
    acquire,
    hashes,
    lookup,
    rows_of,
)

STORED, KNOWN = pb.PUBLISH_STATE_STORED, pb.PUBLISH_STATE_KNOWN


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    with own_daemon(tmp_path_factory.mktemp("d"), "--shared-bytes", "1MiB", "--shared-namespaces", "8") as process:
        yield process


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    """A daemon with room for one namespace of few blocks: a test that joins another drops the one before it."""
    with own_daemon(tmp_path_factory.mktemp("d"), "--shared-bytes", "16KiB") as process:
        yield process


def namespaces(daemon: DaemonProcess) -> list[pb.NamespaceStats]:
    with connect_observer(daemon.socket) as observer:
        return list(observer.stats().namespaces)


def segments(daemon: DaemonProcess) -> list[str]:
    return [name for name in daemon.shm_files() if ".shared." in name]


def check_rows(daemon: DaemonProcess) -> int:
    """Hold every sealed block of every namespace against its hash; how many there are."""
    manifests = NamespaceManifests(daemon.paths.namespaces)
    count = 0
    for stats in namespaces(daemon):
        geometry = manifests.load(stats.namespace_id).geometry()
        segment = SharedSegment.open(segment_name(daemon.paths.node, stats.namespace_id), geometry)
        for block_id, header in enumerate(segment.headers):
            if header[B_SEAL]:
                count += 1
                for schema, region in zip(geometry.keys, segment.regions, strict=True):
                    expected = rows_of(header[:4].tobytes(), schema)
                    assert region[block_id].tobytes() == expected.tobytes(), f"block {block_id} of {schema.name}"
    return count


def test_what_one_replica_published_another_finds(daemon: DaemonProcess) -> None:
    first, second = SharingWorker(daemon.socket), SharingWorker(daemon.socket, engine="other")
    try:
        joined = first.join()
        assert joined.on
        assert second.join().namespace_id == joined.namespace_id
        assert lookup(second.rpc, 1, 2, 3).hit_tokens == [0]
        assert first.share(1, 2) == [STORED, STORED]
        found = lookup(second.rpc, 1, 2, 3, per_key=True)
        assert (list(found.hit_blocks), list(found.hit_tokens)) == ([2], [2 * BLOCK_SIZE])
        assert (found.states[0], found.ends[0]) == (pb.BLOCK_STATE_MISS, pb.PREFIX_END_NOT_STORED)
        assert list(found.key_names) == ["__hidden_states__", "wide"]
        assert list(found.key_states) == [pb.BLOCK_STATE_MISS] * 2
        assert list(lookup(second.rpc, 1, 2).ends) == [pb.PREFIX_END_WHOLE]
        assert second.share(1, 9) == [KNOWN, STORED]
        assert check_rows(daemon) >= 3
    finally:
        first.close()
        second.close()


def test_blocks_outlive_the_worker_that_stored_them(daemon: DaemonProcess) -> None:
    worker = SharingWorker(daemon.socket)
    worker.join(model_fingerprint="outlives")
    worker.share(1, 2, 3)
    worker.close()
    again = SharingWorker(daemon.socket)
    try:
        assert again.join(model_fingerprint="outlives").cached_blocks == 3
        assert list(lookup(again.rpc, 1, 2, 3).hit_blocks) == [3]
    finally:
        again.close()


def test_many_lookups_travel_in_one_call(daemon: DaemonProcess) -> None:
    worker = SharingWorker(daemon.socket)
    try:
        worker.join(model_fingerprint="batched")
        worker.share(1, 2, 3)
        request = pb.LookupBlocksRequest(hashes=hashes(1, 2, 3, 4, 2, 9), span_blocks=[2, 2, 1, 0, 1])
        answer = worker.rpc.lookup_blocks(request, 5.0)
        assert list(answer.hit_blocks) == [2, 1, 1, 0, 0]
        whole, missing = pb.PREFIX_END_WHOLE, pb.PREFIX_END_NOT_STORED
        assert list(answer.ends) == [whole, missing, whole, whole, missing]
    finally:
        worker.close()


def test_another_model_stage_or_layout_is_another_namespace(daemon: DaemonProcess) -> None:
    worker, stage = SharingWorker(daemon.socket), SharingWorker(daemon.socket, stage="other")
    try:
        ids = {
            worker.join(**change).namespace_id
            for change in (
                {},
                {"model_fingerprint": "weights 2"},
                {"hash_algorithm": "sha256"},
                {"hash_seed": "0"},
                {"tensor_parallel_size": 2},
                {"key_ids": [0]},
            )
        }
        ids.add(stage.join().namespace_id)
        assert len(ids) == 7
        assert "" not in ids
    finally:
        worker.close()
        stage.close()


TOKENS = list(range(100, 111))
HASHER = BlockHasher(BLOCK_SIZE, "seed")
IDENTITIES = {
    "nothing": (ExtraKeys(), pb.SpanIdentity()),
    "salt": (ExtraKeys(cache_salt="s"), pb.SpanIdentity(cache_salt="s")),
    "lora": (ExtraKeys(lora_name="l"), pb.SpanIdentity(lora_name="l")),
    "image": (
        ExtraKeys(mm_spans=(MultiModalSpan("i1", 1, 5),)),
        pb.SpanIdentity(mm_identifiers=["i1"], mm_offsets=[1], mm_lengths=[5]),
    ),
    "other image": (
        ExtraKeys(mm_spans=(MultiModalSpan("i2", 1, 5),)),
        pb.SpanIdentity(mm_identifiers=["i2"], mm_offsets=[1], mm_lengths=[5]),
    ),
}


def test_equal_tokens_of_another_salt_lora_or_image_are_never_shared(daemon: DaemonProcess) -> None:
    """Each content is stored, one after another; only lookups of the very same content find it."""
    worker = SharingWorker(daemon.socket)
    try:
        worker.join(model_fingerprint="identities")
        stored: set[str] = set()
        for name, (extra, _) in IDENTITIES.items():
            raw = b"".join(HASHER.hash_blocks(TOKENS, extra))
            block_ids = list(range(len(raw) // 32))
            worker.publish(block_ids, raw, worker.save(block_ids, raw))
            stored.add(name)
            answer = worker.rpc.lookup_blocks(
                pb.LookupBlocksRequest(
                    token_ids=TOKENS * len(IDENTITIES),
                    span_tokens=[len(TOKENS)] * len(IDENTITIES),
                    identities=[identity for _, identity in IDENTITIES.values()],
                ),
                5.0,
            )
            full = len(TOKENS) // BLOCK_SIZE
            expected = [full if other in stored else 0 for other in IDENTITIES]
            assert list(answer.hit_blocks) == expected
            partial, missing = pb.PREFIX_END_PARTIAL_BLOCK, pb.PREFIX_END_NOT_STORED
            assert list(answer.ends) == [partial if count else missing for count in expected]
        assert check_rows(daemon)
    finally:
        worker.close()


def test_tokens_cannot_be_looked_up_where_only_the_engine_hashes(daemon: DaemonProcess) -> None:
    worker = SharingWorker(daemon.socket)
    try:
        worker.join(model_fingerprint="pickled", hash_algorithm="sha256")
        with pytest.raises(errors.UnsupportedHashError, match="sha256_cbor"):
            worker.rpc.lookup_blocks(pb.LookupBlocksRequest(token_ids=TOKENS, span_tokens=[len(TOKENS)]), 5.0)
    finally:
        worker.close()


def test_a_block_is_kept_only_where_every_key_is_present(daemon: DaemonProcess) -> None:
    worker = SharingWorker(daemon.socket)
    try:
        worker.join(model_fingerprint="present")
        raw = hashes(1)
        assert worker.publish([0], raw, 0) == [pb.PUBLISH_STATE_NOT_PRESENT]  # never written
        sequence = worker.save([0], raw, without=1)
        assert worker.publish([0], raw, sequence) == [pb.PUBLISH_STATE_NOT_PRESENT]
        assert worker.publish([0], raw, worker.save([0], raw)) == [STORED]
        (stats,) = (one for one in namespaces(daemon) if one.model_fingerprint == "present")
        assert dict(stats.skipped) == {"not_present": 2}
    finally:
        worker.close()


def test_a_session_that_has_not_joined_shares_nothing(daemon: DaemonProcess) -> None:
    worker = SharingWorker(daemon.socket)
    try:
        assert worker.share(1) == [pb.PUBLISH_STATE_NOT_JOINED]
        assert list(lookup(worker.rpc, 1).ends) == [pb.PREFIX_END_NOT_JOINED]
        assert acquire(worker.rpc, "r", 1) == 0
    finally:
        worker.close()


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (pb.LookupBlocksRequest(hashes=b"\0" * 33, span_blocks=[1]), "whole number of hashes"),
        (pb.LookupBlocksRequest(hashes=b"\0" * 32, span_blocks=[2]), "spans of 2 hashes, 1 were given"),
        (pb.LookupBlocksRequest(hashes=b"\0" * 32, token_ids=[1], span_tokens=[1]), "not by both"),
        (pb.LookupBlocksRequest(hashes=b"\0" * 32 * 70_000, span_blocks=[70_000]), "70000"),
        (pb.LookupBlocksRequest(namespace=pb.NamespaceRef(namespace_id="f" * 64)), "keeps no namespace"),
        (
            pb.LookupBlocksRequest(token_ids=[1] * 8, span_tokens=[8], identities=[pb.SpanIdentity()] * 2),
            "2 identities",
        ),
        (
            pb.LookupBlocksRequest(token_ids=[1], span_tokens=[1], identities=[pb.SpanIdentity(mm_offsets=[1])]),
            "an identifier, an offset and a length",
        ),
        (pb.AcquireBlocksRequest(request_ids=["a"], hashes=b"\0" * 32, span_blocks=[]), "1 requests, 0 spans"),
        (pb.AcquireBlocksRequest(request_ids=["a", "a"], hashes=b"\0" * 64, span_blocks=[1, 1]), "named twice"),
        (pb.AcquireBlocksRequest(request_ids=[""], span_blocks=[0]), "request id"),
        (pb.PublishBlocksRequest(block_ids=[64], hashes=b"\0" * 32), "outside the 64"),
        (pb.PublishBlocksRequest(block_ids=[1], hashes=b""), "spans of 1 hashes, 0"),
        (pb.PublishBlocksRequest(sequence=99), "99 was not logged"),
        (
            pb.JoinNamespaceRequest(model_fingerprint="f", hash_algorithm="xxhash", tensor_parallel_size=1),
            "not collide",
        ),
        (pb.JoinNamespaceRequest(model_fingerprint="f", hash_algorithm="sha256"), "must be at least 1"),
        (pb.JoinNamespaceRequest(hash_algorithm="sha256", tensor_parallel_size=1), "fingerprint"),
        (pb.JoinNamespaceRequest(key_ids=[7]), "key id 7"),
        (pb.JoinNamespaceRequest(key_ids=[0, 0]), "twice"),
    ],
)
def test_every_number_of_a_call_is_checked(
    daemon: DaemonProcess, refused: SharingWorker, request_: object, words: str
) -> None:
    name = type(request_).__name__.removesuffix("Request")
    calls = {
        "LookupBlocks": refused.rpc.lookup_blocks,
        "AcquireBlocks": refused.rpc.acquire_blocks,
        "PublishBlocks": refused.rpc.publish_blocks,
        "JoinNamespace": refused.rpc.join_namespace,
    }
    with pytest.raises(errors.StageCacheError, match=words):
        calls[name](request_, 5.0)  # type: ignore[operator]


@pytest.fixture(scope="module")
def refused(daemon: DaemonProcess) -> Iterator[SharingWorker]:
    worker = SharingWorker(daemon.socket, engine="refused")
    worker.join(model_fingerprint="refused")
    yield worker
    worker.close()


def test_roles_that_may_not_share_are_refused(daemon: DaemonProcess) -> None:
    with Rpc(handshake(daemon.socket, "observer")) as observer:
        for call, request in (
            (observer.join_namespace, pb.JoinNamespaceRequest()),
            (observer.acquire_blocks, pb.AcquireBlocksRequest()),
            (observer.publish_blocks, pb.PublishBlocksRequest()),
        ):
            with pytest.raises(errors.TokenRefusedError):
                call(request, 5.0)  # type: ignore[operator]


def test_a_scheduler_that_could_die_unseen_gets_no_lease(daemon: DaemonProcess) -> None:
    with (
        Rpc(handshake(daemon.socket, "scheduler")) as scheduler,
        pytest.raises(errors.AttachError, match="holds no lock"),
    ):
        acquire(scheduler, "r", 1, namespace=pb.NamespaceRef(stage="s", engine="e"))


def test_a_scheduler_means_the_namespace_of_its_engines_workers(daemon: DaemonProcess) -> None:
    worker, other = SharingWorker(daemon.socket, engine="e1"), SharingWorker(daemon.socket, engine="e2")
    credentials = handshake(daemon.socket, "scheduler", engine="e1")
    assert credentials.worker_lock is not None
    lock = LifeLock(credentials.worker_lock)
    try:
        worker.join(model_fingerprint="one")
        other.join(model_fingerprint="two")
        worker.share(1)
        other.share(2)
        with Rpc(credentials) as scheduler:
            mine, others = (pb.NamespaceRef(stage="s", engine=engine) for engine in ("e1", "e2"))
            assert [lookup(scheduler, n, namespace=mine).hit_blocks[0] for n in (1, 2)] == [1, 0]
            assert [lookup(scheduler, n, namespace=others).hit_blocks[0] for n in (1, 2)] == [0, 1]
            assert acquire(scheduler, "r", 1, 2, namespace=mine) == 1
            nobody = pb.NamespaceRef(stage="s", engine="e3")
            assert lookup(scheduler, 1, namespace=nobody).ends[0] == pb.PREFIX_END_NOT_JOINED
            assert acquire(scheduler, "r", 1, namespace=nobody) == 0
            assert scheduler.release_blocks(pb.ReleaseBlocksRequest(all=True), 5.0).released == 1
    finally:
        worker.close()
        other.close()
        lock.release()


def test_ranks_of_one_engine_in_different_namespaces_get_nothing(daemon: DaemonProcess) -> None:
    first, second = SharingWorker(daemon.socket, engine="tp"), SharingWorker(daemon.socket, engine="tp")
    try:
        first.join(model_fingerprint="rank")
        first.share(1)
        mine = pb.NamespaceRef(stage="s", engine="tp")
        with Rpc(handshake(daemon.socket, "scheduler")) as scheduler:
            assert lookup(scheduler, 1, namespace=mine).ends[0] == pb.PREFIX_END_NOT_JOINED
            second.join(model_fingerprint="rank")
            assert list(lookup(scheduler, 1, namespace=mine).hit_blocks) == [1]
    finally:
        first.close()
        second.close()


def test_leased_blocks_are_never_evicted_and_a_lookup_saves_nothing(small: DaemonProcess) -> None:
    worker = SharingWorker(small.socket)
    try:
        capacity = worker.join(model_fingerprint="leased").num_blocks
        for number in range(capacity):
            worker.share(number)
        assert acquire(worker.rpc, "r", 0, 1) == 2
        for _ in range(3):
            assert list(lookup(worker.rpc, 2).hit_blocks) == [1]
        for number in range(capacity, 2 * capacity - 2):
            assert worker.share(number) == [STORED]
        assert [lookup(worker.rpc, n).hit_blocks[0] for n in (0, 1, 2)] == [1, 1, 0]
        assert lookup(worker.rpc, 2).ends[0] == pb.PREFIX_END_EVICTED
        assert acquire(worker.rpc, "all", *range(capacity, 2 * capacity - 2)) == capacity - 2
        assert worker.share(3 * capacity) == [pb.PUBLISH_STATE_NO_ROOM]
        assert worker.rpc.release_blocks(pb.ReleaseBlocksRequest(request_ids=["r", "none"]), 5.0).released == 1
        assert worker.share(3 * capacity) == [STORED]
        assert [lookup(worker.rpc, n).hit_blocks[0] for n in (0, 1)] == [1, 0]  # the tail of a span goes first
        assert check_rows(small) == capacity
    finally:
        worker.close()


@pytest.mark.parametrize("role", ["worker", "scheduler"])
def test_leases_of_a_killed_client_are_gone_within_a_second(daemon: DaemonProcess, role: str) -> None:
    worker = SharingWorker(daemon.socket)
    holder = None
    try:
        worker.join()
        worker.share(1, 2)
        holder = Holder(daemon.socket, role, 1, 2)
        assert holder.held == 2
        assert leases(daemon) == 1
        holder.kill()
        killed = time.monotonic()
        poll_until(lambda: leases(daemon) == 0, "the lease to end", 1.0)
        assert time.monotonic() - killed < 1.0
        assert not [path for path in SHM_DIRECTORY.iterdir() if holder.owner in path.name]
    finally:
        if holder is not None:
            holder.kill()
        worker.close()


def leases(daemon: DaemonProcess) -> int:
    return sum(stats.leases for stats in namespaces(daemon))


@pytest.mark.parametrize(("role", "dies"), [("worker", "after"), ("scheduler", "after"), ("scheduler", "before")])
def test_a_killed_daemon_loses_no_block_and_no_lease(small: DaemonProcess, role: str, dies: str) -> None:
    """The next daemon finds the blocks, holds what was held, and lets go of it with its holder: also where that one
    died while there was no daemon."""
    worker, model = SharingWorker(small.socket), f"killed {role} {dies}"
    holder = None
    try:
        capacity = worker.join(model_fingerprint=model).num_blocks
        for number in range(capacity):
            worker.share(number)
        holder = Holder(small.socket, role, 0, 1, model=model)
        small.kill()
        if dies == "before":
            holder.kill()
        small.start()
        assert list(lookup(worker.rpc, *range(capacity)).hit_blocks) == [capacity]
        assert check_rows(small) == capacity
        # The session is still a member, without joining again.
        shared = [worker.share(number)[0] for number in range(capacity, 2 * capacity)]
        kept = [lookup(worker.rpc, n).hit_blocks[0] for n in (0, 1)]
        if dies == "after":
            assert (shared, kept) == ([STORED] * capacity, [1, 1])
        else:
            assert (shared, kept) == ([STORED] * capacity, [0, 0])
        assert leases(small) == (1 if dies == "after" else 0)
        holder.kill()
        poll_until(lambda: leases(small) == 0, "the lease to end", 1.0)
    finally:
        if holder is not None:
            holder.kill()
        worker.close()


def test_leases_are_claimed_again_after_a_restart(small: DaemonProcess) -> None:
    worker = SharingWorker(small.socket)
    try:
        worker.join(model_fingerprint="claimed")
        worker.share(1, 2, 3)
        before = worker.rpc.acquire_blocks(
            pb.AcquireBlocksRequest(request_ids=["a", "b"], hashes=hashes(1, 2, 1, 3), span_blocks=[2, 2]), 5.0
        )
        assert list(before.held) == [2, 2]
        small.restart()
        assert namespaces(small)[0].held == 3
        again = worker.rpc.acquire_blocks(
            pb.AcquireBlocksRequest(request_ids=["b"], hashes=hashes(1, 2), span_blocks=[2], all=True), 10.0
        )
        assert again.boot_id != before.boot_id
        assert list(again.held) == [2]
        (stats,) = namespaces(small)
        assert (stats.held, stats.leases) == (2, 1)
        assert worker.rpc.release_blocks(pb.ReleaseBlocksRequest(request_ids=["a", "b"]), 5.0).released == 1
        assert namespaces(small)[0].held == 0
    finally:
        worker.close()


def test_a_daemon_without_shared_bytes_keeps_nothing(tmp_path: Path) -> None:
    with own_daemon(tmp_path) as daemon:
        worker = SharingWorker(daemon.socket)
        try:
            joined = worker.join()
            assert not joined.on
            assert "--shared-bytes" in joined.why
            assert list(lookup(worker.rpc, 1).ends) == [pb.PREFIX_END_OFF]
            assert acquire(worker.rpc, "r", 1) == 0
            assert worker.share(1) == [pb.PUBLISH_STATE_NOT_JOINED]
            assert not segments(daemon)
        finally:
            worker.close()


def test_a_namespace_that_nobody_uses_makes_room_and_one_in_use_does_not(small: DaemonProcess) -> None:
    first, second = SharingWorker(small.socket), SharingWorker(small.socket)
    try:
        assert first.join(model_fingerprint="old").on
        first.share(1)
        refused = second.join(model_fingerprint="new")
        assert not refused.on
        assert "--shared-namespaces" in refused.why
        first.close()
        assert second.join(model_fingerprint="new").on
        assert [stats.model_fingerprint for stats in namespaces(small)] == ["new"]
        assert len(segments(small)) == 1
    finally:
        second.close()


def test_a_stopped_daemon_gives_shared_memory_back_and_one_that_keeps_sessions_keeps_it(tmp_path: Path) -> None:
    daemon = DaemonProcess(tmp_path, "--shared-bytes", "16KiB")
    daemon.start()
    worker = SharingWorker(daemon.socket)
    credentials = handshake(daemon.socket, "scheduler", engine="e")
    assert credentials.worker_lock is not None
    lock = LifeLock(credentials.worker_lock)
    with Rpc(credentials) as scheduler:
        worker.join()
        worker.share(1)
        assert acquire(scheduler, "r", 1, namespace=pb.NamespaceRef(stage="s", engine="e")) == 1
        daemon.stop(signal.SIGUSR1)
        assert segments(daemon)
        daemon.start()
        assert list(lookup(worker.rpc, 1).hit_blocks) == [1]
        assert leases(daemon) == 1
    worker.close()
    daemon.close()  # nothing is left, though the scheduler lives
    lock.release()


@pytest.mark.parametrize("folder", ["namespaces", "sessions"])
def test_a_join_that_cannot_be_noted_is_refused_and_may_be_tried_again(tmp_path: Path, folder: str) -> None:
    with own_daemon(tmp_path, "--shared-bytes", "1MiB") as daemon:
        worker = SharingWorker(daemon.socket)
        notes = daemon.paths.sessions.with_name(folder)
        notes.rename(notes.with_name("away"))
        files = daemon.shm_files()
        with pytest.raises(errors.StageCacheError, match=r"join of .* cannot be noted") as caught:
            worker.join()
        assert "df" in caught.value.remedy
        if folder == "namespaces":
            assert daemon.shm_files() == files
        assert worker.share(1) == [pb.PUBLISH_STATE_NOT_JOINED]
        notes.with_name("away").rename(notes)
        assert worker.join().on
        assert worker.share(1) == [pb.PUBLISH_STATE_STORED]
        worker.close()


def test_a_segment_that_no_manifest_names_is_swept(small: DaemonProcess) -> None:
    worker = SharingWorker(small.socket)
    try:
        worker.join(model_fingerprint="swept")
        worker.share(1)
        small.kill()
        stray = SHM_DIRECTORY / segment_name(small.paths.node, sha256(b"stray").hexdigest())
        stray.write_bytes(b"x")
        for manifest in small.paths.namespaces.iterdir():
            manifest.write_text("{")
        small.start()
        assert not stray.exists()
        assert not segments(small)
        assert worker.share(1) == [pb.PUBLISH_STATE_NOT_JOINED]
        assert worker.join(model_fingerprint="swept").on
        assert worker.share(1) == [STORED]
    finally:
        worker.close()


@contextmanager
def dying(daemon: DaemonProcess, point: str) -> Iterator[None]:
    """In place of ``daemon`` one that dies at a point; ends once it has, with ``daemon`` started again."""
    program = Path(__file__).with_name("dying_daemon.py")
    command = [sys.executable, str(program), point, "--socket", str(daemon.socket), *daemon.arguments]
    daemon.kill()
    process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    try:
        poll_until(lambda: serves(daemon), "the dying daemon to serve", 20.0)
        yield
        assert process.wait(10.0) == -signal.SIGKILL
    finally:
        process.kill()
        process.wait()
    daemon.start()


def serves(daemon: DaemonProcess) -> bool:
    try:
        ping(daemon.socket, timeout_s=2.0)
    except errors.StageCacheError:
        return False
    return True


@pytest.mark.crash
def test_a_daemon_that_dies_making_storing_or_dropping_leaves_what_can_be_gone_on_with(small: DaemonProcess) -> None:
    worker = SharingWorker(small.socket)
    late = SharingWorker(small.socket, stage="another")
    try:
        with dying(small, "before_namespace_manifest"), pytest.raises(errors.DaemonLostError):
            worker.join(model_fingerprint="dies")
        assert not segments(small)
        assert worker.join(model_fingerprint="dies").on
        worker.share(1, 2)
        with dying(small, "after_rows"), pytest.raises(errors.DaemonLostError):
            worker.share(3)
        assert [lookup(worker.rpc, n).hit_blocks[0] for n in (1, 2, 3)] == [1, 1, 0]
        assert worker.share(3) == [STORED]
        assert check_rows(small) == 3
        worker.close()
        with dying(small, "before_namespace_unlink"), pytest.raises(errors.DaemonLostError):
            late.join(model_fingerprint="late")
        assert not segments(small)
        assert late.join(model_fingerprint="late").on
        assert late.share(1) == [STORED]
    finally:
        late.close()
