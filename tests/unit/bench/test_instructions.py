"""A decode step in instructions, by callgrind: what a change of the hot path adds shows here, on a busy machine too."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from stagecache.bench.instructions import count, unavailable
from tests.daemon_process import DaemonProcess

INSTRUCTIONS = 500_000
"""Upper bound for 32 requests; to be lowered with every gain. Interpreter and libraries have a part in it."""


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))
def test_instructions_of_a_decode_step(daemon: DaemonProcess) -> None:
    found = count(daemon.socket)
    assert 20_000 < found < INSTRUCTIONS, f"{found:,.0f}"
