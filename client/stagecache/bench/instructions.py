"""Instructions of a decode step on the engine thread, counted by valgrind's callgrind: the same on any machine with the
same packages, however busy it is.

    valgrind --tool=callgrind --instr-atstart=no --collect-atstart=no ... python -m stagecache.bench.instructions SOCKET

is what ``count`` runs: the engine's side in a process of its own, with the counting switched on for the measured steps
alone. The imports before them take most of its time, 20 s on a quiet machine.
"""

from __future__ import annotations

import ctypes
import mmap
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

STEPS: Final = 48
"""Measured; as many rows begin a block in each of them as in any other."""
WARM_UP: Final = 32
_REQUEST: Final = (ord("C") << 24) | (ord("T") << 16)
_START: Final = _REQUEST + 4
_TOGGLE: Final = _REQUEST + 2
_CODE: Final = bytes.fromhex("4889f831d248c1c70348c1c70d48c1c73d48c1c7334887db4889d0c3")
"""mov rax, rdi; xor edx, edx; valgrind's mark of a client request (nothing elsewhere); mov rax, rdx; ret."""


def unavailable() -> str | None:
    """Why instructions cannot be counted here; None where they can."""
    if platform.machine() != "x86_64":
        return f"counting is written for x86-64, this is {platform.machine()}"
    return None if shutil.which("valgrind") else "valgrind is not installed"


def count(socket: Path, *, requests: int = 32) -> float:
    """Instructions of one decode step: begin, save and materialize, of ``requests`` requests, hidden 256 bf16.

    Raises:
        subprocess.CalledProcessError: the counted process failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "callgrind.out"
        valgrind = ["valgrind", "--tool=callgrind", "--instr-atstart=no", "--collect-atstart=no"]
        valgrind.append(f"--callgrind-out-file={out}")
        module = [sys.executable, "-m", "stagecache.bench.instructions", str(socket), str(requests)]
        subprocess.run([*valgrind, *module], check=True, capture_output=True, text=True)
        total = re.search(r"^(?:totals|summary): (\d+)", out.read_text(), re.MULTILINE)
        assert total is not None
        return int(total[1]) / STEPS


def _client_request() -> ctypes._FuncPointer:
    """uint64 (uint64[6]): a request to valgrind; the first word says what. Without valgrind it does nothing."""
    page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    page.write(_CODE)
    call = ctypes.CFUNCTYPE(ctypes.c_uint64, ctypes.POINTER(ctypes.c_uint64))
    function = call(ctypes.addressof(ctypes.c_char.from_buffer(page)))
    function.page = page  # type: ignore[attr-defined]  # It lives as long as the function.
    return function


def _drive(socket: Path, requests: int) -> None:
    """Be the counted process."""
    import gc

    from stagecache.bench.contenders import Ours
    from stagecache.bench.measure import run_block
    from stagecache.bench.workloads import Decode

    request = _client_request()

    def ask(what: int) -> None:
        request((ctypes.c_uint64 * 6)(what))

    workload = Decode(requests, 256, 0, 0.0, 8)
    lane = workload.lane()
    ours = Ours(lane.batch, socket, workload.shape, workload.geometry)
    try:
        run_block(ours, workload.prepare(lane), None)
        for _ in range(WARM_UP // 8):
            run_block(ours, workload.block(lane), None)
        gc.disable()
        ask(_START)
        for _ in range(STEPS // 8):
            for step in workload.block(lane):
                plan = lane.batch.plan(step.requests, step.counts)
                ids = list(lane.batch.ids)
                ask(_TOGGLE)
                ours.begin(plan)
                ours.materialize(ours.save(step.rows, len(ids)), ids)
                ask(_TOGGLE)
                ours.quiet()
    finally:
        ours.close()


if __name__ == "__main__":
    _drive(Path(sys.argv[1]), int(sys.argv[2]))
