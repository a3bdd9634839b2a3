"""Who may talk to the daemon, and what a caller is told who may not."""

from __future__ import annotations

import json
import os
import socket as sockets
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from stagecache import errors
from stagecache.rpc import Credentials, Rpc, handshake
from stagecache_wire.layout import ABI
from stagecache_wire.v1 import stagecache_pb2 as pb
from tests.daemon_process import DaemonProcess
from tests.integration.helpers import own_daemon, worker
from tests.integration.worker_process import attach_request, key


def call_with(socket: Path, credentials: Credentials, **changes: object) -> None:
    with Rpc(replace(credentials, **changes)) as rpc:
        rpc.stats(5.0)


def test_wrong_token_role_or_session_is_refused(daemon: DaemonProcess) -> None:
    mine = handshake(daemon.socket, "observer")
    other = handshake(daemon.socket, "observer")
    call_with(daemon.socket, mine)
    for changes in (
        {"token": "0" * 64},
        {"token": ""},
        {"token": other.token},
        {"session_id": other.session_id},
        {"session_id": "../../etc"},
        {"role": "worker"},
        {"role": "root"},
    ):
        with pytest.raises(errors.TokenRefusedError) as caught:
            call_with(daemon.socket, mine, **changes)
        assert caught.value.reason == "UNAUTHENTICATED"


def test_role_may_only_call_what_is_its_own(daemon: DaemonProcess) -> None:
    with Rpc(handshake(daemon.socket, "observer")) as rpc:
        with pytest.raises(errors.TokenRefusedError, match="observer may not call Attach"):
            rpc.attach(attach_request("s", 16), 5.0)
        with pytest.raises(errors.TokenRefusedError, match="Watch"):
            next(iter(rpc.watch()))


def test_token_survives_a_restart(fresh_daemon: DaemonProcess) -> None:
    credentials = handshake(fresh_daemon.socket, "observer")
    fresh_daemon.restart()
    call_with(fresh_daemon.socket, credentials)


def test_unknown_session_is_told_to_attach(daemon: DaemonProcess) -> None:
    with Rpc(handshake(daemon.socket, "worker")) as rpc:
        for call in (
            lambda: rpc.open_key(pb.OpenKeyRequest(key=key()), 5.0),
            lambda: rpc.merge(pb.MergeRequest(sequence=1), 5.0),
            lambda: rpc.lookup(pb.LookupRequest(), 5.0),
            lambda: next(iter(rpc.watch())),
        ):
            with pytest.raises(errors.UnknownSessionError, match="Attach anew") as caught:
                call()
            assert caught.value.reason == "UNKNOWN_SESSION"
        rpc.detach(5.0)  # may be repeated, so it is no error


def test_abi_mismatch_names_both_numbers(daemon: DaemonProcess) -> None:
    with pytest.raises(errors.AbiMismatchError, match=rf"{ABI + 1}.*{ABI}") as caught:
        handshake(daemon.socket, "worker", abi=ABI + 1)
    assert caught.value.facts == {"daemon_abi": str(ABI), "caller_abi": str(ABI + 1)}
    with worker(daemon.socket) as rpc:
        request = attach_request("s", 16)
        request.abi = ABI + 1
        with pytest.raises(errors.AbiMismatchError):
            rpc.attach(request, 5.0)


def test_handshake_that_is_no_json_or_too_long_is_answered(daemon: DaemonProcess) -> None:
    for line in (b"hello\n", b"[]\n", b"{}\n", b"x" * 10_000, b'{"abi": 1, "role": "king"}\n', b"[" * 3000 + b"\n"):
        with sockets.socket(sockets.AF_UNIX) as peer:
            peer.settimeout(10.0)
            peer.connect(str(daemon.paths.peer_socket))
            peer.sendall(line)
            answer = json.loads(peer.makefile().readline())
        assert answer["error"]
        assert answer["reason"]


def test_request_that_does_not_decode_is_refused(daemon: DaemonProcess) -> None:
    credentials = handshake(daemon.socket, "worker")
    options = [("grpc.default_authority", "localhost")]
    with grpc.insecure_channel(f"unix:{daemon.socket}", options=options) as channel:
        call = channel.unary_unary("/stagecache.v1.StageCache/Attach")
        with pytest.raises(grpc.RpcError) as caught:
            call(b"\xff\xff\xff\xff", timeout=5.0, metadata=credentials.metadata)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


# Another user: needs root to become one.

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")
OTHER_UID = 54321
OTHER_GID = 54322


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A directory that every user may enter; those of pytest are its user's only."""
    with tempfile.TemporaryDirectory(prefix="stagecache-", ignore_cleanup_errors=True) as name:
        Path(name).chmod(0o755)
        yield Path(name)


def as_other_user(work: str, socket: Path) -> subprocess.CompletedProcess[str]:
    """Run Python as another user with an extra group; what it imports is imported before it becomes that user."""
    return subprocess.run(
        [sys.executable, "-c", BECOME_OTHER_USER + work, str(socket)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


BECOME_OTHER_USER = f"""
import os, sys
from stagecache import errors
from stagecache.rpc import Rpc, handshake
from stagecache_wire import shm
from stagecache_wire.locks import LifeLock
from tests.integration.worker_process import attach_request, key
os.setgroups([{OTHER_GID}])
os.setresgid({OTHER_UID}, {OTHER_UID}, {OTHER_UID})
os.setresuid({OTHER_UID}, {OTHER_UID}, {OTHER_UID})
"""

HANDSHAKE = """
try:
    handshake(sys.argv[1], "observer")
except errors.StageCacheError as error:
    print(type(error).__name__, error)
"""


@needs_root
def test_another_user_cannot_even_reach_the_socket(open_folder: Path) -> None:
    with own_daemon(open_folder) as daemon:
        assert "Permission denied" in as_other_user(HANDSHAKE, daemon.socket).stdout


@needs_root
def test_uid_of_the_peer_is_asked_of_the_kernel(open_folder: Path) -> None:
    """Should the modes be opened by mistake, the peer's uid still counts."""
    with own_daemon(open_folder) as daemon:
        daemon.paths.directory.chmod(0o777)
        daemon.paths.peer_socket.chmod(0o777)
        answer = as_other_user(HANDSHAKE, daemon.socket).stdout
    assert answer.startswith("TokenRefusedError")
    assert f"serves uid 0, the caller is uid {OTHER_UID}" in answer
    assert "--group" in answer


WORKER = """
credentials = handshake(sys.argv[1], "worker")
lock = LifeLock(credentials.worker_lock, create=False)
with Rpc(credentials) as rpc:
    answer = rpc.attach(attach_request("s", 16, key()), 20.0)
    for name in (answer.control_segment, answer.arena_segment, answer.keys[0].staging_segment):
        shm.open_segment(name)
    for name in (answer.daemon_doorbell, answer.worker_doorbell):
        shm.open_semaphore(name).release()
    stem = answer.control_segment.removesuffix("control")
    for part in ("pool0", "table0", "slots"):
        try:
            shm.open_segment(stem + part)
        except Exception as error:
            print(part, type(error).__name__)
    rpc.detach(10.0)
"""


@needs_root
def test_member_of_the_group_may_be_a_worker_but_never_maps_a_pool(open_folder: Path) -> None:
    open_folder.chmod(0o755)
    with own_daemon(open_folder, "--group", str(OTHER_GID)) as daemon:
        assert stat.S_IMODE(daemon.paths.directory.stat().st_mode) == 0o750
        assert stat.S_IMODE(daemon.socket.stat().st_mode) == 0o660
        assert stat.S_IMODE(daemon.paths.secret.stat().st_mode) == 0o600
        run = as_other_user(WORKER, daemon.socket)
        assert run.returncode == 0, run.stderr
        assert run.stdout.splitlines() == [f"{part} PermissionsError" for part in ("pool0", "table0", "slots")]
