"""Random sequences of two replicas that share blocks, on the reference model and on real sessions, with less room for
shared blocks than the sequences fill. ``STAGECACHE_SHARING_SEQUENCES`` sets how many.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

pytest.importorskip("torch")

from tests.integration.helpers import own_daemon
from tests.model.sharing import KINDS, Event, Mismatch, Node, Pair, Replica, SharingCache, SharingReference

SEQUENCES = int(os.environ.get("STAGECACHE_SHARING_SEQUENCES", "0"))
ROOM = "28KiB"
"""Seven blocks."""

_BYTE = st.integers(0, 255)
_events = st.lists(
    st.builds(Event, st.integers(0, 1), st.sampled_from(KINDS), _BYTE, _BYTE, _BYTE), min_size=6, max_size=20
)
plans = st.tuples(_events, _events, _events).map(lambda parts: [event for part in parts for event in part])


class Sessions:
    """Two sessions for many sequences: before each, both leave what the last one shared behind."""

    def __init__(self, socket: Path):
        self._socket = str(socket)
        self._caches: list[SharingCache] = []
        self.filled = self.missing = 0

    def run(self, events: list[Event]) -> None:
        """
        Raises:
            Mismatch: they disagree; the sessions are gone then, so that the next run starts clean.
        """
        if not self._caches:
            self._caches = [SharingCache(self._socket, "sharing") for _ in range(2)]
        try:
            self._run(events)
        except BaseException:
            self.close()
            raise

    def _run(self, events: list[Event]) -> None:
        node = Node()
        for cache in self._caches:
            cache.cache.reset("the next sequence")
        for cache in self._caches:
            assert cache.join().on
        pair = Pair(self._caches, node)
        pair.run(events)
        for replica in pair.replicas:
            self.filled += replica.filled
            self.missing += replica.missing
            replica.end()

    def close(self) -> None:
        for cache in self._caches:
            cache.close()
        self._caches.clear()


@pytest.fixture(scope="module")
def sessions(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sessions]:
    with own_daemon(tmp_path_factory.mktemp("d"), "--shared-bytes", ROOM) as daemon:
        opened = Sessions(daemon.socket)
        yield opened
        opened.close()


def agree(sessions: Sessions, examples: int, number: int) -> None:
    """Run ``examples`` random sequences; the same number gives the same ones."""

    @seed(number)
    @settings(max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(events=plans)
    def agrees(events: list[Event]) -> None:
        sessions.run(events)

    agrees()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Do not use the `random` module")
@pytest.mark.parametrize("sequences", [60, pytest.param(SEQUENCES or 5000, marks=pytest.mark.soak)])
@pytest.mark.timeout(3600)
def test_replicas_that_share_blocks_follow_every_rule_in_random_sequences(sessions: Sessions, sequences: int) -> None:
    """G2, H2, H4, R5, W8, W9: rows after a FILL are those that were published, and by the model of now."""
    before = sessions.filled, sessions.missing

    def enough() -> bool:
        return sessions.filled - before[0] > sequences // 4 and sessions.missing - before[1] > sequences // 20

    # What a seed draws depends on the modules that are loaded (hypothesis tries constants of theirs), so do the counts.
    for number in range(sequences, sequences + 5):
        agree(sessions, SEQUENCES or sequences, number)
        if enough():
            break
    assert enough()


def _always_there(self: SharingReference, blocks: list, held: list) -> None:
    """A model by which nothing is ever missing."""
    _fill(self, blocks, [self.node.blocks.get((self.generation, name)) is not None for _, name in blocks])


def _one_generation(self: Node, generation: int) -> int:
    """A model by which a reset leads nowhere."""
    return generation


_fill = SharingReference.fill


@pytest.mark.slow
@pytest.mark.parametrize(("owner", "name", "wrong"), [
    (SharingReference, "fill", _always_there),
    pytest.param(Node, "reset", _one_generation, marks=pytest.mark.soak),
    (SharingReference, "publish", lambda self, blocks: None),
    (Replica, "held", lambda self, hashes: [True] * len(hashes)),
])  # fmt: skip
def test_the_comparison_sees_a_model_with_one_rule_less(
    sessions: Sessions, monkeypatch: pytest.MonkeyPatch, owner: type, name: str, wrong: object
) -> None:
    """The control."""
    monkeypatch.setattr(owner, name, wrong)
    with pytest.raises(Mismatch):
        many_from_a_seed(sessions, 7)


def many_from_a_seed(sessions: Sessions, number: int) -> None:
    """Sequences of the same kind, without hypothesis: it would shrink what it finds."""
    rng = Random(number)
    for _ in range(600):
        kinds = [rng.choice(KINDS) for _ in range(rng.randint(20, 60))]
        sessions.run([Event(rng.randrange(2), kind, *(rng.randrange(256) for _ in range(3))) for kind in kinds])
