"""Blocks that one session computed serve another, whatever happens to either of them or to the daemon between."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")

from stagecache.errors import DaemonLostError, UnreadableHitError, UnsupportedHashError
from stagecache.sharing import Namespace
from stagecache_wire import layout
from stagecache_wire.figures import SHARED_BLOCKS, Daemon
from tests.daemon_process import DaemonProcess
from tests.integration.helpers import own_daemon
from tests.integration.replica import BLOCK, CONTEXT, HIDDEN, LATE, MODEL, Replica, rows_of, same

PROMPT = list(range(100, 114))
"""Three full blocks and two tokens."""
HIT = 12


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    with own_daemon(tmp_path_factory.mktemp("d"), "--shared-bytes", "8MiB", "--shared-namespaces", "32") as daemon:
        yield daemon


@pytest.fixture
def replicas(node: DaemonProcess, request: pytest.FixtureRequest) -> Iterator[tuple[Replica, Replica]]:
    """Two that have joined one namespace, a stage of the test's own."""
    pair = [Replica(node.socket, stage=request.node.name[:40]) for _ in range(2)]
    assert all(replica.join().on for replica in pair)
    yield pair[0], pair[1]
    for replica in pair:
        replica.close()


def told(replica: Replica) -> dict[str, int]:
    """What became of the blocks that a session named."""
    replica.consumed()
    first = layout.D_FIGURES + Daemon.SHARED
    words = replica.cache.session.control.words[first : first + len(SHARED_BLOCKS)].tolist()
    return {name: count for name, count in zip(SHARED_BLOCKS, words, strict=True) if count}


def whole(replica: Replica, rows: dict, tokens: list[int] = PROMPT) -> bool:
    return all(same(rows.get(key.name), rows_of(key, tokens, 0, len(tokens))) for key in replica.keys)


def test_rows_that_one_replica_computed_another_is_served(replicas: tuple[Replica, Replica]) -> None:
    one, other = replicas
    _, computed = one.run(PROMPT, [0, 1, 2, 3], publish=(0, 1, 2))
    assert whole(one, computed)
    assert told(one) == {"stored": 3}
    _, served = other.run(PROMPT, [9, 4, 7, 5], hit=HIT, fill=(0, 1, 2))
    assert whole(other, served)
    assert told(other) == {"filled": 3}
    # From then on it is a local hit like any other.
    _, again = other.run([*PROMPT[:10], 7, 8], [9, 4, 6], hit=8)
    assert whole(other, again, [*PROMPT[:10], 7, 8])


def test_a_span_half_its_own_and_half_from_the_node_is_one_hit(replicas: tuple[Replica, Replica]) -> None:
    one, other = replicas
    one.run(PROMPT, [0, 1, 2, 3], publish=(1, 2))
    one.consumed()
    other.run(PROMPT[:5], [0, 1])
    _, served = other.run(PROMPT, [0, 2, 3, 4], hit=HIT, fill=(1, 2))
    assert whole(other, served)


def test_a_hit_whose_rows_the_node_does_not_keep_errs_and_shows_no_older_row(replicas: tuple[Replica, Replica]) -> None:
    one, other = replicas
    other.run(list(range(16)), [0, 1, 2, 3])
    with pytest.raises(UnreadableHitError):
        other.run(PROMPT, [0, 1, 2, 4], hit=HIT, fill=(0, 1, 2))
    assert told(other) == {"missing": 3}
    one.run(PROMPT, [0, 1, 2, 3], publish=(0, 1, 2), salt="mine")
    one.consumed()
    with pytest.raises(UnreadableHitError):
        other.run(PROMPT, [5, 6, 7, 8], hit=HIT, fill=(0, 1, 2), salt="yours")


def test_deferred_rows_are_shared_once_their_request_is_over(node: DaemonProcess) -> None:
    """W3, R1."""
    keys = (HIDDEN, LATE)
    pair = [Replica(node.socket, keys=keys, deferred=["late"], stage="deferred") for _ in range(2)]
    one, other = pair
    assert all(replica.join().on for replica in pair)
    req_id, _ = one.run(PROMPT, [0, 1, 2, 3], publish=(0, 1, 2))
    assert told(one) == {}
    one.run([1, 2, 3], [5], finish=[req_id])
    assert told(one) == {"stored": 3}
    _, served = other.run(PROMPT, [4, 5, 6, 7], hit=HIT, fill=(0, 1, 2))
    assert whole(other, served)
    for replica in pair:
        replica.close()


def test_a_block_with_a_key_that_the_namespace_has_not_is_not_kept(node: DaemonProcess) -> None:
    """H5: its reader would read zeros where there were rows."""
    pair = [Replica(node.socket, keys=(HIDDEN, CONTEXT), stage="more keys") for _ in range(2)]
    one, other = pair
    one.keys = other.keys = [HIDDEN, CONTEXT, LATE]
    assert all(replica.join().on for replica in pair)
    one.run(PROMPT[:8], [0, 1], publish=(0,), emit=(HIDDEN.name, CONTEXT.name))
    one.run(PROMPT, [2, 3, 4, 5], publish=(1, 2))
    assert told(one) == {"stored": 1, "not_present": 2}
    _, served = other.run(PROMPT[:8], [0, 1], hit=BLOCK, fill=(0,))
    assert same(served[HIDDEN.name], rows_of(HIDDEN, PROMPT, 0, 8))
    assert not served[LATE.name][:BLOCK].any()
    assert same(served[LATE.name][BLOCK:], rows_of(LATE, PROMPT, BLOCK, BLOCK))
    for replica in pair:
        replica.close()


def test_after_a_reset_a_replica_shares_only_when_it_joins_again(replicas: tuple[Replica, Replica]) -> None:
    """R5: unless the reset says that the model is the same."""
    one, other = replicas
    one.run(PROMPT, [0, 1, 2, 3], publish=(0, 1, 2))
    one.consumed()
    other.cache.reset("rows were lost", same_model=True)
    _, served = other.run(PROMPT, [9, 4, 7, 5], hit=HIT, fill=(0, 1, 2))
    assert whole(other, served)
    other.cache.reset("new weights")
    with pytest.raises(UnreadableHitError):
        other.run(PROMPT, [8, 10, 11, 12], hit=HIT, fill=(0, 1, 2))
    assert other.join(Namespace("weights 2", MODEL.hash_algorithm, MODEL.hash_seed, MODEL.dtype)).on
    with pytest.raises(UnreadableHitError):
        other.run(PROMPT, [0, 1, 2, 3], hit=HIT, fill=(0, 1, 2))
    # What was there before is of the model before the reset: whoever joins now does not find it.
    assert other.join().on
    with pytest.raises(UnreadableHitError):
        other.run(PROMPT, [0, 1, 2, 3], hit=HIT, fill=(0, 1, 2))
    assert one.join().on
    one.run(PROMPT, [4, 5, 6, 7], publish=(0, 1, 2))
    one.consumed()
    _, served = other.run(PROMPT, [0, 1, 2, 3], hit=HIT, fill=(0, 1, 2))
    assert whole(other, served)


def test_a_daemon_that_was_killed_keeps_blocks_and_memberships(tmp_path: Path) -> None:
    with own_daemon(tmp_path, "--shared-bytes", "1MiB") as daemon:
        one, other = Replica(daemon.socket), Replica(daemon.socket)
        assert one.join().on
        assert other.join().on
        one.run(PROMPT, [0, 1, 2, 3], publish=(0, 1))
        one.consumed()
        daemon.restart()
        _, served = other.run(PROMPT, [9, 4, 7, 5], hit=8, fill=(0, 1))
        assert whole(other, served)
        one.run(PROMPT, [4, 5, 6, 7], publish=(2,))
        assert told(one) == {"stored": 3}
        one.close()
        late = Replica(daemon.socket)
        assert late.join().cached_blocks == 3
        _, served = late.run(PROMPT, [0, 1, 2, 3], hit=HIT, fill=(0, 1, 2))
        assert whole(late, served)
        for replica in (other, late):
            replica.close()


def test_a_fill_that_cannot_be_logged_shows_no_older_row(tmp_path: Path) -> None:
    """W8: the daemon is away; when it is back, what was filled meanwhile is unknown, and the rest goes on."""
    with own_daemon(tmp_path, "--shared-bytes", "1MiB") as daemon:
        one, other = Replica(daemon.socket), Replica(daemon.socket, daemon_grace_s=0.1)
        assert one.join().on
        assert other.join().on
        one.run(PROMPT, [0, 1, 2, 3], publish=(0, 1, 2))
        other.run(list(range(16)), [0, 1, 2, 3])
        one.consumed()
        other.consumed()
        daemon.kill()
        with pytest.raises(DaemonLostError):
            other.run(PROMPT, [4, 5, 6, 7], hit=HIT)
        with pytest.raises(DaemonLostError):
            other.run(PROMPT, [0, 1, 2, 8], hit=HIT, fill=(0, 1, 2))
        daemon.start()
        other.consumed()
        with pytest.raises(UnreadableHitError):
            other.run(PROMPT, [0, 1, 2, 9], hit=HIT)
        _, served = other.run(PROMPT, [0, 1, 2, 8], hit=HIT, fill=(0, 1, 2))
        assert whole(other, served)
        for replica in (one, other):
            replica.close()


def test_a_daemon_that_shares_nothing_says_so_and_costs_nothing(daemon: DaemonProcess) -> None:
    replica = Replica(daemon.socket, stage="off")
    joined = replica.join()
    assert not joined.on
    assert "--shared-bytes" in joined.why
    _, rows = replica.run(PROMPT, [0, 1, 2, 3], publish=(0, 1, 2))
    assert whole(replica, rows)
    assert replica.cache.publish([(0, b"\0" * 32)]) == 0
    assert told(replica) == {}
    replica.close()


def test_hashes_that_may_collide_are_refused(node: DaemonProcess) -> None:
    replica = Replica(node.socket, stage="xxhash")
    with pytest.raises(UnsupportedHashError):
        replica.join(Namespace("m", "xxhash", "0", "float32"))
    replica.close()
