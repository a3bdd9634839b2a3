"""The code of check.py's figures, on a torch.cuda whose streams are done at once: it runs; its values mean nothing."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch.overrides import TorchFunctionMode

from stagecache import cuda as cuda_module
from tests.daemon_process import DaemonProcess
from tests.gpu import figures
from tests.gpu.beds import CudaBed
from tests.gpu.cases import CASES


class Event:
    def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
        self.at = 0.0

    def record(self, stream: Any = None) -> None:
        self.at = time.perf_counter()

    def elapsed_time(self, other: Event) -> float:
        return (other.at - self.at) * 1e3

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


class Stream:
    def __init__(self, device: Any = None) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass


@contextlib.contextmanager
def on(_: Any) -> Iterator[None]:
    yield


class InHostMemory(TorchFunctionMode):
    """Tensors asked for on the device, or pinned, are made in host memory."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        given.pop("pin_memory", None)
        if "cuda" in str(given.get("device")):
            given["device"] = "cpu"
        found = tuple("cpu" if isinstance(one, torch.device) and one.type == "cuda" else one for one in args)
        return func(*found, **given)


@pytest.fixture
def bed(monkeypatch: pytest.MonkeyPatch) -> Iterator[CudaBed]:
    stub = SimpleNamespace(
        Event=Event,
        Stream=Stream,
        stream=on,
        current_device=lambda: 0,
        current_stream=lambda device=None: Stream(),
        set_device=lambda device: None,
        synchronize=lambda: None,
        _sleep=lambda cycles: None,
    )
    runtime = SimpleNamespace(register=lambda address, nbytes: None, unregister=lambda address: None)
    monkeypatch.setattr(torch, "cuda", stub)
    monkeypatch.setattr(cuda_module.CudaStreams, "owns", lambda self, tensor: True)
    monkeypatch.setattr(cuda_module.CudaRuntime, "of_this_process", classmethod(lambda cls: runtime))
    for name, value in {"COPY_TOKENS": 256, "HIDDEN": 256, "FORWARD_MS": 0.1, "MATRIX": 64}.items():
        monkeypatch.setattr(figures, name, value)
    with InHostMemory():
        yield CudaBed()


@pytest.mark.soak
def test_every_figure_gives_its_rows(bed: CudaBed, daemon: DaemonProcess) -> None:
    rows = [row for _, figure in figures.FIGURES for row in figure(bed, daemon.socket)]
    assert len(rows) == 13
    for row in rows:
        assert row.verdict in ("-", "ok", "MISSED", "skipped")
        assert (row.value is None) == (row.verdict == "skipped")
        assert row.seen or row.note


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_every_case_holds_over_the_cuda_seam(case: Any, bed: CudaBed, daemon: DaemonProcess) -> None:
    case(bed, daemon.socket)
