"""The low-level way to the daemon: credentials from its peer socket, then calls with deadlines and typed errors.

    credentials = handshake(socket, "observer")
    with Rpc(credentials) as rpc:
        print(rpc.stats(timeout_s=2.0).boot_id)

A worker takes the lock at ``credentials.worker_lock`` before it attaches, and keeps it for life.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket as sockets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TypeVar, cast

import grpc

from stagecache import errors
from stagecache.interrupts import uninterrupted
from stagecache_wire.layout import ABI
from stagecache_wire.locks import LifeLock, LockHeldError
from stagecache_wire.names import RunPaths
from stagecache_wire.v1 import stagecache_pb2 as pb
from stagecache_wire.v1 import stagecache_pb2_grpc as pb_grpc

Role = Literal["worker", "scheduler", "observer"]
"""worker: owns a session. scheduler: watches a stage's resets. observer: reads figures, may ask for a reset."""

MAX_MESSAGE_BYTES = 16 << 20
_MAX_LINE_BYTES = 4096
_ERROR_KEY = "stagecache-error-bin"

_CHANNEL_OPTIONS: tuple[tuple[str, int | str], ...] = (
    ("grpc.default_authority", "localhost"),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.enable_http_proxy", 0),
)
"""No keepalive: a stopped daemon or worker is not a dead one. min_reconnect_backoff_ms stays at its default, since gRPC
takes it for the least time of one connection attempt too, and 50 ms are too few on a busy machine."""

_ERROR_CLASSES: dict[int, type[errors.StageCacheError]] = {
    pb.REASON_ABI_MISMATCH: errors.AbiMismatchError,
    pb.REASON_UNAUTHENTICATED: errors.TokenRefusedError,
    pb.REASON_UNKNOWN_SESSION: errors.UnknownSessionError,
    pb.REASON_WORKER_LOCK_FREE: errors.AttachError,
    pb.REASON_BAD_GEOMETRY: errors.GeometryError,
    pb.REASON_BUDGET_EXCEEDED: errors.BudgetError,
    pb.REASON_SHM_FULL: errors.BudgetError,
    pb.REASON_SCHEMA_MISMATCH: errors.SchemaMismatchError,
    pb.REASON_SESSION_FAILED: errors.SessionFailedError,
    pb.REASON_DEADLINE: errors.CallDeadlineError,
    pb.REASON_NO_SCHEDULER_SHIM: errors.ResetRefusedError,
    pb.REASON_SHUTTING_DOWN: errors.DaemonLostError,
    pb.REASON_UNSUPPORTED_HASH: errors.UnsupportedHashError,
}

Request = TypeVar("Request")
Response = TypeVar("Response")


@dataclass(frozen=True)
class Credentials:
    """What the daemon issued to this process. The token is the proof; it is never shown."""

    session_id: str
    token: str = field(repr=False)
    boot_id: int
    worker_lock: Path | None
    """File whose lock a worker, or a scheduler that named its engine, holds for life; it exists already. Else None."""
    role: Role
    socket: Path

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        return (
            ("stagecache-session", self.session_id),
            ("stagecache-role", self.role),
            ("stagecache-token", self.token),
        )

    def take_lock(self, timeout_s: float) -> LifeLock:
        """The lock that says that this process lives; a sweep may hold it for a moment, so it is waited for.

        Raises:
            AttachError: the daemon named none, or it cannot be taken.
        """
        if self.worker_lock is None:
            raise errors.AttachError(f"the daemon named no lock for this {self.role}")
        try:
            return LifeLock.wait(self.worker_lock, timeout_s, create=False)
        except (LockHeldError, FileNotFoundError) as error:
            raise errors.AttachError(f"the lock of {self.role} {self.session_id} cannot be taken: {error}") from error


def reason_name(reason: int) -> str:
    """``BUDGET_EXCEEDED`` for ``REASON_BUDGET_EXCEEDED``; a number of a newer daemon as it is."""
    try:
        return pb.Reason.Name(cast(pb.Reason, reason)).removeprefix("REASON_")
    except ValueError:
        return f"REASON_{reason}"


def error_from_wire(error: pb.Error) -> errors.StageCacheError:
    """The exception that a daemon's Error means."""
    kind = _ERROR_CLASSES.get(error.reason, errors.CallRefusedError)
    return kind(error.message, reason=reason_name(error.reason), remedy=error.remedy, facts=dict(error.facts))


def error_from_grpc(call: str, failure: grpc.RpcError, timeout_s: float | None) -> errors.StageCacheError:
    """The exception that a failed call means, from its trailing Error where the daemon sent one."""
    call_state: Any = failure  # grpc raises one object that is error and call; the type stubs know only the error
    for key, value in call_state.trailing_metadata() or ():
        if key == _ERROR_KEY:
            return error_from_wire(pb.Error.FromString(value))
    code, details = call_state.code(), call_state.details() or ""
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return errors.CallDeadlineError(f"{call}: the daemon did not answer within {timeout_s} s")
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
        return errors.DaemonLostError(f"{call}: the daemon does not answer ({code.name}: {details})")
    return errors.CallRefusedError(f"{call}: {code.name}: {details}", reason=code.name)


def handshake(
    socket: str | os.PathLike[str],
    role: Role,
    *,
    session_id: str = "",
    token: str = "",
    engine: str = "",
    abi: int = ABI,
    timeout_s: float = 5.0,
) -> Credentials:
    """Ask the daemon's peer socket for credentials; the kernel vouches for this process' uid and life.

    Call it in the worker process itself, not in a parent: the daemon watches the caller's life. ``session_id`` and
    ``token`` of an earlier handshake make a restarted daemon watch the caller's life again; it answers with the same.
    A scheduler that will hold leases on shared blocks names its ``engine`` (any text that is not empty): it then gets a
    lock to hold for life, as a worker does, so that its leases end with it and not before.

    Raises:
        DaemonUnavailableError: nobody listens there, or there was no answer within ``timeout_s`` seconds.
        AbiMismatchError: the daemon has another shared-memory layout.
        TokenRefusedError: the daemon serves another user.
        AttachError: refused for another reason.
    """
    paths = RunPaths.of(socket)
    ask: dict[str, object] = {"abi": abi, "role": role, "pid": os.getpid()}
    if session_id:
        ask |= {"session_id": session_id, "token": token}
    if engine:
        ask["engine"] = engine
    answer = _exchange_line(paths, json.dumps(ask).encode() + b"\n", timeout_s)
    if "error" in answer:
        raise error_from_wire(_wire_error(answer))
    try:
        lock = answer.get("worker_lock")
        return Credentials(
            session_id=str(answer["session_id"]),
            token=str(answer["token"]),
            boot_id=int(answer["boot_id"]),
            worker_lock=Path(str(lock)) if lock else None,
            role=role,
            socket=paths.socket,
        )
    except (KeyError, ValueError, TypeError) as error:
        raise errors.AttachError(f"the daemon at {paths.socket} answered without {error}") from error


def _wire_error(answer: dict[str, Any]) -> pb.Error:
    reason = f"REASON_{answer.get('reason', '')}"
    return pb.Error(
        reason=pb.Reason.Name(pb.REASON_INTERNAL) if reason not in pb.Reason.keys() else reason,  # noqa: SIM118
        message=str(answer["error"]),
        remedy=str(answer.get("remedy", "")),
        facts={str(key): str(value) for key, value in dict(answer.get("facts") or {}).items()},
    )


def _exchange_line(paths: RunPaths, line: bytes, timeout_s: float) -> dict[str, Any]:
    """Send one line to the peer socket and read one."""
    deadline = time.monotonic() + timeout_s
    received = b""
    try:
        with sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM) as connection:
            connection.settimeout(timeout_s)
            connection.connect(os.fspath(paths.peer_socket))
            with contextlib.suppress(BrokenPipeError):  # who refuses at once still says why
                connection.sendall(line)
            while not received.endswith(b"\n"):
                connection.settimeout(max(deadline - time.monotonic(), 0.001))
                chunk = connection.recv(_MAX_LINE_BYTES)
                if not chunk or len(received) > _MAX_LINE_BYTES:
                    break
                received += chunk
    except OSError as error:
        what = f"no answer within {timeout_s} s" if isinstance(error, TimeoutError) else error.strerror or str(error)
        raise errors.DaemonUnavailableError(
            f"no stagecached at {paths.socket}: {what}.",
            remedy=f"Start one with `stagecached --socket {paths.socket}`, as the same user.",
        ) from error
    try:
        answer = json.loads(received)
    except ValueError as error:
        raise errors.DaemonUnavailableError(f"the daemon at {paths.socket} closed the handshake unanswered") from error
    if not isinstance(answer, dict):
        raise errors.DaemonUnavailableError(f"the daemon at {paths.socket} answered with no JSON object")
    return answer


class Rpc:
    """Calls of one set of credentials. Thread-safe; every unary call has a deadline in seconds.

    ``calls`` counts every call made, so that tests can hold a step to none. The channel reconnects by itself; a
    restarted daemon accepts the same credentials.

    Each call raises DaemonLostError where the daemon does not answer, CallDeadlineError past ``timeout_s``, and
    otherwise the class that belongs to the daemon's reason.
    """

    def __init__(self, credentials: Credentials) -> None:
        self.credentials = credentials
        self.calls = 0
        self.closed = False
        self._channel = grpc.insecure_channel(f"unix:{credentials.socket}", options=_CHANNEL_OPTIONS)
        self._stub = pb_grpc.StageCacheStub(self._channel)

    def __enter__(self) -> Rpc:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the channel; open watches end with DaemonLostError."""
        self.closed = True
        self._channel.close()

    def attach(self, request: pb.AttachRequest, timeout_s: float) -> pb.AttachResponse:
        # The handshake has just been answered, so the daemon is there: a first connection that fails is tried again.
        return self._call("Attach", self._stub.Attach, request, timeout_s, wait_for_ready=True)

    def open_key(self, request: pb.OpenKeyRequest, timeout_s: float) -> pb.OpenKeyResponse:
        return self._call("OpenKey", self._stub.OpenKey, request, timeout_s)

    def merge(self, request: pb.MergeRequest, timeout_s: float) -> pb.MergeResponse:
        return self._call("Merge", self._stub.Merge, request, timeout_s)

    def lookup(self, request: pb.LookupRequest, timeout_s: float) -> pb.LookupResponse:
        return self._call("Lookup", self._stub.Lookup, request, timeout_s)

    def detach(self, timeout_s: float) -> pb.DetachResponse:
        return self._call("Detach", self._stub.Detach, pb.DetachRequest(), timeout_s)

    def reset(self, request: pb.ResetRequest, timeout_s: float) -> pb.ResetResponse:
        return self._call("Reset", self._stub.Reset, request, timeout_s)

    def stats(self, timeout_s: float) -> pb.StatsResponse:
        return self._call("Stats", self._stub.Stats, pb.StatsRequest(), timeout_s)

    def join_namespace(self, request: pb.JoinNamespaceRequest, timeout_s: float) -> pb.JoinNamespaceResponse:
        return self._call("JoinNamespace", self._stub.JoinNamespace, request, timeout_s)

    def lookup_blocks(self, request: pb.LookupBlocksRequest, timeout_s: float) -> pb.LookupBlocksResponse:
        return self._call("LookupBlocks", self._stub.LookupBlocks, request, timeout_s)

    def acquire_blocks(self, request: pb.AcquireBlocksRequest, timeout_s: float) -> pb.AcquireBlocksResponse:
        return self._call("AcquireBlocks", self._stub.AcquireBlocks, request, timeout_s)

    def release_blocks(self, request: pb.ReleaseBlocksRequest, timeout_s: float) -> pb.ReleaseBlocksResponse:
        return self._call("ReleaseBlocks", self._stub.ReleaseBlocks, request, timeout_s)

    def publish_blocks(self, request: pb.PublishBlocksRequest, timeout_s: float) -> pb.PublishBlocksResponse:
        return self._call("PublishBlocks", self._stub.PublishBlocks, request, timeout_s)

    def watch(self, stage: str = "", engine: str = "") -> Watch:
        """Open the stream of events; it has no deadline. ``stage`` and ``engine`` are for role scheduler."""
        self.calls += 1
        request = pb.WatchRequest(stage=stage, engine=engine)
        try:
            return Watch(self._stub.Watch(request, metadata=self.credentials.metadata))
        except ValueError as error:  # The channel was closed, perhaps by another thread.
            raise errors.DaemonLostError("Watch: this client is closed") from error

    def _call(
        self,
        name: str,
        method: Callable[..., Response],
        request: object,
        timeout_s: float,
        *,
        wait_for_ready: bool = False,
    ) -> Response:
        self.calls += 1
        metadata = self.credentials.metadata
        try:
            return uninterrupted(
                partial(method, request, timeout=timeout_s, metadata=metadata, wait_for_ready=wait_for_ready)
            )
        except grpc.RpcError as failure:
            raise error_from_grpc(name, failure, timeout_s) from failure
        except ValueError as error:  # The channel was closed, perhaps by another thread.
            raise errors.DaemonLostError(f"{name}: this client is closed") from error


class Watch:
    """An open stream of events: iterate it in a thread of its own, end it with ``cancel`` from any thread."""

    def __init__(self, call: Any) -> None:
        self._call = call

    def __iter__(self) -> Iterator[pb.WatchEvent]:
        """Events as they come; ends after ``cancel``.

        Raises:
            DaemonLostError: the daemon went away.
            StageCacheError: the daemon refused the stream.
        """
        try:
            yield from self._call
        except grpc.RpcError as failure:
            failure.__traceback__ = None  # The call is its own error, and would hold itself by this frame.
            if self._call.cancelled():
                return
            raise error_from_grpc("Watch", failure, None) from failure

    def cancel(self) -> None:
        self._call.cancel()
