"""A scheduler's hold on shared blocks, on a real daemon: what it was told is there stays there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest.importorskip("torch")

from stagecache.errors import DaemonLostError
from stagecache.shim.block_leases import BlockLeases
from tests.daemon_process import DaemonProcess, poll_until
from tests.integration.helpers import own_daemon
from tests.integration.replica import Replica, hashes_of

PROMPT = list(range(100, 114))
HASHES = hashes_of(PROMPT)


class Clock:
    """Seconds that pass when told."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@contextmanager
def leases_of(daemon: DaemonProcess, stage: str, clock: Clock | None = None) -> Iterator[BlockLeases]:
    leases = BlockLeases(str(daemon.socket), stage, f"engine of {stage}", clock=clock or Clock())
    try:
        yield leases
    finally:
        leases.close()


@contextmanager
def publisher(daemon: DaemonProcess, stage: str) -> Iterator[Replica]:
    replica = Replica(daemon.socket, stage=stage, engine=f"engine of {stage}")
    assert replica.join().on
    replica.run(PROMPT, [0, 1, 2, 3], publish=(0, 1, 2))
    replica.consumed()
    yield replica
    replica.close()


def held_by_leases(replica: Replica) -> int:
    return sum(space.leases for space in replica.cache.session.rpc.stats(5.0).namespaces)


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    with own_daemon(tmp_path_factory.mktemp("d"), "--shared-bytes", "1MiB", "--shared-namespaces", "8") as daemon:
        yield daemon


def test_a_lease_holds_the_leading_blocks_until_it_is_released(node: DaemonProcess) -> None:
    with publisher(node, "released") as replica, leases_of(node, "released") as leases:
        assert leases.acquire("a", HASHES) == 3
        assert leases.acquire("b", [HASHES[0], b"?" * 32, HASHES[2]]) == 1
        assert held_by_leases(replica) == 2
        assert leases.acquire("a", HASHES[1:2]) == 1
        leases.release(["b", "never seen"])
        poll_until(lambda: held_by_leases(replica) == 1, "the end of b's lease and of a's first one")
        assert len(leases) == 1
        leases.close()
        poll_until(lambda: held_by_leases(replica) == 0, "no lease")


def test_an_engine_without_a_worker_in_the_namespace_holds_nothing(node: DaemonProcess) -> None:
    with publisher(node, "other"), leases_of(node, "nobody") as leases:
        assert leases.acquire("a", HASHES) == 0
        assert not leases.last_error


def test_after_the_model_changed_nothing_is_held_until_the_worker_has_said_so(node: DaemonProcess) -> None:
    """R5: the scheduler knows of a reset before its worker has logged it."""
    with publisher(node, "changed") as replica, leases_of(node, "changed") as leases:
        leases.model_changed()
        assert leases.acquire("a", HASHES) == 0
        replica.cache.reset("new weights")
        replica.consumed()
        assert leases.acquire("a", HASHES) == 0
        replica.run(PROMPT, [4, 5, 6, 7], publish=(0,))
        replica.consumed()
        assert leases.acquire("a", HASHES) == 1
        leases.model_changed()
        assert replica.join().on
        replica.run(PROMPT, [8, 9, 10, 11], publish=(0, 1))
        replica.consumed()
        assert leases.acquire("a", HASHES) == 2


def test_a_daemon_that_is_gone_costs_one_try_a_second_and_its_successor_knows_the_leases(tmp_path: Path) -> None:
    clock = Clock()
    with (
        own_daemon(tmp_path, "--shared-bytes", "1MiB") as daemon,
        publisher(daemon, "killed") as replica,
        leases_of(daemon, "killed", clock) as leases,
    ):
        assert leases.acquire("a", HASHES) == 3
        daemon.kill()
        assert leases.acquire("b", HASHES) == 0
        assert leases.last_error
        daemon.start()
        assert leases.acquire("b", HASHES) == 0, "it is not asked again at once"

        def acquired() -> bool:
            clock.now += 1.5
            return leases.acquire("c", HASHES[:1]) == 1

        poll_until(acquired, "the new daemon to be found")
        assert not leases.last_error

        def known() -> bool:
            try:
                return held_by_leases(replica) == 2
            except DaemonLostError:  # The replica's own connection comes back in its own time.
                return False

        poll_until(known, "both leases at the new daemon")


def test_a_daemon_that_shares_nothing_lets_no_kv_in(daemon: DaemonProcess) -> None:
    with leases_of(daemon, "off") as leases:
        assert leases.acquire("a", HASHES) == 0


def test_without_a_daemon_nothing_is_held_and_nothing_raised(tmp_path: Path) -> None:
    leases = BlockLeases(str(tmp_path / "nobody.sock"), "s", "e")
    assert leases.acquire("a", HASHES) == 0
    leases.model_changed()
    assert leases.acquire("a", HASHES) == 0
    leases.close()
