"""Mutated records against a real daemon process. Count of the long form: STAGECACHE_FUZZ_WILD (5,000)."""

from __future__ import annotations

import os

import pytest

from tests.daemon_process import DaemonProcess
from tests.fuzz import wild

RECORDS = int(os.environ.get("STAGECACHE_FUZZ_WILD", "5000"))
SEED = int(os.environ.get("STAGECACHE_FUZZ_SEED", "1"))


def test_a_mutated_record_fails_its_session_and_no_other(daemon: DaemonProcess) -> None:
    result = wild.run(daemon, SEED, 60)
    assert result.done > 5
    assert result.rules.counts.total() > 5
    assert "Traceback" not in daemon.log


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_many_mutated_records_fail_their_sessions_and_no_other(
    fresh_daemon: DaemonProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    result = wild.run(fresh_daemon, SEED, RECORDS)
    with capsys.disabled():
        print(f"\n{result.told()}")
    elsewhere = ("records ahead", "a claim can hold", "bytes for an arena")
    unmet = [name for name in result.rules.never if not any(text in name for text in elsewhere)]
    assert unmet == [], "words beside the record, and broad rows, are tried in test_log.py"
    assert "Traceback" not in fresh_daemon.log
