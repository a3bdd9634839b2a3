"""A consumer that dies on purpose: where its code names a point between two shared stores, and in the middle of one.

``NAMED`` is read from the consumer's source, so a point that somebody adds is killed at without a word here. ``TORN``
are points that only these tests have: half of a store is done, then the process dies.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import signal
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from stagecache_wire import presence, shm
from stagecached import consumer as consumer_module
from stagecached import sharing as sharing_module
from stagecached.consumer import Consumer
from stagecached.keystore import KeyStore
from stagecached.segments import SessionSegments
from stagecached.shared.store import NamespaceStore

NAMED: frozenset[str] = frozenset(re.findall(r"self\._point\(\"(\w+)\"\)", inspect.getsource(consumer_module)))
SHARING: frozenset[str] = frozenset(re.findall(r"self\._point\(\"(\w+)\"\)", inspect.getsource(sharing_module)))
"""Of PUBLISH and FILL records. Which points a namespace's store has, tests/crash/test_shared_killed.py knows."""
TORN: frozenset[str] = frozenset(
    {"torn_claim", "torn_scatter", "torn_written", "torn_gather", "torn_flush", "torn_settle", "torn_close_key"}
)


@dataclass
class Plan:
    """When this process dies: at the ``visit``-th time that ``point`` is reached; never where ``point`` is empty.

    report: called with what is to be told just before.
    """

    point: str
    visit: int
    report: Callable[[dict[str, Any]], None]

    def __post_init__(self) -> None:
        self.visits: Counter[str] = Counter()

    def reached(self, name: str) -> None:
        """Count a point, and die if it is the one."""
        self.visits[name] += 1
        if name == self.point and self.visits[name] == self.visit:
            self.report({"event": "killing", "point": name, "visits": dict(self.visits)})
            os.kill(os.getpid(), signal.SIGKILL)


ASLEEP: frozenset[str] = frozenset({"after_asleep", "after_awake"})
"""Points that a consumer comes to when it was idle for a while: for deaths there it sleeps as soon as it is idle."""


def killing(base: type[Consumer], plan: Plan) -> type[Consumer]:
    """``base`` with its points wired to ``plan``."""

    class Killing(base):  # type: ignore[misc, valid-type]
        warm_s = 0.0 if plan.point in ASLEEP else base.warm_s

        def _point(self, name: str) -> None:
            plan.reached(name)

    return Killing


def killing_store(plan: Plan) -> type[NamespaceStore]:
    """A namespace's store with its points wired to ``plan``."""

    class KillingStore(NamespaceStore):
        def point(self, name: str) -> None:
            plan.reached(name)

    return KillingStore


def tear_stores(plan: Plan) -> None:
    """Make the stores of this process' keys two halves with a point between them."""
    claim, scatter, written = KeyStore.claim, KeyStore.scatter, KeyStore.mark_written
    gather, flush, settle = KeyStore.gather, KeyStore.flush, KeyStore.settle
    close_key = SessionSegments.close_key

    def half_claim(self: KeyStore, span: Any, sequence: int, *, failed: bool) -> None:
        flag = presence.FAILED if failed else 0
        self.claims[span.slots[: span.rows // 2]] = sequence << presence.CLAIM_SHIFT | flag
        plan.reached("torn_claim")
        claim(self, span, sequence, failed=failed)

    def half_scatter(self: KeyStore, page: int, span: Any) -> int:
        half = (span.rows + 1) // 2
        self._pool[span.slots[:half]] = self._pages[page][:half]
        plan.reached("torn_scatter")
        return scatter(self, page, span)

    def half_written(self: KeyStore, span: Any, sequence: int) -> None:
        self.claims[span.slots[: span.rows // 2]] = sequence << presence.CLAIM_SHIFT | presence.WRITTEN
        plan.reached("torn_written")
        written(self, span, sequence)

    def half_gather(self: KeyStore, span: Any, slot_words: Any, epoch_sequence: int, out: Any) -> Any:
        half = (span.rows + 1) // 2
        out[:half] = self._pool[span.slots[:half]]
        plan.reached("torn_gather")
        return gather(self, span, slot_words, epoch_sequence, out)

    def half_flush(self: KeyStore, page: int, slots: Any, claims: Any, keep: Any) -> int:
        some = keep.copy()
        some[(len(slots) + 1) // 2 :] = False
        self._pool[slots[some]] = self._pages[page][: len(slots)][some]
        plan.reached("torn_flush")
        return flush(self, page, slots, claims, keep)

    def half_settle(self: KeyStore, slots: Any, claims: Any, keep: Any, *, failed: bool) -> None:
        some = keep.copy()
        some[(len(slots) + 1) // 2 :] = False
        settle(self, slots, claims, some, failed=failed)
        plan.reached("torn_settle")
        settle(self, slots, claims, keep, failed=failed)

    def half_close(self: SessionSegments, key_id: int) -> None:
        if key_id in self.keys:
            shm.unlink_segment(self.names.staging(key_id))
        plan.reached("torn_close_key")
        close_key(self, key_id)

    patches: dict[type, dict[str, Any]] = {
        KeyStore: {
            "claim": half_claim,
            "scatter": half_scatter,
            "mark_written": half_written,
            "gather": half_gather,
            "flush": half_flush,
            "settle": half_settle,
        },
        SessionSegments: {"close_key": half_close},
    }
    for owner, methods in patches.items():
        for name, method in methods.items():
            setattr(owner, name, method)


def printer(fd: int) -> Callable[[dict[str, Any]], None]:
    """A report that is one JSON line on ``fd``, written at once."""

    def write(event: dict[str, Any]) -> None:
        os.write(fd, json.dumps(event).encode() + b"\n")

    return write
