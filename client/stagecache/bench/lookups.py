"""Lookups in the block index over gRPC, from one client: 64 hashes each, the first half of them stored."""

from __future__ import annotations

import random
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

from stagecache.bench.batch import BLOCK_SIZE
from stagecache.bench.contenders import Ours
from stagecache.bench.measure import WrongRowsError, process_cpu_ns, run_step
from stagecache.bench.workloads import Prefill
from stagecache.local_daemon import LocalDaemon
from stagecache.rpc import Rpc
from stagecache_wire.v1 import stagecache_pb2 as pb
from stagecache_wire.v1 import stagecache_pb2_grpc as pb_grpc

HASHES: Final = 64
STORED_BLOCKS: Final = 1024
TIMEOUT_S: Final = 30.0
WAYS: Final = {"one by one": (1, 1), "8 calls in flight": (1, 8), "16 a call": (16, 1)}
"""Lookups in one call, calls in flight."""

_NAMESPACE: Final = pb.JoinNamespaceRequest(
    model_fingerprint="bench", hash_algorithm="sha256_cbor", hash_seed="bench", dtype="bfloat16", tensor_parallel_size=1
)


@dataclass
class LookupsResult:
    """One way of asking.

    per_second: lookups a second, a figure for each round. latency_us: of each call; one at a time only.
    daemon_cpu_us: the daemon's CPU a lookup.
    """

    way: str
    batch: int
    in_flight: int
    per_second: list[float] = field(default_factory=list)
    latency_us: list[float] = field(default_factory=list)
    daemon_cpu_us: list[float] = field(default_factory=list)


def measure_lookups(
    *, rounds: int = 5, lookups: int = 2000, say: Callable[[str], None] = lambda _: None
) -> list[LookupsResult]:
    """Start a daemon, store blocks of real rows, and ask in every way in turn, ``rounds`` times.

    Raises:
        WrongRowsError: a block was not stored, or an answer is not what is stored.
    """
    results = [LookupsResult(way, batch, in_flight) for way, (batch, in_flight) in WAYS.items()]
    arguments = ["--shared-bytes", "64MiB", "--log-level", "warning"]
    with (
        tempfile.TemporaryDirectory(prefix="stagecache-bench-") as folder,
        LocalDaemon(Path(folder), arguments=arguments) as daemon,
    ):
        assert daemon.pid is not None
        ours, stored = _store(daemon.socket)
        try:
            rpc = ours.cache.session.rpc
            requests = {batch: list(_requests(stored, batch)) for batch, _ in WAYS.values()}
            for turn in range(rounds + 1):
                say(f"lookups: round {turn}")
                for result in results:
                    _ask(rpc, daemon.pid, result, requests[result.batch], lookups, keep=turn > 0)
        finally:
            ours.close()
    return results


def _store(socket: Path) -> tuple[Ours, list[bytes]]:
    """A session whose prompt's blocks are kept, and their hashes in order."""
    workload = Prefill(STORED_BLOCKS * BLOCK_SIZE, 2048, 16, 0)
    lane = workload.lane()
    ours = Ours(lane.batch, socket, workload.shape, workload.geometry)
    steps = workload.block(lane)
    for step in steps:
        run_step(ours, step)
    ours.quiet()
    session = ours.cache.session
    joined = session.rpc.join_namespace(_NAMESPACE, TIMEOUT_S)
    hashes = [sha256(b"%d" % index).digest() for index in range(STORED_BLOCKS)]
    request = pb.PublishBlocksRequest(
        sequence=session.log.head, block_ids=steps[0].requests[0].blocks[:STORED_BLOCKS], hashes=b"".join(hashes)
    )
    states = session.rpc.publish_blocks(request, TIMEOUT_S).states
    if not joined.on or list(states) != [pb.PUBLISH_STATE_STORED] * STORED_BLOCKS:
        raise WrongRowsError(f"the blocks of the bench were not stored: {joined.why or set(states)}")
    return ours, hashes


def _requests(stored: list[bytes], batch: int) -> Iterator[tuple[pb.LookupBlocksRequest, list[int]]]:
    """Calls of ``batch`` lookups each, with the answers that they must get. Hits begin anywhere in what is stored."""
    rng = random.Random(0)
    for number in range(256):
        parts, expected = [], []
        for at in range(batch):
            first = rng.randrange(STORED_BLOCKS - HASHES // 2)
            missing = [sha256(b"missing %d %d %d" % (number, at, i)).digest() for i in range(HASHES // 2)]
            parts += [*stored[first : first + HASHES // 2], *missing]
            expected.append(HASHES // 2)
        yield pb.LookupBlocksRequest(hashes=b"".join(parts), span_blocks=[HASHES] * batch), expected


def _ask(
    rpc: Rpc,
    daemon_pid: int,
    result: LookupsResult,
    requests: list[tuple[pb.LookupBlocksRequest, list[int]]],
    lookups: int,
    *,
    keep: bool,
) -> None:
    calls = lookups // result.batch
    latencies: list[float] = []
    cpu = process_cpu_ns(daemon_pid)
    begun = time.perf_counter()
    if result.in_flight == 1:
        for number in range(calls):
            request, expected = requests[number % len(requests)]
            asked = time.perf_counter()
            answer = rpc.lookup_blocks(request, TIMEOUT_S)
            latencies.append(1e6 * (time.perf_counter() - asked))
            _check(answer, expected)
    else:
        stub = pb_grpc.StageCacheStub(rpc._channel)
        open_calls: deque[tuple[Any, list[int]]] = deque()
        for number in range(calls):
            request, expected = requests[number % len(requests)]
            future: Any = stub.LookupBlocks.future(request, timeout=TIMEOUT_S, metadata=rpc.credentials.metadata)
            open_calls.append((future, expected))
            if len(open_calls) >= result.in_flight:
                done, wanted = open_calls.popleft()
                _check(done.result(), wanted)
        for done, wanted in open_calls:
            _check(done.result(), wanted)
    seconds = time.perf_counter() - begun
    if keep:
        result.per_second.append(calls * result.batch / seconds)
        result.latency_us += latencies
        result.daemon_cpu_us.append((process_cpu_ns(daemon_pid) - cpu) / 1e3 / (calls * result.batch))


def _check(answer: pb.LookupBlocksResponse, expected: list[int]) -> None:
    missing = [pb.PREFIX_END_NOT_STORED] * len(expected)
    if list(answer.hit_blocks) != expected or list(answer.ends) != missing:
        raise WrongRowsError(f"a lookup answered {list(answer.hit_blocks)[:4]}, stored are {expected[:4]}")
