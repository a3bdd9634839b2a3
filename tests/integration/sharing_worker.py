"""A worker without torch that saves blocks of rows and shares them; in this process, or as one that can be killed.

A row of a block says which hash it belongs to, so whoever reads a shared block can hold it against its hash.

Run as ``python sharing_worker.py SOCKET ROLE MODEL``: acquires what its standard input names, prints what it holds, and
lives until it is killed. ROLE: worker, or scheduler of engine ``e``.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

import numpy as np

from stagecache.rpc import Rpc, handshake
from stagecache_wire import layout, shm
from stagecache_wire.geometry import Geometry, KeySchema, page_stride
from stagecache_wire.layout import ABI, ControlLayout
from stagecache_wire.locks import LifeLock
from stagecache_wire.messages import geometry_from_wire, schema_to_wire
from stagecache_wire.records import KeyMode, Kind, Record
from stagecache_wire.v1 import stagecache_pb2 as pb
from tests.unit.server.session_kit import Log, runs, save

BLOCK_SIZE = 4
NUM_BLOCKS = 64
CAPACITY = 64
HIDDEN = KeySchema("__hidden_states__", "float32", (2,))
WIDE = KeySchema("wide", "bfloat16", (3, 2))
KEYS = (HIDDEN, WIDE)
SCHEMA = {"model_fingerprint": "weights 1", "hash_algorithm": "sha256_cbor", "hash_seed": "seed", "dtype": "bfloat16"}
TIMEOUT_S = 20.0


def hashes(*numbers: int) -> bytes:
    return b"".join(sha256(f"block {number}".encode()).digest() for number in numbers)


def rows_of(block_hash: bytes, schema: KeySchema) -> np.ndarray:
    """u8 [BLOCK_SIZE, row bytes]."""
    seed = int.from_bytes(block_hash[:8], "little") + len(schema.name)
    return np.random.default_rng(seed).integers(0, 256, (BLOCK_SIZE, schema.row_bytes), np.uint8)


class SharingWorker:
    """Attached in this process. Not a client to copy: it writes the log by hand."""

    def __init__(self, socket: Path, *, stage: str = "s", engine: str = "e", keys: Sequence[KeySchema] = KEYS) -> None:
        credentials = handshake(socket, "worker")
        assert credentials.worker_lock is not None
        self._lock = LifeLock(credentials.worker_lock)
        self.rpc = Rpc(credentials)
        self.keys = keys
        granted = self.rpc.attach(
            pb.AttachRequest(
                abi=ABI, model="m", stage=stage, engine=engine, keys=[schema_to_wire(key) for key in keys],
                geometry=pb.Geometry(
                    num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, staging_capacity_tokens=CAPACITY, staging_depth=1,
                    arena_bytes=1 << 16, max_results=64,
                ),
            ),
            TIMEOUT_S,
        )  # fmt: skip
        self.geometry: Geometry = geometry_from_wire(granted.geometry)
        control = shm.open_segment(granted.control_segment)
        self.layout = ControlLayout.of(self.geometry)
        self.control_bytes = control.view
        self.words = control.view.cast("Q")
        self._log = Log(self)  # type: ignore[arg-type]  # it has what a log needs of a session's segments
        self._pages = [
            np.frombuffer(
                shm.open_segment(key.staging_segment).map, np.uint8, page_stride(self.geometry, schema.row_bytes)
            )
            for key, schema in zip(granted.keys, keys, strict=True)
        ]
        self._bell = shm.open_semaphore(granted.daemon_doorbell)

    @property
    def head(self) -> int:
        return self.words[layout.W_HEAD]

    def join(self, **more: object) -> pb.JoinNamespaceResponse:
        return self.rpc.join_namespace(
            pb.JoinNamespaceRequest(**{"tensor_parallel_size": 1, **SCHEMA, **more}),
            TIMEOUT_S,  # type: ignore[arg-type]
        )

    def save(self, block_ids: Sequence[int], raw_hashes: bytes, *, without: int | None = None) -> int:
        """Log the rows of whole blocks; the sequence. without: a key id whose rows are left out."""
        for page, schema in zip(self._pages, self.keys, strict=True):
            rows = [rows_of(raw_hashes[32 * at : 32 * at + 32], schema) for at in range(len(block_ids))]
            page[: len(block_ids) * BLOCK_SIZE * schema.row_bytes] = np.concatenate(rows).reshape(-1)
        keyed = [(at, KeyMode.ROWS) for at in range(len(self.keys)) if at != without]
        sequence = self._log.append(save(0, runs(*((block * BLOCK_SIZE, BLOCK_SIZE) for block in block_ids)), *keyed))
        self._bell.release()
        return sequence

    def publish(self, block_ids: Sequence[int], raw_hashes: bytes, sequence: int) -> list[int]:
        request = pb.PublishBlocksRequest(sequence=sequence, block_ids=block_ids, hashes=raw_hashes)
        return list(self.rpc.publish_blocks(request, TIMEOUT_S).states)

    def log_publish(self, block_ids: Sequence[int], raw_hashes: bytes) -> int:
        """The same by a record, as a cache does it; the sequence."""
        named = [(block, raw_hashes[32 * at : 32 * at + 32]) for at, block in enumerate(block_ids)]
        sequence = self._log.append(Record.of_blocks(Kind.PUBLISH, named))
        self._bell.release()
        return sequence

    def share(self, *numbers: int) -> list[int]:
        """Save blocks of these contents and publish them, from the tail on as an engine would find them full."""
        block_ids = list(range(len(numbers)))
        return self.publish(block_ids, hashes(*numbers), self.save(block_ids, hashes(*numbers)))

    def close(self) -> None:
        self.rpc.detach(TIMEOUT_S)
        self.rpc.close()
        self._lock.release()


def lookup(rpc: Rpc, *numbers: int, **more: object) -> pb.LookupBlocksResponse:
    return rpc.lookup_blocks(
        pb.LookupBlocksRequest(hashes=hashes(*numbers), span_blocks=[len(numbers)], **more),
        TIMEOUT_S,  # type: ignore[arg-type]
    )


def acquire(rpc: Rpc, request_id: str, *numbers: int, **more: object) -> int:
    request = pb.AcquireBlocksRequest(
        request_ids=[request_id],
        hashes=hashes(*numbers),
        span_blocks=[len(numbers)],
        **more,  # type: ignore[arg-type]
    )
    return rpc.acquire_blocks(request, TIMEOUT_S).held[0]


def main() -> None:
    socket, role = Path(sys.argv[1]), sys.argv[2]
    if role == "worker":
        client = SharingWorker(socket)
        assert client.join(model_fingerprint=sys.argv[3]).on
        rpc, ref = client.rpc, None
    else:
        credentials = handshake(socket, "scheduler", engine="e")
        assert credentials.worker_lock is not None
        lock = LifeLock(credentials.worker_lock)
        rpc, ref = Rpc(credentials), pb.NamespaceRef(stage="s", engine="e")
    for line in sys.stdin:
        held = acquire(rpc, "r", *json.loads(line), namespace=ref)
        print(json.dumps({"held": held, "owner": rpc.credentials.session_id}), flush=True)
    del lock


class Holder:
    """Another process that holds a lease."""

    def __init__(self, socket: Path, role: str, *numbers: int, model: str = SCHEMA["model_fingerprint"]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.integration.sharing_worker", str(socket), role, model],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=Path(__file__).parents[2],
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(numbers).encode() + b"\n")
        self.process.stdin.flush()
        answer = json.loads(self.process.stdout.readline())
        self.held: int = answer["held"]
        self.owner: str = answer["owner"]

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


if __name__ == "__main__":
    main()
