"""A small engine for tests of figures: conversations whose turns hit their own prefix, batches that prefill and decode.

Rows are a function of position, so nothing here checks them; tests/rules and tests/model do.
"""

from __future__ import annotations

import http.client
import socket as sockets
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from stagecache import HIDDEN_KEY, Geometry, KeySchema, ModelCachePolicy, StageCache
from stagecache.step import CachedRequests, NewRequest, SchedulerStep
from tests.daemon_process import DaemonProcess


@contextmanager
def metrics_daemon(folder: Path, *arguments: str, **more: Any) -> Iterator[DaemonProcess]:
    """A daemon with its metrics port on a free one; ``url`` is where. more: of ``DaemonProcess``."""
    process = DaemonProcess(folder, "--metrics-port", "0", *arguments, **more)
    process.start()
    try:
        yield process
    finally:
        process.close()


def url_of(daemon: DaemonProcess) -> str:
    """Where the newest start of this daemon serves its page, with a slash at the end."""
    return next(word.removeprefix("url=") for word in reversed(daemon.log.split()) if word.startswith("url=http://"))


def get(url: str, timeout_s: float = 20.0) -> str:
    with urllib.request.urlopen(url, timeout=timeout_s) as answer:
        return str(answer.read().decode())


def get_unix(socket: Path, path: str, method: str = "GET") -> tuple[int, str]:
    """Status and body, over the daemon's Unix socket."""
    connection = http.client.HTTPConnection("localhost", timeout=20.0)
    connection.sock = sockets.socket(sockets.AF_UNIX)
    connection.sock.connect(str(socket))
    connection.request(method, path)
    answer = connection.getresponse()
    body = answer.read().decode()
    connection.close()
    return answer.status, body


class Batch:
    """The live batch."""

    def __init__(self, capacity: int = 64, blocks: int = 512) -> None:
        self.ids: list[str] = []
        self.first = np.zeros(capacity, np.int64)
        self.table = np.zeros((capacity, blocks), np.int64)

    def req_ids(self) -> list[str]:
        return self.ids

    def num_computed(self) -> Any:
        return self.first

    def block_table(self) -> Any:
        return self.table


@dataclass
class Talk:
    """One conversation: its blocks stay cached between turns."""

    name: str
    blocks: list[int] = field(default_factory=list)
    tokens: int = 0
    turns: int = 0


class MiniEngine:
    """Drives one StageCache. ``width``: of hidden rows, bfloat16; a second key has one int64 a token."""

    def __init__(
        self,
        socket: Path | str,
        stage: str = "thinker",
        *,
        model: str = "demo/omni-7b",
        num_blocks: int = 256,
        block_size: int = 16,
        width: int = 64,
        audio: bool = True,
        rank: int = 0,
        seed: int = 0,
        policy: ModelCachePolicy | None = None,
    ) -> None:
        keys = [KeySchema(HIDDEN_KEY, "bfloat16", (width,))]
        if audio:
            keys.append(KeySchema("codes.audio", "int64", ()))
        self.block_size, self.audio, self.num_blocks = block_size, audio, num_blocks
        self.view = Batch(blocks=num_blocks)
        self.cache = StageCache.attach(
            socket=socket,
            model=model,
            stage=stage,
            geometry=Geometry(num_blocks, block_size, staging_capacity_tokens=1024, arena_bytes=8 << 20),
            view=self.view,
            policy=policy,
            keys=keys,
            rank=rank,
        )
        self.random = np.random.default_rng(seed)
        self.free = list(range(num_blocks - 1, -1, -1))
        self.talks: list[Talk] = []
        self.hidden = torch.arange(1024 * width).view(1024, width).to(torch.bfloat16)
        self.codes = torch.arange(1024)
        self.next = 0

    def turn(self, requests: int = 2, decodes: int = 6, new_tokens: int = 24) -> None:
        """One turn of some conversations: a prefill step, decode steps, finish."""
        batch = [self._talk(index) for index in range(requests)]
        new: list[NewRequest] = []
        counts: dict[str, int] = {}
        for slot, talk in enumerate(batch):
            computed = talk.tokens // self.block_size * self.block_size
            talk.tokens += new_tokens
            talk.turns += 1
            self._grow(talk, talk.tokens + decodes)
            req_id = f"{talk.name}.{talk.turns}"
            new.append(NewRequest(req_id, computed, list(talk.blocks)))
            counts[req_id] = talk.tokens - computed
            self._show(slot, computed, talk)
        ids = list(counts)
        self.step(SchedulerStep(counts, new), ids)
        for number in range(decodes):
            for slot, talk in enumerate(batch):
                self._show(slot, talk.tokens + number, talk)
            cached = CachedRequests(ids, set(), [None] * len(ids), [talk.tokens + number for talk in batch])
            self.step(SchedulerStep(dict.fromkeys(ids, 1), [], cached), ids)
        for talk in batch:
            talk.tokens += decodes
        self.finished = set(ids)

    finished: set[str] = frozenset()  # type: ignore[assignment]

    def step(self, step: SchedulerStep, ids: list[str], *, materialize: bool = True, **outputs: Any) -> Any:
        """begin, save, and materialize or leave it."""
        step.finished_req_ids, self.finished = set(self.finished), set()
        n = step.total_num_scheduled_tokens
        self.cache.new_step_starts(step)
        self.view.ids = ids
        if self.audio:
            outputs.setdefault("codes.audio", self.codes[:n])
        step_id = self.cache.save_outputs(self.hidden[:n], outputs, num_tokens_unpadded=n, num_tokens_padded=n)
        return self.cache.materialize(step_id, ids) if materialize else step_id

    def close(self) -> None:
        self.cache.close()

    def _talk(self, index: int) -> Talk:
        open_talks = self.talks[-8:]
        if index < len(open_talks) and self.random.random() < 0.75:
            talk = open_talks[index]
            if talk.tokens < self.num_blocks * self.block_size // 8:
                return talk
        self.next += 1
        talk = Talk(f"c{self.next}")
        self.talks.append(talk)
        return talk

    def _grow(self, talk: Talk, tokens: int) -> None:
        while len(talk.blocks) * self.block_size < tokens:
            if not self.free:
                oldest = next(other for other in self.talks if other.blocks and other is not talk)
                self.talks.remove(oldest)
                self.free, oldest.blocks = oldest.blocks[::-1], []
            talk.blocks.append(self.free.pop())

    def _show(self, slot: int, first: int, talk: Talk) -> None:
        self.view.first[slot] = first
        self.view.table[slot, : len(talk.blocks)] = talk.blocks
