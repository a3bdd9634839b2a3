"""A daemon starts on anything that another one, or somebody else, left: it adopts what is whole and gives up the rest.

Number of starts of the long form: STAGECACHE_FUZZ_STARTS (60), 24 mutated sessions each.
"""

from __future__ import annotations

import os

import pytest

from tests.daemon_process import DaemonProcess
from tests.fuzz import adoption_fuzz

STARTS = int(os.environ.get("STAGECACHE_FUZZ_STARTS", "60"))
SEED = int(os.environ.get("STAGECACHE_FUZZ_SEED", "1"))

pytestmark = [pytest.mark.crash]


def judge(result: adoption_fuzz.Result, daemon: DaemonProcess) -> None:
    assert "Traceback" not in daemon.log, daemon.log[daemon.log.find("Traceback") :][:3000]
    assert result.adopted > 0
    assert result.lost > result.adopted
    assert result.start_s < 5.0, "no leftover holds up the start; a second is usual"


def test_mutated_leftovers_cost_their_own_session_at_most(fresh_daemon: DaemonProcess) -> None:
    judge(adoption_fuzz.run(fresh_daemon, SEED, 1), fresh_daemon)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_many_mutated_leftovers(fresh_daemon: DaemonProcess, capsys: pytest.CaptureFixture[str]) -> None:
    result = adoption_fuzz.run(fresh_daemon, SEED, STARTS)
    with capsys.disabled():
        print(f"\n{result.told()}")
    judge(result, fresh_daemon)
    adopting, manifests, _ = result.rules
    unmet = {name for name in adopting.never if "were stuck in its record" not in name}
    assert (unmet, manifests.never) == (set(), []), "a check that never says no is not tested"
