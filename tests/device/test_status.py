"""Whether copies from a device go into pinned memory can be seen from outside."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("torch")

from stagecache.cli.control import show_status
from stagecache.control import Observer
from stagecache_wire.v1 import stagecache_pb2 as pb
from tests.daemon_process import DaemonProcess
from tests.device.scenarios import device_of

if TYPE_CHECKING:
    from tests.device.scenarios import Make


def session_of(daemon: DaemonProcess, session_id: str) -> pb.SessionStats:
    with Observer(daemon.socket) as observer:
        return next(one for one in observer.stats().sessions if one.session_id == session_id)


def test_status_says_what_is_pinned_and_what_could_not_be(
    daemon: DaemonProcess,
    make_on: Callable[[str], Make],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    make = make_on("lazy")
    for refuse in (False, True):
        cache = device_of(make({"refuse_pins": refuse, "slab_bytes": 1 << 16}))
        told = session_of(daemon, cache.cache.session.session_id)
        staging = sum(key.staging_bytes for key in told.keys)
        everything = staging + told.geometry.arena_bytes + (1 << 16)
        assert (told.pinned_bytes, told.unpinned_bytes) == ((0, everything) if refuse else (everything, 0))
    monkeypatch.setenv("COLUMNS", "250")
    show_status(daemon.socket, as_json=False, timeout_s=5.0)
    shown = capsys.readouterr().out
    assert "pinned" in shown
    assert f"{everything / (1 << 20):.1f} MiB not" in shown


def test_a_key_opened_in_a_step_is_pinned_too(make_on: Callable[[str], Make]) -> None:
    stage = make_on("lazy")()
    cache = device_of(stage)
    before = cache.device.pins.pinned_bytes
    stage.step("a:[0]@0+4", k=1)
    (key,) = (key for key in cache.cache._keys.open.values() if key.schema.name == "k")
    assert cache.device.pins.pinned_bytes == before + len(key.segment.map)
    assert not cache.streams.wrong
