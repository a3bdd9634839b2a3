"""Asking a running daemon: is it there, what does it hold, forget a stage. Synchronous, no torch, no session."""

from __future__ import annotations

import os
from types import TracebackType
from typing import Any

import grpc
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc

from stagecache.errors import DaemonUnavailableError
from stagecache.rpc import Rpc, handshake
from stagecache_wire.v1 import stagecache_pb2 as pb

DEFAULT_TIMEOUT_S = 5.0


def ping(socket: str | os.PathLike[str], *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
    """Return when the daemon says by grpc.health.v1 that it serves.

    Raises:
        DaemonUnavailableError: nobody answers within ``timeout_s`` seconds, or it says that it does not serve.
    """
    remedy = f"Start one with `stagecached --socket {socket}`, as the same user."
    # The authority of a Unix socket would be its path, percent-encoded, which servers refuse.
    options = [("grpc.default_authority", "localhost"), ("grpc.use_local_subchannel_pool", 1)]
    with grpc.insecure_channel(f"unix:{os.fspath(socket)}", options=options) as channel:
        health: Any = health_pb2_grpc.HealthStub(channel)
        try:
            answer = health.Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
        except grpc.RpcError as failure:
            state: Any = failure  # one object that is error and call; the type stubs know only the error
            code = state.code()
            text = "no answer in time" if code is grpc.StatusCode.DEADLINE_EXCEEDED else f"{code.name}"
            raise DaemonUnavailableError(f"no stagecached at {socket}: {text}.", remedy=remedy) from failure
    if answer.status != health_pb2.HealthCheckResponse.SERVING:
        name = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
        raise DaemonUnavailableError(f"stagecached at {socket} says {name}.", remedy="Ask again when it has started.")


class Observer:
    """A daemon's figures and its resets.

    Args:
        socket: the daemon's socket.
        timeout_s: deadline of the handshake and of each call.

    Raises:
        DaemonUnavailableError: nobody listens there.
        TokenRefusedError: the daemon serves another user.
    """

    def __init__(self, socket: str | os.PathLike[str], *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        self._timeout_s = timeout_s
        self._rpc = Rpc(handshake(socket, "observer", timeout_s=timeout_s))

    def __enter__(self) -> Observer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._rpc.close()

    def stats(self) -> pb.StatsResponse:
        """One snapshot of the daemon and of every session."""
        return self._rpc.stats(self._timeout_s)

    def reset(self, stage: str, *, force: bool = False, cause: str = "stagecache reset") -> pb.ResetResponse:
        """Ask for a new epoch of a stage: nothing saved before is readable after (R5).

        Raises:
            ResetRefusedError: without ``force``, when no scheduler-side shim would make the engine forget its block
                hashes too.
        """
        return self._rpc.reset(pb.ResetRequest(stage=stage, force=force, cause=cause), self._timeout_s)

    def lookup_blocks(self, request: pb.LookupBlocksRequest) -> pb.LookupBlocksResponse:
        """How far the node's shared blocks hold prefixes, in the namespace that the request names.

        Raises:
            UnsupportedHashError: by token ids, where only the engine can make the namespace's hashes.
        """
        return self._rpc.lookup_blocks(request, self._timeout_s)


def connect_observer(socket: str | os.PathLike[str], *, timeout_s: float = DEFAULT_TIMEOUT_S) -> Observer:
    """An observer of the daemon at ``socket``, to be closed; see ``Observer``."""
    return Observer(socket, timeout_s=timeout_s)


def stats_to_dict(stats: pb.StatsResponse) -> dict[str, Any]:
    """The snapshot as plain values with the field names of the wire, zeros included; for JSON."""
    return message_to_dict(stats)


def message_to_dict(message: Message) -> dict[str, Any]:
    """A message as plain values with the field names of the wire, zeros included; for JSON."""
    return MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
