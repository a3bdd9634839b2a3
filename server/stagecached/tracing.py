"""Spans of records, for OpenTelemetry: off unless ``--tracing true``, and then nothing of this is imported.

A record that belongs to a worker's span (``stagecache_wire.traces``) is done inside a child of it; the span says how
long the record waited, how many rows it moved, and to which session it belongs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from stagecache_wire.records import Record
from stagecache_wire.traces import TracingMissingError, open_provider, read_context
from stagecached.consumer import Consumer
from stagecached.ownership import StartError
from stagecached.segments import SessionSegments

if TYPE_CHECKING:
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider

    from stagecached.sessions import ConsumerFactory


def traced(make: ConsumerFactory) -> tuple[ConsumerFactory, Callable[[], None]]:
    """A factory whose consumers trace, and what to call at the end: it sends the rest.

    Raises:
        StartError: OpenTelemetry is not installed.
    """
    try:
        provider = open_provider("stagecached", {})
    except TracingMissingError as error:
        raise StartError(str(error)) from error
    return tracing_factory(make, provider), provider.shutdown


def tracing_factory(make: ConsumerFactory, provider: TracerProvider) -> ConsumerFactory:
    """Consumers of ``make`` that trace with this provider."""
    tracer = provider.get_tracer("stagecached")

    def build(
        segments: SessionSegments, on_failed: Callable[[int, str], None], on_key_closed: Callable[[int], None]
    ) -> Consumer:
        consumer = make(segments, on_failed, on_key_closed)
        _trace(consumer, segments, tracer)
        return consumer

    return build


def _trace(consumer: Consumer, segments: SessionSegments, tracer: trace.Tracer) -> None:
    """Let one consumer do its records inside spans."""
    from opentelemetry import trace

    do, words, session_id = consumer._do, segments.words, segments.names.session_id

    def traced_do(record: Record) -> None:
        found = read_context(words, record.sequence)
        if found is None:
            return do(record)
        parent = trace.SpanContext(found[0], found[1], is_remote=True, trace_flags=trace.TraceFlags(1))
        context = trace.set_span_in_context(trace.NonRecordingSpan(parent))
        published = consumer.figures.published(record.sequence)
        attributes: dict[str, str | int] = {
            "stagecache.session": session_id,
            "stagecache.sequence": record.sequence,
            "stagecache.rows": record.rows,
            "stagecache.gathers": len(record.gathers),
            "stagecache.waited_us": (time.monotonic_ns() - published) // 1000 if published else 0,
        }
        with tracer.start_as_current_span(f"stagecached.{record.kind.name}", context=context, attributes=attributes):
            do(record)
        return None

    consumer._do = traced_do  # type: ignore[method-assign]
