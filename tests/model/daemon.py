"""A daemon of one's own, as an operator starts it."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

START_S = 15.0


@contextmanager
def running_daemon(folder: Path, *args: str) -> Iterator[SimpleNamespace]:
    """Start ``python -m stagecached`` on a socket in ``folder``, wait until it serves, stop it at the end."""
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    socket = str(folder / "s.sock")
    with open(folder / "daemon.log", "wb") as log:
        process = subprocess.Popen([sys.executable, "-m", "stagecached", "--socket", socket, *args], stderr=log, stdout=log)
    try:
        with grpc.insecure_channel(f"unix:{socket}") as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            deadline = time.monotonic() + START_S
            while True:
                try:
                    stub.Check(health_pb2.HealthCheckRequest(), timeout=1.0)
                    break
                except grpc.RpcError:
                    if process.poll() is not None or time.monotonic() > deadline:
                        raise RuntimeError(f"no daemon: {(folder / 'daemon.log').read_text()[-2000:]}") from None
                    time.sleep(0.05)
        yield SimpleNamespace(socket=socket, process=process, log=folder / "daemon.log")
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
