"""A worker as a process of its own: attaches, says so, and lives until it is killed or its stdin ends.

Run as ``python worker_process.py SOCKET STAGE NUM_BLOCKS``; prints one JSON line with its session id once attached.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from stagecache.rpc import Rpc, handshake
from stagecache_wire.layout import ABI
from stagecache_wire.locks import LifeLock
from stagecache_wire.v1 import stagecache_pb2 as pb


def attach_request(stage: str, num_blocks: int, *keys: pb.KeySchema, model: str = "test/model") -> pb.AttachRequest:
    """block_size 4, pages of 64 tokens, an arena of 64 KiB."""
    return pb.AttachRequest(
        abi=ABI,
        model=model,
        stage=stage,
        geometry=pb.Geometry(
            num_blocks=num_blocks, block_size=4, staging_capacity_tokens=64, staging_depth=2, arena_bytes=1 << 16,
            max_results=64,
        ),
        keys=keys,
    )  # fmt: skip


def key(name: str = "__hidden_states__", dtype: str = "float32", width: int = 16, **more: bool) -> pb.KeySchema:
    """A key of ``width`` elements a row."""
    return pb.KeySchema(name=name, dtype=dtype, row_shape=[width], **more)


def main() -> None:
    socket, stage, num_blocks = sys.argv[1], sys.argv[2], int(sys.argv[3])
    credentials = handshake(socket, "worker")
    assert credentials.worker_lock is not None
    lock = LifeLock(credentials.worker_lock)
    with Rpc(credentials) as rpc:
        rpc.attach(attach_request(stage, num_blocks, key()), 20.0)
        print(json.dumps({"session_id": credentials.session_id}), flush=True)
        sys.stdin.read()
    lock.release()


class WorkerProcess:
    """Starts ``main`` and waits until it is attached."""

    def __init__(self, socket: Path, stage: str = "s", num_blocks: int = 1024, *, prefix: Sequence[str] = ()) -> None:
        """prefix: a command that runs the worker."""
        self.process = subprocess.Popen(
            [*prefix, sys.executable, __file__, str(socket), stage, str(num_blocks)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the worker did not attach"
        self.session_id: str = json.loads(line)["session_id"]

    def kill(self) -> None:
        """SIGKILL; returns once it is gone."""
        self.process.kill()
        self.process.communicate()

    def __enter__(self) -> WorkerProcess:
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()


if __name__ == "__main__":
    main()
