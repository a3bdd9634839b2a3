"""What is refused looks the same on the wire and in the client."""

from __future__ import annotations

import pytest

from stagecache import errors
from stagecache.rpc import error_from_wire, reason_name
from stagecache_wire.v1 import stagecache_pb2 as pb
from stagecached.refusal import Refusal, internal


@pytest.mark.parametrize("reason", list(pb.Reason.values()))
def test_every_reason_has_a_status_and_a_class(reason: pb.Reason) -> None:
    refusal = Refusal(reason, "asked, found.", "Do this.", {"needed": 3})
    assert refusal.code.value[0] != 0
    error = error_from_wire(pb.Error.FromString(refusal.to_wire().SerializeToString()))
    assert isinstance(error, errors.StageCacheError)
    assert str(error) == "asked, found. Do this."
    assert (error.reason, error.remedy, error.facts) == (refusal.reason_name, "Do this.", {"needed": "3"})


def test_unexpected_error_tells_the_caller_nothing_of_itself() -> None:
    assert internal().to_wire().reason == pb.REASON_INTERNAL
    assert "log" in str(internal())


def test_reason_of_a_newer_daemon_is_passed_on() -> None:
    assert reason_name(9999) == "REASON_9999"
    assert isinstance(error_from_wire(pb.Error(message="new.")), errors.CallRefusedError)


def test_error_stays_small_enough_for_metadata() -> None:
    """gRPC clients accept 8 KiB of metadata, in which bytes are base64."""
    refusal = Refusal(pb.REASON_BUDGET_EXCEEDED, "é" * 10_000, "ü" * 10_000, {f"fact{i}": "x" * 1000 for i in range(8)})
    assert len(refusal.to_wire().SerializeToString()) < 3072
    assert refusal.message.endswith("...")
