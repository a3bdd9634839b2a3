"""Times of gRPC calls and reasons of refusals, seen from outside of every handler. On the event loop only."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc

from stagecache_wire.v1 import stagecache_pb2 as pb
from stagecached.metrics.catalog import CALL_BOUNDS_S, METHODS, REASONS
from stagecached.metrics.histogram import Histogram
from stagecached.refusal import ERROR_METADATA_KEY

OnRefusal = Callable[[str, pb.Error], None]
"""Called with the method and the Error that the caller gets."""


class CallFigures:
    """What the calls of this daemon came to."""

    def __init__(self) -> None:
        self.seconds = {method: Histogram(CALL_BOUNDS_S) for method in METHODS}
        self.refused = dict.fromkeys(REASONS, 0)


class CallTimer:
    """The outermost wrapper (``stagecached.interceptor``): its time includes the token check and a refusal's answer."""

    def __init__(self, figures: CallFigures, on_refusal: OnRefusal) -> None:
        self._figures = figures
        self._on_refusal = on_refusal

    def wrap(self, path: str, handler: Any) -> Any:
        """The handler, timed. path: ``/service/Method``."""
        method = path.rpartition("/")[2]
        if handler.unary_unary is not None:
            return grpc.unary_unary_rpc_method_handler(
                self._unary(method, handler.unary_unary), handler.request_deserializer, handler.response_serializer
            )
        return grpc.unary_stream_rpc_method_handler(
            self._stream(method, handler.unary_stream), handler.request_deserializer, handler.response_serializer
        )

    def _unary(self, method: str, inner: Callable[[Any, Any], Awaitable[Any]]) -> Callable[[Any, Any], Awaitable[Any]]:
        seconds = self._figures.seconds.get(method)

        async def call(request: Any, context: Any) -> Any:
            begun = time.perf_counter()
            try:
                return await inner(request, context)
            except grpc.aio.AbortError:
                self._refused(method, context)
                raise
            finally:
                if seconds is not None:
                    seconds.observe(time.perf_counter() - begun)

        return call

    def _stream(
        self, method: str, inner: Callable[[Any, Any], AsyncIterator[Any]]
    ) -> Callable[[Any, Any], AsyncIterator[Any]]:
        async def call(request: Any, context: Any) -> AsyncIterator[Any]:
            try:
                async for answer in inner(request, context):
                    yield answer
            except grpc.aio.AbortError:
                self._refused(method, context)
                raise

        return call

    def _refused(self, method: str, context: Any) -> None:
        """Count an answer that was a Refusal: its Error is in the trailing metadata."""
        for key, value in context.trailing_metadata() or ():
            if key == ERROR_METADATA_KEY:
                error = pb.Error.FromString(value)
                self._figures.refused[pb.Reason.Name(error.reason).removeprefix("REASON_").lower()] += 1
                self._on_refusal(method, error)
