"""A stage worker without an engine, so that the compose demo has something to show. Needs no torch and no GPU.

It attaches like any worker and plays conversations: each step answers one request, whose prefix is often in the pool
already. Computed rows are logged with a SAVE, prefixes come back with a gather, and every row that comes back is
compared with what was written: a wrong one ends the worker with status 1.

    python demo_worker.py --steps 200     # as many steps, then end; without it: until it is stopped

One record is in flight at a time, so this is no example of speed: ``stagecache.StageCache`` is.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import time
from array import array
from bisect import bisect_left
from dataclasses import dataclass, field

import numpy as np
import posix_ipc

from stagecache.errors import DaemonUnavailableError, StageCacheError
from stagecache.rpc import Rpc, handshake
from stagecache_wire import figures, layout, shm
from stagecache_wire.fence import fence
from stagecache_wire.geometry import Geometry, KeySchema, page_stride
from stagecache_wire.locks import LifeLock
from stagecache_wire.messages import geometry_to_wire, schema_to_wire
from stagecache_wire.records import GATHER_DTYPE, KeyMode, Kind, Record, encode, key_words
from stagecache_wire.v1 import stagecache_pb2 as pb

BLOCKS_A_DOCUMENT = 8
GEOMETRY = Geometry(
    num_blocks=1024, block_size=16, staging_capacity_tokens=256, staging_depth=2, arena_bytes=4 << 20
).checked()
KEYS = (KeySchema("__hidden_states__", "float32", (256,)), KeySchema("codes.audio", "int64", (16,)))
RECORD_TIMEOUT_S = 30.0
HIT_SHARE = 0.7

_W = figures.Worker


class WorkerEnded(RuntimeError):
    """The session is over, or rows were wrong."""


@dataclass
class Key:
    """An open key: its pages, u64 [depth, capacity, words of a row], since rows are opaque."""

    key_id: int
    schema: KeySchema
    pages: np.ndarray = field(repr=False)


class DemoSession:
    """A worker's side of one session: the log, the pages, the arena."""

    def __init__(self, socket: str, stage: str) -> None:
        credentials = handshake(socket, "worker")
        assert credentials.worker_lock is not None
        self._life = LifeLock.wait(credentials.worker_lock, 1.0, create=False)
        self.rpc = Rpc(credentials)
        g = GEOMETRY
        answer = self.rpc.attach(
            pb.AttachRequest(
                abi=layout.ABI,
                model="demo",
                stage=stage,
                pid=os.getpid(),
                geometry=geometry_to_wire(g),
                keys=[schema_to_wire(key) for key in KEYS],
            ),
            60.0,
        )
        self._segment = shm.open_segment(answer.control_segment)
        self.words = self._segment.view.cast("Q")
        self.layout = layout.ControlLayout.of(g)
        self.arena = np.frombuffer(shm.open_segment(answer.arena_segment).map, np.uint64, g.arena_bytes // 8)
        self.keys = [self._key(opened, schema) for opened, schema in zip(answer.keys, KEYS, strict=True)]
        self._daemon_bell = shm.open_semaphore(answer.daemon_doorbell)
        self._worker_bell = shm.open_semaphore(answer.worker_doorbell)
        self.figures = array("Q", bytes(8 * figures.WORKER_WORDS))

    @staticmethod
    def _key(opened: pb.OpenKeyResponse, schema: KeySchema) -> Key:
        flat = np.frombuffer(shm.open_segment(opened.staging_segment).map, np.uint64)
        pages = flat.reshape(GEOMETRY.staging_depth, page_stride(GEOMETRY, schema.row_bytes) // 8)
        rows = pages[:, : GEOMETRY.staging_capacity_tokens * schema.row_bytes // 8]
        return Key(
            opened.key_id,
            schema,
            rows.reshape(GEOMETRY.staging_depth, GEOMETRY.staging_capacity_tokens, schema.row_bytes // 8),
        )

    def do(self, record: Record) -> int:
        """Log a record and wait until the daemon has done it, through restarts of the daemon. Returns its sequence.

        Raises:
            WorkerEnded: the daemon ended the session, or is gone for good.
        """
        sequence = record.sequence = self.words[layout.W_HEAD] + 1
        words, payload = encode(record)
        at = self.layout.payload_word * layout.WORD
        self._segment.view[at : at + len(payload)] = payload
        words[layout.E_SEQUENCE] = 0
        entry = self.layout.entry_word(sequence)
        self.words[entry : entry + layout.ENTRY_WORDS] = memoryview(array("Q", words))
        fence()
        self.words[entry] = sequence
        self.words[layout.W_TIMES + (sequence - 1) % layout.TIME_ENTRIES] = time.monotonic_ns()
        fence()
        self.words[layout.W_HEAD] = sequence
        self._daemon_bell.release()
        deadline = time.monotonic() + RECORD_TIMEOUT_S
        while self.words[layout.D_CONSUMED] < sequence:
            if self.words[layout.D_STATUS] != layout.STATUS_LIVE or time.monotonic() > deadline:
                raise WorkerEnded(f"record {sequence} was not done: the session ended, or the daemon is gone")
            try:
                self._worker_bell.acquire(0.05)
            except (posix_ipc.BusyError, posix_ipc.SignalError):
                continue
        fence()
        return sequence

    def export(self) -> None:
        """Hand the figures to the daemon's metrics."""
        self.figures[_W.EXPORTED_AT] = time.monotonic_ns()
        at = layout.W_FIGURES
        self.words[at : at + figures.WORKER_WORDS] = memoryview(self.figures)

    def close(self) -> None:
        """Detach: the daemon frees the session's memory at once."""
        try:
            self.rpc.detach(5.0)
        except StageCacheError as error:
            print(f"detach: {error}", file=sys.stderr)
        self.rpc.close()
        self._life.release(unlink=True)


class Conversations:
    """Documents of eight blocks each; what each block's rows hold is one number, 0 where nothing was written."""

    def __init__(self, session: DemoSession, seed: int) -> None:
        self.session = session
        self.random = random.Random(seed)
        self.contents = np.zeros((GEOMETRY.num_blocks // BLOCKS_A_DOCUMENT, BLOCKS_A_DOCUMENT), np.uint64)
        self.next_content = 1

    def step(self) -> None:
        """One request: a prefix from the pool, or none; then the rest is computed and saved."""
        document = self.random.randrange(len(self.contents))
        hit = 0
        if self.contents[document, 0] and self.random.random() < HIT_SHARE:
            hit = self.random.randrange(1, BLOCKS_A_DOCUMENT)
        begun = time.perf_counter_ns()
        if hit:
            self._gather(document, hit)
        self._timed("begin", begun)
        begun = time.perf_counter_ns()
        self._save(document, hit)
        self._timed("save", begun)
        counted = self.session.figures
        counted[_W.STEPS] += 1
        counted[_W.MATERIALIZED] += 1
        self.session.export()

    def _gather(self, document: int, blocks: int) -> None:
        """Bring a prefix back and compare every row."""
        session, rows = self.session, blocks * GEOMETRY.block_size
        gathers, offset = np.zeros(len(session.keys), GATHER_DTYPE), 0
        for number, key in enumerate(session.keys):
            gathers[number] = (0, key.key_id, number, 0, offset)
            offset += rows * key.schema.row_bytes
        start = document * BLOCKS_A_DOCUMENT * GEOMETRY.block_size
        session.do(
            Record(
                0,
                Kind.BEGIN,
                spans=np.array([[0, 1, rows, 0]], np.uint32),
                span_runs=np.array([[start, rows]], np.uint32),
                gathers=gathers,
            )
        )
        wanted = np.repeat(self.contents[document, :blocks], GEOMETRY.block_size)
        for gather, key in zip(gathers, session.keys, strict=True):
            width, at = key.schema.row_bytes // 8, int(gather["arena_offset"]) // 8
            found = session.arena[at : at + rows * width].reshape(rows, width)
            if not (found == wanted[:, None]).all():
                raise WorkerEnded(f"document {document}: rows of {key.schema.name} are not those that were written")
            self._moved("merged", rows, rows * key.schema.row_bytes)
        session.figures[_W.HIT_REQUESTS] += 1
        session.figures[_W.HIT_TOKENS] += rows

    def _save(self, document: int, hit: int) -> None:
        """Write the blocks behind the prefix."""
        session, size = self.session, GEOMETRY.block_size
        rows = (BLOCKS_A_DOCUMENT - hit) * size
        self.contents[document, hit:] = self.next_content
        for key in session.keys:
            key.pages[0, :rows] = self.next_content
            self._moved("staged", rows, rows * key.schema.row_bytes)
        self.next_content += 1
        start = (document * BLOCKS_A_DOCUMENT + hit) * size
        keys = key_words(*((key.key_id, KeyMode.ROWS) for key in session.keys))
        session.do(Record(0, Kind.SAVE, page=0, rows=rows, keys=keys, runs=np.array([[start, rows]], np.uint32)))
        session.figures[_W.COMPUTED_TOKENS] += rows
        session.figures[_W.PREFILL_TOKENS] += rows

    def _moved(self, path: str, rows: int, size: int) -> None:
        at = _W.PATHS + 2 * figures.PATHS.index(path)
        self.session.figures[at] += rows
        self.session.figures[at + 1] += size

    def _timed(self, phase: str, begun: int) -> None:
        spent, number = time.perf_counter_ns() - begun, figures.PHASES.index(phase)
        self.session.figures[_W.PHASE_NS + number] += spent
        bucket = bisect_left(figures.BOUNDS_NS, spent)
        self.session.figures[_W.PHASE_BUCKETS + number * figures.BUCKETS + bucket] += 1


def attach(socket: str, stage: str, patience_s: float) -> DemoSession:
    """A session, as soon as a daemon answers.

    Raises:
        DaemonUnavailableError: none does within ``patience_s`` seconds.
    """
    deadline = time.monotonic() + patience_s
    while True:
        try:
            return DemoSession(socket, stage)
        except DaemonUnavailableError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


def main() -> int:
    """Attach, play, detach; the process' exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--socket", default=os.environ.get("STAGECACHE_SOCKET", "/run/stagecache/stagecached.sock"))
    parser.add_argument("--stage", default=os.environ.get("STAGECACHE_STAGE", "demo"))
    parser.add_argument("--rate", type=float, default=20.0, help="steps a second")
    parser.add_argument("--steps", type=int, default=0, help="end after so many; 0: never")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    try:
        session = attach(arguments.socket, arguments.stage, patience_s=60.0)
    except StageCacheError as error:
        print(f"demo worker: {error}", file=sys.stderr)
        return 1
    print(f"attached as session {session.rpc.credentials.session_id}", flush=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    play, done = Conversations(session, arguments.seed), 0
    try:
        while not arguments.steps or done < arguments.steps:
            play.step()
            done += 1
            time.sleep(1.0 / arguments.rate)
    except WorkerEnded as error:
        print(f"demo worker: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        pass
    session.close()
    print(f"{done} steps, {play.session.figures[_W.HIT_TOKENS]} rows came back, every one right", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
