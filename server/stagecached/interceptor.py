"""What stands before every method: the token check, the decoding of the request, and the translation of errors.

Methods are wrapped once, when they are added to the server: gRPC's own interceptors are asked at every call, and each
would make its handler anew (25 µs of a call's 300).

Nothing of a request is decoded before its token is good. A request that does not decode, a Refusal and an unexpected
exception all end as a status with a typed Error (``stagecached.refusal``).
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import grpc
import structlog
from google.protobuf.message import DecodeError

from stagecache_wire.v1 import stagecache_pb2 as pb
from stagecached import auth
from stagecached.refusal import Refusal, abort, internal

log = structlog.get_logger()


class Wrapper(Protocol):
    """Stands before a method."""

    def wrap(self, path: str, handler: Any) -> Any:
        """The handler to serve in place of ``handler``. path: ``/service/Method``."""
        ...


class WrappingServer:
    """A server to add one service's methods to, each behind ``wrappers``, the first outermost."""

    def __init__(self, server: grpc.aio.Server, wrappers: Sequence[Wrapper]) -> None:
        self._server = server
        self._wrappers = wrappers

    def add_generic_rpc_handlers(self, handlers: object) -> None:
        """Generated code adds every method twice; they are taken by their names, below."""

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        wrapped = {name: self._wrap(f"/{service}/{name}", handler) for name, handler in handlers.items()}
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, wrapped),))

    def _wrap(self, path: str, handler: Any) -> Any:
        for wrapper in reversed(self._wrappers):
            handler = wrapper.wrap(path, handler)
        return handler


class Guard:
    """Wraps every method of the service."""

    def __init__(self, tokens: auth.Tokens) -> None:
        self._tokens = tokens

    def wrap(self, path: str, handler: Any) -> Any:
        """See ``Wrapper``."""
        if handler.unary_unary is not None:
            return grpc.unary_unary_rpc_method_handler(
                self._unary(path, handler), response_serializer=handler.response_serializer
            )
        return grpc.unary_stream_rpc_method_handler(
            self._stream(path, handler), response_serializer=handler.response_serializer
        )

    def _unary(self, path: str, handler: Any) -> Callable[[bytes, Any], Awaitable[Any]]:
        async def call(raw: bytes, context: Any) -> Any:
            try:
                with _translated(path):
                    return await handler.unary_unary(self._admit(path, handler, raw, context), context)
            except Refusal as refusal:
                await abort(context, refusal)

        return call

    def _stream(self, path: str, handler: Any) -> Callable[[bytes, Any], AsyncIterator[Any]]:
        async def call(raw: bytes, context: Any) -> AsyncIterator[Any]:
            try:
                with _translated(path):
                    async for answer in handler.unary_stream(self._admit(path, handler, raw, context), context):
                        yield answer
            except Refusal as refusal:
                await abort(context, refusal)

        return call

    def _admit(self, path: str, handler: Any, raw: bytes, context: Any) -> Any:
        """The decoded request of a caller whose token is good."""
        auth.check(self._tokens, path, context.invocation_metadata())
        try:
            return handler.request_deserializer(raw)
        except DecodeError as error:
            raise Refusal(pb.REASON_UNSPECIFIED, f"the request of {path} does not decode.") from error


@contextlib.contextmanager
def _translated(path: str) -> Iterator[None]:
    """Turns an unexpected exception into INTERNAL, its traceback into the log."""
    try:
        yield
    except (Refusal, grpc.aio.AbortError):
        raise
    except Exception as error:
        log.exception("call failed", method=path)
        raise internal() from error
