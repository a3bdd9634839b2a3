"""The one way in which the daemon says no: a Refusal, raised anywhere, answered as a gRPC status with a typed Error.

A message says what was asked and what was found, a remedy what to do; neither names a segment. An unexpected
exception is answered as INTERNAL without its text, which goes to the log only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NoReturn

import grpc

from stagecache_wire.v1 import stagecache_pb2 as pb

ERROR_METADATA_KEY: Final = "stagecache-error-bin"
MAX_TEXT_BYTES: Final = 1500
MAX_DETAILS_BYTES: Final = 300
"""An Error travels in trailing metadata, of which gRPC clients accept 8 KiB unless told otherwise."""

_CODES: Final[dict[int, grpc.StatusCode]] = {
    pb.REASON_UNSPECIFIED: grpc.StatusCode.INVALID_ARGUMENT,
    pb.REASON_ABI_MISMATCH: grpc.StatusCode.FAILED_PRECONDITION,
    pb.REASON_UNAUTHENTICATED: grpc.StatusCode.UNAUTHENTICATED,
    pb.REASON_UNKNOWN_SESSION: grpc.StatusCode.NOT_FOUND,
    pb.REASON_WORKER_LOCK_FREE: grpc.StatusCode.FAILED_PRECONDITION,
    pb.REASON_BAD_GEOMETRY: grpc.StatusCode.INVALID_ARGUMENT,
    pb.REASON_BUDGET_EXCEEDED: grpc.StatusCode.RESOURCE_EXHAUSTED,
    pb.REASON_SHM_FULL: grpc.StatusCode.RESOURCE_EXHAUSTED,
    pb.REASON_SCHEMA_MISMATCH: grpc.StatusCode.ALREADY_EXISTS,
    pb.REASON_UNKNOWN_KEY: grpc.StatusCode.NOT_FOUND,
    pb.REASON_OUT_OF_RANGE: grpc.StatusCode.OUT_OF_RANGE,
    pb.REASON_SESSION_FAILED: grpc.StatusCode.ABORTED,
    pb.REASON_DEADLINE: grpc.StatusCode.DEADLINE_EXCEEDED,
    pb.REASON_NO_SCHEDULER_SHIM: grpc.StatusCode.FAILED_PRECONDITION,
    pb.REASON_SHUTTING_DOWN: grpc.StatusCode.UNAVAILABLE,
    pb.REASON_TOO_MANY: grpc.StatusCode.RESOURCE_EXHAUSTED,
    pb.REASON_UNKNOWN_STAGE: grpc.StatusCode.NOT_FOUND,
    pb.REASON_UNSUPPORTED_HASH: grpc.StatusCode.INVALID_ARGUMENT,
    pb.REASON_UNKNOWN_NAMESPACE: grpc.StatusCode.NOT_FOUND,
    pb.REASON_INTERNAL: grpc.StatusCode.INTERNAL,
}


class Refusal(Exception):
    """A request that the daemon will not do. Nothing of it was done, or all of it was undone."""

    def __init__(
        self, reason: pb.Reason, message: str, remedy: str = "", facts: Mapping[str, object] | None = None
    ) -> None:
        super().__init__(f"{message} {remedy}" if remedy else message)
        self.reason = reason
        self.message = _cut(message, MAX_TEXT_BYTES)
        self.remedy = _cut(remedy, MAX_DETAILS_BYTES)
        self.facts = {name: _cut(str(value), 64) for name, value in (facts or {}).items()}

    @property
    def code(self) -> grpc.StatusCode:
        return _CODES.get(self.reason, grpc.StatusCode.INTERNAL)

    @property
    def reason_name(self) -> str:
        """The reason without its prefix, as people and the peer socket's answers write it."""
        return pb.Reason.Name(self.reason).removeprefix("REASON_")

    def to_wire(self) -> pb.Error:
        code: int = self.code.value[0]
        return pb.Error(code=code, reason=self.reason, message=self.message, remedy=self.remedy, facts=dict(self.facts))


def internal() -> Refusal:
    """What a caller is told about a defect of the daemon: that there is one, and where its story is."""
    return Refusal(pb.REASON_INTERNAL, "the daemon met an unexpected error.", "Its log has the details.")


def not_durable(what: str, why: object) -> Refusal:
    """What a caller is told where the run directory cannot be written: what is not noted would not be adopted."""
    return Refusal(
        pb.REASON_INTERNAL,
        f"{what} cannot be noted for the next daemon: {why}.",
        "Give the run directory's file system room (df), and see that the directory is there; then try again.",
    )


async def abort(context: Any, refusal: Refusal) -> NoReturn:
    """End the call of a ``grpc.aio.ServicerContext`` with the refusal's status and its Error as trailing metadata."""
    await context.abort(
        refusal.code,
        _cut(str(refusal), MAX_DETAILS_BYTES),
        trailing_metadata=((ERROR_METADATA_KEY, refusal.to_wire().SerializeToString()),),
    )
    raise AssertionError("context.abort returned")


def _cut(text: str, limit: int) -> str:
    """The text in at most ``limit`` bytes of UTF-8, whatever a caller put into it."""
    raw = text.encode(errors="backslashreplace")
    return raw.decode() if len(raw) <= limit else raw[: limit - 3].decode(errors="ignore") + "..."
