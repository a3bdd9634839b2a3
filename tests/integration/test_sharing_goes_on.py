"""Shared blocks where something comes late or is gone: a key, a namespace, a record of a publish, the daemon."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from stagecache import sharing
from stagecache.errors import DaemonLostError, DaemonUnavailableError, UnreadableHitError
from stagecache.latecache import LateCache
from stagecache_wire.geometry import Geometry, KeySchema
from stagecache_wire.records import Kind
from stagecache_wire.shm import PREFIX, SHM_DIRECTORY
from stagecache_wire.v1 import stagecache_pb2 as pb
from tests.daemon_process import DaemonProcess, poll_until
from tests.integration.helpers import own_daemon
from tests.integration.replica import (
    BLOCK,
    CONTEXT,
    HIDDEN,
    LATE,
    MODEL,
    NUM_BLOCKS,
    Replica,
    hashes_of,
    rows_of,
    same,
)
from tests.integration.test_sharing_ends import step_without_requests

PROMPT = list(range(100, 114))
OTHER = list(range(200, 214))
SHARED = ("--shared-bytes", "1MiB", "--shared-namespaces", "2")
FULL = (0, 1, 2)


def computes(replica: Replica, prompt: list[int], **more: Any) -> None:
    """The prompt, with its full blocks published."""
    replica.run(prompt, [0, 1, 2, 3], publish=FULL, **more)
    replica.consumed()


def is_served(replica: Replica, prompt: list[int], **more: Any) -> bool:
    """Whether the rows of the prompt's full blocks come from the node, bit for bit; else the hit fails."""
    try:
        _, rows = replica.run(prompt, [9, 4, 7, 5], hit=12, fill=FULL, **more)
    except UnreadableHitError:
        return False
    assert same(rows[HIDDEN.name], rows_of(HIDDEN, prompt, 0, len(prompt)))
    assert same(rows[CONTEXT.name], rows_of(CONTEXT, prompt, 0, len(prompt)))
    return True


def test_a_block_with_rows_of_a_key_that_was_opened_after_the_join_is_not_shared(tmp_path: Path) -> None:
    """H5: who is filled reads what the one who computed it would have read, of that key too."""
    with own_daemon(tmp_path, *SHARED) as daemon:
        one, other = Replica(daemon.socket), Replica(daemon.socket)
        assert one.join().namespace_id == other.join().namespace_id
        one.keys, other.keys = [HIDDEN, CONTEXT, LATE], [HIDDEN, CONTEXT, LATE]
        without = (HIDDEN.name, CONTEXT.name)
        computes(one, PROMPT)
        assert not is_served(other, PROMPT, emit=without)
        computes(one, OTHER, emit=without)
        assert is_served(other, OTHER, emit=without)
        _, rows = other.run(OTHER, [9, 4, 7, 5], hit=12)
        assert not rows[LATE.name][:12].any(), "absent where it was computed: zeros"
        assert same(rows[LATE.name][12:], rows_of(LATE, OTHER, 12, 2))
        # Once they have joined again, the key is part of what they share.
        assert one.join().namespace_id == other.join().namespace_id != ""
        computes(one, PROMPT)
        assert is_served(other, PROMPT)
        one.cache.close()
        other.cache.close()


def joined(replica: Replica) -> bool:
    return replica.cache._saver.sharing._joined()


def forget_manifests(daemon: DaemonProcess) -> None:
    for path in daemon.paths.namespaces.glob("*.json"):
        path.unlink()


def lose_segments(daemon: DaemonProcess) -> None:
    for path in SHM_DIRECTORY.glob(f"{PREFIX}.{daemon.paths.node}.shared.*"):
        path.unlink()


def keep_all(daemon: DaemonProcess) -> None:
    """The control."""


@pytest.mark.parametrize("between", [forget_manifests, lose_segments, keep_all])
def test_a_daemon_that_is_back_without_its_namespaces_is_joined_again(
    tmp_path: Path, between: Callable[[DaemonProcess], None]
) -> None:
    with own_daemon(tmp_path, *SHARED) as daemon:
        one, other = Replica(daemon.socket), Replica(daemon.socket)
        one.join()
        other.join()
        computes(one, PROMPT)
        daemon.kill()
        between(daemon)
        daemon.start()
        assert is_served(other, PROMPT) is (between is keep_all), "what is gone fails, it is not guessed"
        for replica in (one, other):
            poll_until(lambda replica=replica: joined(replica), "the join")
        computes(one, OTHER)
        assert is_served(other, OTHER)
        one.cache.close()
        other.cache.close()


def test_an_engine_whose_model_was_reset_does_not_join_again_by_itself(tmp_path: Path) -> None:
    """R5: nobody has said since what its model is."""
    with own_daemon(tmp_path, *SHARED) as daemon:
        replica = Replica(daemon.socket)
        replica.join()
        replica.cache.reset("other weights")
        computes(replica, PROMPT)
        daemon.kill()
        forget_manifests(daemon)
        daemon.start()
        poll_until(lambda: answers(replica), "the channel to come back", 20.0)
        computes(replica, OTHER)  # the first that it says to a daemon without its namespace
        assert not joined(replica)
        assert replica.cache._saver.sharing.vouched is None
        assert replica.join().on, "its engine may say so"
        replica.cache.close()


def answers(replica: Replica) -> bool:
    """Whether calls of the session reach the daemon."""
    try:
        return bool(replica.cache.session.rpc.stats(2.0).boot_id)
    except DaemonLostError:
        return False


def interrupted_publish(replica: Replica, prompt: list[int], nth: int, *, behind: bool) -> None:
    """A step whose n-th PUBLISH record is interrupted, before or behind it."""
    session, seen = replica.cache.session, 0
    inner = session.append

    def append(record: Any, **more: Any) -> Any:
        nonlocal seen
        seen += record.kind is Kind.PUBLISH
        here = record.kind is Kind.PUBLISH and seen == nth
        if here and not behind:
            raise KeyboardInterrupt
        result = inner(record, **more)
        if here:
            raise KeyboardInterrupt
        return result

    session.append = append  # type: ignore[method-assign]
    try:
        with pytest.raises(KeyboardInterrupt):
            replica.run(prompt, [0, 1, 2, 3], publish=FULL)
    finally:
        session.append = inner  # type: ignore[method-assign]
    replica.consumed()


def test_a_publish_that_is_interrupted_shares_less_and_nothing_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before or behind each record of a step; its blocks had another tenant before."""
    monkeypatch.setattr(sharing, "BLOCKS_A_RECORD", 1)
    with own_daemon(tmp_path, *SHARED) as daemon:
        one, other = Replica(daemon.socket), Replica(daemon.socket)
        one.join()
        other.join()
        for nth, behind in ((1, False), (1, True), (2, False), (2, True), (3, False), (3, True)):
            computes(one, OTHER)
            prompt = [1000 * nth + 500 * behind + token for token in range(14)]
            interrupted_publish(one, prompt, nth, behind=behind)
            kept = lookup_of(other, prompt)
            assert kept == nth - (not behind)
            if kept:
                _, rows = other.run(prompt, [9, 4, 7, 5], hit=4 * kept, fill=range(kept))
                assert same(rows[HIDDEN.name], rows_of(HIDDEN, prompt, 0, 14))
            with suppress(UnreadableHitError):  # The prompt's rows, or none: never those of before.
                _, rows = one.run(prompt, [0, 1, 2, 5], hit=12)
                assert same(rows[HIDDEN.name], rows_of(HIDDEN, prompt, 0, 14))
            computes(one, prompt)
            assert is_served(other, prompt), "the next publish is whole"
        one.cache.close()
        other.cache.close()


def lookup_of(replica: Replica, prompt: list[int]) -> int:
    """Blocks of a prompt that the node keeps."""
    raw = b"".join(hashes_of(prompt))
    request = pb.LookupBlocksRequest(hashes=raw, span_blocks=[len(raw) // 32])
    return replica.cache.session.rpc.lookup_blocks(request, 10.0).hit_blocks[0]


def test_a_worker_whose_daemon_comes_later_shares_what_it_computes_from_then_on(
    tmp_path: Path,
) -> None:
    """It joins with its first session; what it computed before is nowhere, and not shared."""
    daemon = DaemonProcess(tmp_path, *SHARED)
    view = Late(keys=(HIDDEN, CONTEXT))
    late = LateCache(
        DaemonUnavailableError("nobody."), socket=daemon.socket, model="m", stage="shared",
        geometry=Geometry(NUM_BLOCKS, BLOCK, 64, arena_bytes=1 << 16), view=view, keys=(HIDDEN, CONTEXT),
        namespace=MODEL,
    )  # fmt: skip
    assert late.take() is None
    daemon.start()
    try:
        peer = Replica(daemon.socket)
        assert peer.join().on
        computes(peer, OTHER)
        view.cache = poll_until(late.take, "the cache", 20.0)
        step_without_requests(view)
        poll_until(lambda: joined(view), "the join")
        assert is_served(view, OTHER), "what a peer computed before it came"
        computes(view, PROMPT)
        assert is_served(peer, PROMPT)
        view.cache.close()
        peer.cache.close()
    finally:
        daemon.close()


class Late(Replica):
    """A replica that has no cache yet."""

    def __init__(self, keys: Sequence[KeySchema]) -> None:
        self.block_size = BLOCK
        self.keys = list(keys)
        self._part = ("", [], 0)
        self._serial = 0
