"""Shared blocks where something ends: a session that is made anew, a reset beside a join, a replaced request."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from stagecache.errors import DaemonLostError, DaemonUnavailableError, StageCacheError, UnreadableHitError
from stagecache.rpc import Rpc
from stagecache.sharing import BlockSharing, Namespace
from stagecache.step import NewRequest, SchedulerStep
from tests.daemon_process import DaemonProcess, poll_until
from tests.integration.helpers import own_daemon
from tests.integration.replica import CONTEXT, HIDDEN, LATE, MODEL, Replica, hashes_of, rows_of, same

PROMPT = list(range(100, 114))
OLD = list(range(200, 208))
SHARED = ("--shared-bytes", "8MiB")


def step_without_requests(replica: Replica, **attributes: Any) -> None:
    step: Any = SchedulerStep({})
    for name, value in attributes.items():
        setattr(step, name, value)
    replica.cache.new_step_starts(step)


def next_session_is_there(replica: Replica) -> None:
    """It waits to be taken by the next step."""
    renewals = replica.cache._renewals
    poll_until(lambda: renewals.pending is not None and renewals.pending.session is not None, "another session")


def shares(replica: Replica) -> bool:
    return replica.cache._saver.sharing._joined()


@pytest.mark.parametrize("cause", ["engine", "worker", "operator"])
def test_a_reset_beside_a_renewal_is_not_undone_by_the_join_in_the_background(tmp_path: Path, cause: str) -> None:
    """R5: the weights may be others since, so what the node keeps of before is not read."""
    with own_daemon(tmp_path, *SHARED) as daemon:
        one, other = Replica(daemon.socket), Replica(daemon.socket)
        assert one.join().on
        assert other.join().on
        if cause == "operator":
            reset = [
                sys.executable,
                "-m",
                "stagecache.cli",
                "reset",
                "shared",
                "--force",
                "--socket",
                str(daemon.socket),
            ]
            subprocess.run(reset, check=True, capture_output=True, timeout=30)
            poll_until(lambda: other.cache.session.watcher.reset_cause, "the reset")
            poll_until(lambda: one.cache.session.watcher.reset_cause, "the reset")
            one.cache.session.watcher.reset_cause = None  # This one has loaded nothing.
        daemon.stop()
        daemon.start()
        for replica in (one, other):
            next_session_is_there(replica)
        step_without_requests(one)
        poll_until(lambda: shares(one), "the join in the background")
        one.run(PROMPT, [0, 1, 2, 3], publish=(0, 1, 2))
        one.consumed()
        step_without_requests(other, **({"stagecache_epoch": 1, "stagecache_model": 1} if cause == "engine" else {}))
        if cause == "worker":
            other.cache.reset("new weights")
        asked = other.cache._saver.sharing
        if cause != "operator":
            poll_until(lambda: asked._answer is not None, "the answer to the join")
        with pytest.raises(UnreadableHitError):
            other.run(PROMPT, [9, 4, 7, 5], hit=12, fill=(0, 1, 2))
        assert not shares(other)
        one.cache.close()
        other.cache.close()


def test_a_session_made_anew_shares_again_also_where_the_daemon_died_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with own_daemon(tmp_path, *SHARED) as daemon:
        replica, peer = Replica(daemon.socket), Replica(daemon.socket)
        replica.join()
        peer.join()
        daemon.stop()
        daemon.start()
        next_session_is_there(replica)
        inner, dies = Rpc.join_namespace, [daemon.kill, daemon.start]

        def join(self: Rpc, *arguments: Any) -> Any:
            if len(dies) == 2:
                dies.pop(0)()
            return inner(self, *arguments)

        monkeypatch.setattr(Rpc, "join_namespace", join)
        step_without_requests(replica)
        poll_until(lambda: len(dies) == 1, "the death")
        dies.pop()()
        poll_until(lambda: shares(replica), "the join in the background", 20.0)
        replica.run(PROMPT, [0, 1, 2, 3], publish=(0, 1, 2))
        replica.consumed()
        _, rows = replica.run(PROMPT, [9, 4, 7, 5], hit=12, fill=(0, 1, 2))
        assert same(rows[HIDDEN.name], rows_of(HIDDEN, PROMPT, 0, 14))
        replica.cache.close()
        peer.cache.close()


@pytest.mark.parametrize("why", ["off", "renewed"])
def test_a_fill_for_a_session_that_shares_nothing_shows_no_older_row(tmp_path: Path, why: str) -> None:
    """W8: the blocks have a new tenant, whose rows are nowhere."""
    with own_daemon(tmp_path, "--shared-bytes", "1MiB", "--shared-namespaces", "1") as daemon:
        replica, keeper = Replica(daemon.socket), Replica(daemon.socket)
        assert replica.join().on
        keeper.join()
        replica.cache.reset("new weights")
        if why == "off":
            assert not replica.join(Namespace("weights 2", "sha256_cbor", "seed", "float32")).on
        else:
            daemon.stop()
            daemon.start()
            poll_until(lambda: step_without_requests(replica) or replica.cache.counters.renewals, "another session")
        replica.run(OLD, [0, 1])
        with pytest.raises(UnreadableHitError):
            replica.run([*PROMPT[:8], 1, 2], [0, 1, 2], hit=8, fill=(0, 1))
        replica.cache.close()
        keeper.cache.close()


def run_named(
    replica: Replica,
    req_id: str,
    tokens: Sequence[int],
    blocks: Sequence[int],
    *,
    finished: Iterable[str] = (),
    published: Mapping[str, Any] | None = None,
    settled: Mapping[str, Any] | None = None,
) -> None:
    """A step of one request whose id and whose blocks' names are given."""
    step: Any = SchedulerStep({req_id: len(tokens)}, finished_req_ids=set(finished))
    step.scheduled_new_reqs = [NewRequest(req_id, 0, (list(blocks),))]
    step.stagecache_published, step.stagecache_settled = dict(published or {}), dict(settled or {})
    replica.cache.new_step_starts(step)
    replica._part = req_id, list(blocks), 0
    live: dict[str, torch.Tensor] = {key.name: rows_of(key, tokens, 0, len(tokens)) for key in replica.keys}
    saved = replica.cache.save_outputs(
        live.pop(HIDDEN.name), live, num_tokens_unpadded=len(tokens), num_tokens_padded=len(tokens)
    )
    replica.cache.materialize(saved, [req_id])


@pytest.mark.parametrize("how", ["replaced", "settled"])
def test_blocks_that_wait_for_their_requests_end_go_with_its_blocks(tmp_path: Path, how: str) -> None:
    """R3, R2: with deferred keys a block is published when its request ends, if it is the request's still."""
    with own_daemon(tmp_path, *SHARED) as daemon:
        one, other = (Replica(daemon.socket, keys=(HIDDEN, LATE), deferred=["late"]) for _ in range(2))
        assert one.join().on
        assert other.join().on
        first, second, third = PROMPT[:4], OLD[:4], OLD[4:]
        name = hashes_of(first)[0]
        if how == "replaced":
            run_named(one, "a", first, [0], published={"a": [(0, name)]})
            run_named(one, "a", second, [1])
        else:
            run_named(one, "a", first, [0])
            run_named(one, "x", second, [1], finished=["a"], settled={"a": [(0, name)]})
            run_named(one, "a", second, [2])
        run_named(one, "b", third, [0], published={"b": [(0, hashes_of(third)[0])]})
        run_named(one, "c", second, [3], finished=["b"])
        run_named(one, "e", second, [4], finished=["a"])
        one.consumed()
        if how == "replaced":
            with pytest.raises(UnreadableHitError):
                other.run([*first, 1, 2], [9, 4], hit=4, fill=(0,))
        else:
            _, rows = other.run([*first, 1, 2], [9, 4], hit=4, fill=(0,))
            assert same(rows[HIDDEN.name][:4], rows_of(HIDDEN, first, 0, 4))
        _, rows = other.run([*third, 1, 2], [8, 5], hit=4, fill=(0,))
        assert same(rows[HIDDEN.name][:4], rows_of(HIDDEN, third, 0, 4)), "the control: b's block is under b's name"
        assert not one.cache._saver.sharing._held
        one.cache.close()
        other.cache.close()


def test_a_daemon_that_stops_behind_its_answer_costs_no_step(
    fresh_daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its segments are gone before they were opened."""

    def stopping_behind(method: str) -> None:
        inner = getattr(Rpc, method)

        def call(self: Rpc, *arguments: Any) -> Any:
            answer = inner(self, *arguments)
            monkeypatch.setattr(Rpc, method, inner)
            fresh_daemon.stop()
            return answer

        monkeypatch.setattr(Rpc, method, call)

    replica = Replica(fresh_daemon.socket, keys=(HIDDEN,))
    replica.keys = [HIDDEN, CONTEXT]
    stopping_behind("open_key")
    _, rows = replica.run(PROMPT[:6], [0, 1])
    assert same(rows[CONTEXT.name], rows_of(CONTEXT, PROMPT, 0, 6))
    # It would attach anew by itself, and could take the answer that is meant for the next one.
    replica.cache.close()
    fresh_daemon.start()
    stopping_behind("attach")
    with pytest.raises(DaemonUnavailableError, match="right behind its answer"):
        Replica(fresh_daemon.socket)
    fresh_daemon.start()


@pytest.mark.parametrize("call", ["begin", "fill", "reset"])
def test_what_interrupts_the_begin_of_a_step_makes_no_older_row_readable(tmp_path: Path, call: str) -> None:
    """W8, R5: after an interrupt anywhere in these calls a hit on their blocks fails, as after a lost step."""
    with own_daemon(tmp_path, *SHARED) as daemon:
        replica = Replica(daemon.socket)
        assert replica.join().on
        cache, saver = replica.cache, replica.cache._saver
        interrupted = 0
        for owner, name in (
            (cache._planner, "plan"),
            (saver.sharing, "fill"),
            (saver.epochs, "follow"),
            (saver.epochs, "reset"),
        ):
            replica.run(OLD, [0, 1])

            def interrupt(*_: Any, **__: Any) -> Any:
                raise KeyboardInterrupt

            inner = getattr(owner, name)
            setattr(owner, name, interrupt)
            try:
                if call == "begin":
                    replica.run(PROMPT[:8], [0, 1])
                elif call == "fill":
                    cache.fill([(0, hashes_of(PROMPT)[0])])
                else:
                    cache.reset("weights")
            except KeyboardInterrupt:
                interrupted += 1
            else:
                setattr(owner, name, inner)
                continue
            setattr(owner, name, inner)
            with pytest.raises((UnreadableHitError, DaemonLostError, StageCacheError)):
                replica.run([*OLD[:4], 1, 2], [0, 2], hit=4)
        assert interrupted
        replica.cache.close()


def test_a_fill_waits_for_the_answer_to_a_join_that_the_daemon_has_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scheduler's lease may be there before this process has heard that it has joined."""
    with own_daemon(tmp_path, *SHARED) as daemon:
        one, other = Replica(daemon.socket), Replica(daemon.socket)
        assert one.join().on
        one.run(PROMPT, [0, 1, 2, 3], publish=(0, 1, 2))
        one.consumed()
        done, filling = threading.Event(), threading.Event()
        ask, fill = Rpc.join_namespace, BlockSharing.fill

        def late(self: Rpc, *arguments: Any) -> Any:
            answer = ask(self, *arguments)
            done.set()
            assert filling.wait(20)
            return answer

        def fills(self: BlockSharing, blocks: Any) -> int:
            filling.set()
            return fill(self, blocks)

        monkeypatch.setattr(Rpc, "join_namespace", late)
        monkeypatch.setattr(BlockSharing, "fill", fills)
        other.cache.join_later(MODEL)
        assert done.wait(20)
        _, rows = other.run(PROMPT, [9, 4, 7, 5], hit=12, fill=(0, 1, 2))
        assert same(rows[HIDDEN.name], rows_of(HIDDEN, PROMPT, 0, 14))
        one.cache.close()
        other.cache.close()
