"""How a trace crosses shared memory: a ring of span contexts beside the log, one entry a record, and the exporter that
both sides use. Nothing of this is touched while tracing is off.

The worker writes the context before it publishes the record; the daemon takes it while it does the record, and makes
its span a child of the worker's. A record without an entry (tracing is off in the worker, its trace is not sampled, or
the daemon is more than ``layout.TRACE_ENTRIES`` records behind) gets no span.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stagecache_wire import layout

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

_LOW = (1 << 64) - 1


class TracingMissingError(RuntimeError):
    """Tracing is on, and OpenTelemetry is not installed."""

    def __init__(self) -> None:
        super().__init__(
            "tracing needs OpenTelemetry, which is not installed. Install stagecache[tracing], or turn tracing off."
        )


def write_context(words: memoryview, sequence: int, trace_id: int, span_id: int) -> None:
    """The worker's: the record ``sequence``, not published yet, belongs to this span."""
    at = layout.W_TRACES + (sequence - 1) % layout.TRACE_ENTRIES * 4
    words[at] = 0
    words[at + 1] = trace_id & _LOW
    words[at + 2] = trace_id >> 64
    words[at + 3] = span_id
    words[at] = sequence


def read_context(words: memoryview, sequence: int) -> tuple[int, int] | None:
    """The daemon's: trace id and span id that the record ``sequence`` belongs to; None where there is none."""
    at = layout.W_TRACES + (sequence - 1) % layout.TRACE_ENTRIES * 4
    found, low, high, span_id = words[at : at + 4].tolist()
    if found != sequence or words[at] != sequence:
        return None
    return high << 64 | low, span_id


def open_provider(service: str, attributes: dict[str, Any]) -> TracerProvider:
    """A provider that sends spans to an OTLP collector (``OTEL_EXPORTER_OTLP_ENDPOINT`` and the other OTEL variables).

    Raises:
        TracingMissingError: OpenTelemetry is not installed.
    """
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise TracingMissingError from error
    provider = TracerProvider(resource=Resource.create({"service.name": service, **attributes}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider
