"""Tokens are proofs that outlive the daemon; roles bound what they prove."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from stagecache_wire.v1 import stagecache_pb2 as pb
from stagecached import auth
from stagecached.refusal import Refusal

SESSION = "0123456789abcdef"


def metadata(session_id: str, role: str, token: str) -> list[tuple[str, str | bytes]]:
    return [("stagecache-session", session_id), ("stagecache-role", role), ("stagecache-token", token)]


@pytest.fixture
def tokens() -> auth.Tokens:
    return auth.Tokens(b"s" * 32)


def test_issued_token_is_good_for_its_role_and_session_only(tokens: auth.Tokens) -> None:
    token = tokens.issue("worker", SESSION)
    assert tokens.is_good("worker", SESSION, token)
    assert not tokens.is_good("observer", SESSION, token)
    assert not tokens.is_good("worker", "f" * 16, token)
    assert not tokens.is_good("worker", SESSION, token[:-1])
    assert not tokens.is_good("worker", SESSION, "")
    assert not tokens.is_good("worker", SESSION, "tökèn")


@pytest.mark.parametrize("session_id", ["", "0123", SESSION.upper() + "0", "../../../../../", "x|0123456789abcd"])
def test_id_of_another_form_is_never_good(tokens: auth.Tokens, session_id: str) -> None:
    assert not tokens.is_good("worker", session_id, tokens.issue("worker", session_id))


def test_unknown_role_is_never_good(tokens: auth.Tokens) -> None:
    assert not tokens.is_good("root", SESSION, tokens.issue("root", SESSION))


def test_secret_is_made_once_and_only_for_this_user(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    token = auth.Tokens.at(path).issue("worker", SESSION)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert auth.Tokens.at(path).issue("worker", SESSION) == token
    assert auth.Tokens.at(tmp_path / "other").issue("worker", SESSION) != token


def test_secret_that_was_cut_short_is_made_anew(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_bytes(b"short")
    assert auth.Tokens.at(path).issue("worker", SESSION) != auth.Tokens(b"short").issue("worker", SESSION)
    assert len(path.read_bytes()) == auth.SECRET_BYTES


def test_check_says_who_calls(tokens: auth.Tokens) -> None:
    carried = metadata(SESSION, "worker", tokens.issue("worker", SESSION))
    assert auth.check(tokens, "/stagecache.v1.StageCache/Attach", carried) == auth.Caller(SESSION, "worker")


@pytest.mark.parametrize("drop", range(3))
def test_missing_entry_is_refused(tokens: auth.Tokens, drop: int) -> None:
    carried = metadata(SESSION, "worker", tokens.issue("worker", SESSION))
    del carried[drop]
    with pytest.raises(Refusal) as caught:
        auth.check(tokens, "/stagecache.v1.StageCache/Attach", carried)
    assert caught.value.reason == pb.REASON_UNAUTHENTICATED


def test_every_method_has_its_roles() -> None:
    methods = {method.name for method in pb.DESCRIPTOR.services_by_name["StageCache"].methods}
    assert methods == set(auth.ALLOWED)


def test_method_that_is_not_listed_is_refused(tokens: auth.Tokens) -> None:
    carried = metadata(SESSION, "worker", tokens.issue("worker", SESSION))
    with pytest.raises(Refusal, match="may not call Shutdown"):
        auth.check(tokens, "/stagecache.v1.StageCache/Shutdown", carried)
