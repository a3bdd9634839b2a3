"""H8, S3: late materialize on other threads while the engine thread runs on, with a yield at every handoff.

The sanitizer wraps each function through which the threads hand something over (tables, pages, extents, log) so that
it gives up the processor, now and then for longer, before and after. The interpreter switches threads every 10 µs.
"""

from __future__ import annotations

import functools
import queue
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from stagecache import Geometry, StageCache
from stagecache.arena import Arena
from stagecache.attachment import Attachment, as_rows
from stagecache.errors import StageCacheError
from stagecache.hits import HitReader
from stagecache.log import LogWriter
from stagecache.pages import StepPages
from stagecache.requests import RequestTable
from stagecache.session import Session
from stagecache.step import NewRequest, SchedulerStep

BLOCKS, SIZE = 24, 4
GEOMETRY = Geometry(BLOCKS, SIZE, staging_capacity_tokens=64, staging_depth=4, arena_bytes=1 << 16)
HANDOFFS: list[tuple[type, tuple[str, ...]]] = [
    (StageCache, ("_take", "_end_step", "_delivered")),
    (Attachment, ("hand_out", "release")),
    (HitReader, ("plan", "records", "read", "release")),
    (Arena, ("allocate", "free", "lease", "may_lease")),
    (StepPages, ("try_claim", "hand_out", "wait")),
    (LogWriter, ("append", "listen")),
    (RequestTable, ("reclaim", "handed_out", "handed_out_all", "finish", "start")),
]


@pytest.fixture
def yields(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Random yields at each handoff; the list counts them."""
    chance, count = random.Random(7), [0]

    def pause() -> None:
        count[0] += 1
        lot = chance.random()
        if lot < 0.02:
            time.sleep(0.001)
        elif lot < 0.5:
            time.sleep(0)

    def yielding(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            pause()
            try:
                return function(*args, **kwargs)
            finally:
                pause()

        return wrapped

    for owner, names in HANDOFFS:
        for name in names:
            monkeypatch.setattr(owner, name, yielding(getattr(owner, name)))
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield count
    sys.setswitchinterval(before)


class Engine:
    """Makes steps of arrivals only: each takes blocks, may hit blocks that hold rows (also of this very step), ends."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.rows = np.zeros(BLOCKS * SIZE)
        self.written: set[int] = set()
        self.batch: list[tuple[str, int, list[int]]] = []
        self.value = 0.0

    def req_ids(self) -> list[str]:
        return [req_id for req_id, _, _ in self.batch]

    def num_computed(self) -> Any:
        return np.array([first for _, first, _ in self.batch])

    def block_table(self) -> Any:
        table = np.zeros((len(self.batch), 8), np.int64)
        for index, (_, _, blocks) in enumerate(self.batch):
            table[index, : len(blocks)] = blocks
        return table

    def step(self, number: int) -> tuple[SchedulerStep, torch.Tensor, dict[str, list[float]]]:
        """A step, the hidden rows that it computes, and what each request must get."""
        free = list(range(BLOCKS))
        self.random.shuffle(free)
        ended = set(self.req_ids())
        self.batch, counts, fresh = [], {}, set()
        for index in range(self.random.randint(1, 3)):
            shared = [block for block in self.written | fresh if block in fresh or block in free]
            self.random.shuffle(shared)
            hit = shared[: self.random.randint(0, 2)]
            free = [block for block in free if block not in hit]
            own = [free.pop() for _ in range(self.random.randint(1, 2))]
            req_id = f"r{number}.{index}"
            self.batch.append((req_id, len(hit) * SIZE, hit + own))
            counts[req_id] = len(own) * SIZE
            fresh.update(own)
        computed: list[float] = []
        for req_id, first, blocks in self.batch:
            for position in range(first, first + counts[req_id]):
                self.value += 1
                self.rows[blocks[position // SIZE] * SIZE + position % SIZE] = self.value
                computed.append(self.value)
        self.written |= fresh
        expected = {
            req_id: [float(self.rows[blocks[at // SIZE] * SIZE + at % SIZE]) for at in range(first + counts[req_id])]
            for req_id, first, blocks in self.batch
        }
        new = [NewRequest(req_id, first, blocks) for req_id, first, blocks in self.batch]
        rows = torch.tensor(computed, dtype=torch.float32)[:, None].expand(-1, 3).contiguous()
        return SchedulerStep(counts, new, finished_req_ids=ended), rows, expected


def materialize_late(cache: StageCache, saved: queue.Queue[Any], wrong: list[str], held: list[Any], seed: int) -> None:
    """A thread that takes steps from the queue when it likes, and keeps some of what it gets."""
    chance = random.Random(seed)
    while (item := saved.get()) is not None:
        step_id, expected = item
        if chance.random() < 0.3:
            time.sleep(chance.random() * 0.003)
        try:
            merged = cache.materialize(step_id, list(expected)).hidden_states
            assert merged is not None
            for req_id, values in expected.items():
                if merged[req_id].tolist() != [[value] * 3 for value in values]:
                    wrong.append(f"step {step_id}, {req_id}: {merged[req_id][:, 0].tolist()} for {values}")
                if chance.random() < 0.2:
                    held.append((merged[req_id], values))
            del held[: max(0, len(held) - 20)]
        except StageCacheError as error:
            wrong.append(f"step {step_id}: {error!r}")


def run(daemon: Any, seed: int, steps: int) -> tuple[list[str], int]:
    """Drive ``steps`` steps with two materializing threads. Returns what was wrong, and the number of hits."""
    engine = Engine(seed)
    cache = StageCache.attach(socket=daemon.socket, model="m", stage="threads", geometry=GEOMETRY, view=engine)
    saved: queue.Queue[Any] = queue.Queue()
    wrong: list[str] = []
    held: list[list[Any]] = [[], []]
    threads = [
        threading.Thread(target=materialize_late, args=(cache, saved, wrong, held[index], index)) for index in (0, 1)
    ]
    try:
        for thread in threads:
            thread.start()
        for number in range(steps):
            step, rows, expected = engine.step(number)
            cache.new_step_starts(step)
            step_id = cache.save_outputs(rows, {}, num_tokens_unpadded=len(rows), num_tokens_padded=len(rows))
            rows.fill_(-1)
            saved.put((step_id, expected))
    finally:
        for _ in threads:
            saved.put(None)
        for thread in threads:
            thread.join(30)
        assert not any(thread.is_alive() for thread in threads)
        cache.close()
    for tensor, values in held[0] + held[1]:
        if tensor.tolist() != [[value] * 3 for value in values]:
            wrong.append(f"S3: a held row changed: {tensor[:, 0].tolist()} for {values}")
    return wrong, cache.counters.hits


@pytest.mark.parametrize("seed", range(3))
def test_late_materialize_on_other_threads_gets_the_original_rows(daemon: Any, yields: list[int], seed: int) -> None:
    """H6, H8, S1, S3: every row exact, and nothing that was handed out changes later."""
    wrong, hits = run(daemon, seed, 250)
    assert not wrong, wrong[:3]
    assert yields[0] > 10_000, "the sanitizer did not run"
    assert hits > 100


def page_freed_first(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = StageCache._take

    def take(self: StageCache, step_id: int, wanted: list[str]) -> Any:
        found = taken(self, step_id, wanted)
        self._saver.pages.hand_out(found[0].page)
        time.sleep(0.002)
        return found

    monkeypatch.setattr(StageCache, "_take", take)


class Silent:
    """A doorbell that nobody hears: the daemon looks at its log five times a second."""

    def release(self) -> None:
        """Do nothing."""


def hit_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    made = LogWriter.__init__

    def make(self: LogWriter, *arguments: Any) -> None:
        made(self, *arguments)
        self._daemon_doorbell = Silent()

    monkeypatch.setattr(LogWriter, "__init__", make)
    monkeypatch.setattr(Session, "wait_consumed", lambda *_: None)


def extent_given_back_while_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Attachment, "hand_out", lambda self, hit, name, raw: as_rows(raw, hit, hit.gathers[name]))


@pytest.mark.parametrize("mutate", [page_freed_first, hit_not_waited_for, extent_given_back_while_held])
def test_a_handoff_that_is_left_out_is_noticed(
    daemon: Any, yields: list[int], monkeypatch: pytest.MonkeyPatch, mutate: Callable[[pytest.MonkeyPatch], None]
) -> None:
    """The control: with one of the handoffs broken, the same run finds wrong rows."""
    mutate(monkeypatch)
    assert run(daemon, 0, 60 if mutate is hit_not_waited_for else 250)[0]
