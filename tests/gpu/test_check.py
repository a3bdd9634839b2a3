"""The script for a GPU machine, as far as a CPU can tell: it runs to its end, and its cases do find wrong rows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch

from stagecache.copies import Copies
from stagecache.device import CpuDevice
from stagecache.stream_device import StreamDevice
from tests.daemon_process import DaemonProcess
from tests.device.fake import FakeStreams
from tests.gpu.beds import Bed
from tests.gpu.cases import CASES

SCRIPT = Path(__file__).parent / "check.py"


class FakeBed(Bed):
    """The fake device."""

    name = "fake"

    def __init__(self, order: str) -> None:
        self.order = order
        self.streams = FakeStreams(order)

    def device(self) -> CpuDevice:
        self.streams = FakeStreams(self.order)
        return StreamDevice(self.streams)

    def unpinned(self) -> CpuDevice:
        device = FakeStreams(self.order)
        device.refuse_pins = True
        self.streams = device
        return StreamDevice(device)

    def forward(self, values: torch.Tensor, padding: int = 0) -> torch.Tensor:
        return self.streams.live(super().forward(values, padding))

    def overwrite(self, live: torch.Tensor) -> None:
        self.streams.overwrite(live)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: run the script itself")
def test_it_runs_to_its_end_without_a_gpu_and_says_what_it_skipped(tmp_path: Path) -> None:
    """As where posix_ipc is not installed: the stand-in serves the worker and the daemon."""
    written = tmp_path / "rows.json"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    found = subprocess.run(
        [sys.executable, str(SCRIPT), "--json", str(written), "--stand-in"],
        check=False,
        capture_output=True,
        text=True,
        env=environment,
        cwd=tmp_path,
        timeout=100,
    )
    assert found.returncode == 0, found.stdout + found.stderr
    told = json.loads(written.read_text())
    verdicts = {row["what"]: row["verdict"] for row in told["rows"]}
    assert [verdict for what, verdict in verdicts.items() if what.startswith("cpu: ")] == ["ok"] * len(CASES)
    assert [verdict for what, verdict in verdicts.items() if what.startswith("gpu: ")] == ["skipped"] * 10
    assert told["facts"]["card"] is None
    assert told["facts"]["posix_ipc"] == "stand-in"
    assert all(f"| {what} |" in found.stdout for what in verdicts)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_a_case_holds_on_a_device_whose_copies_run_late(case: Callable[..., None], daemon: DaemonProcess) -> None:
    case(FakeBed("compute first"), daemon.socket)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_a_case_finds_rows_that_were_read_too_early(
    case: Callable[..., None], daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Copies, "land", lambda self: self._landed.set())
    with pytest.raises(AssertionError):
        case(FakeBed("lazy"), daemon.socket)
