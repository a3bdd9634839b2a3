"""Spans of steps, for OpenTelemetry: off unless ``STAGECACHE_TRACING`` is set, and then nothing of this is imported.

    stagecache.step                 from new_step_starts until its step is consumed
      stagecache.begin, .save, .materialize or .discard
        stagecached.BEGIN, .SAVE, ...     the daemon's share, where it traces too

The methods of one cache are replaced by ones that do the same inside a span. A provider that the engine has set up is
used; else one is made that sends to ``OTEL_EXPORTER_OTLP_ENDPOINT``.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from stagecache_wire.records import Loggable
from stagecache_wire.traces import TracingMissingError, open_provider, write_context

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer

    from stagecache.cache import StageCache

_FLUSH_MS: Final = 2000
_TRACED: Final = ("new_step_starts", "save_outputs", "materialize", "discard_step", "close")

logger = logging.getLogger("stagecache")


def instrument(cache: StageCache, model: str, tracer: Tracer | None = None) -> None:
    """Trace every step of a cache. Where OpenTelemetry is missing, a warning says so and the cache goes on untraced."""
    flush: Callable[[], object] = lambda: None  # noqa: E731
    if tracer is None:
        try:
            tracer, flush = _open(cache, model)
        except TracingMissingError as error:
            logger.warning("stagecache: %s", error)
            return
    _StepTracer(cache, model, tracer, flush)


def _open(cache: StageCache, model: str) -> tuple[Tracer, Callable[[], object]]:
    """A tracer of the engine's provider, or of one of our own, and what sends the rest of its spans."""
    try:
        from opentelemetry import trace
    except ImportError as error:
        raise TracingMissingError from error
    if not isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
        return trace.get_tracer("stagecache"), lambda: None
    provider = open_provider("stagecache-worker", {"stagecache.model": model, "stagecache.stage": cache.session.stage})
    return provider.get_tracer("stagecache"), lambda: provider.force_flush(_FLUSH_MS)


class _StepTracer:
    """The spans of one cache, and the methods that make them."""

    def __init__(self, cache: StageCache, model: str, tracer: Tracer, flush: Callable[[], object]) -> None:
        from opentelemetry.trace import get_current_span, set_span_in_context

        self._cache = cache
        self._tracer = tracer
        self._current = get_current_span
        self._context_of = set_span_in_context
        self._flush = flush
        self._about = {
            "stagecache.model": model,
            "stagecache.stage": cache.session.stage,
            "stagecache.session": cache.session.session_id,
        }
        self._begun: Span | None = None
        self._open: dict[int, Span] = {}
        self._trace_log()
        cache.on_renewed = self._trace_log
        for name in _TRACED:
            inner = getattr(cache, name)
            setattr(cache, name, functools.wraps(inner)(functools.partial(getattr(self, name), inner)))

    def _trace_log(self) -> None:
        """Follow the cache to the log of its session; may be called again."""
        log = self._cache.session.log
        if "append" not in vars(log):
            self._append = log.append
            log.append = self._traced_append  # type: ignore[method-assign]
        self._about["stagecache.session"] = self._cache.session.session_id

    def new_step_starts(self, inner: Callable[[Any], None], scheduler_output: Any) -> None:
        if self._begun is not None:
            self._begun.set_attribute("stagecache.outcome", "lost")
            self._begun.end()
        self._begun = self._tracer.start_span("stagecache.step", attributes=self._about)
        self._inside(self._begun, "begin", inner, scheduler_output)

    def save_outputs(self, inner: Callable[..., int], *arguments: Any, **named: Any) -> int:
        step, self._begun = self._begun, None
        if step is None:
            return inner(*arguments, **named)
        try:
            step_id: int = self._inside(step, "save", inner, *arguments, **named)
        except BaseException:
            step.set_attribute("stagecache.outcome", "refused")
            step.end()
            raise
        step.set_attribute("stagecache.step_id", step_id)
        step.set_attribute("stagecache.tokens", named.get("num_tokens_unpadded", 0))
        self._open[step_id] = step
        return step_id

    def materialize(self, inner: Callable[[int, Sequence[str]], Any], step_id: int, req_ids: Sequence[str]) -> Any:
        return self._consume("materialize", inner, step_id, req_ids)

    def discard_step(self, inner: Callable[[int], None], step_id: int) -> None:
        self._consume("discard", inner, step_id)

    def close(self, inner: Callable[[], None]) -> None:
        inner()
        for span in self._open.values():
            span.end()
        self._open.clear()
        self._flush()
        for name in _TRACED:  # They refer to the cache that holds them, and its mapping would outlive it.
            vars(self._cache).pop(name, None)
        self._cache.on_renewed = lambda: None
        vars(self._cache.session.log).pop("append", None)

    def _consume(self, name: str, inner: Callable[..., Any], step_id: int, *more: Any) -> Any:
        step = self._open.get(step_id)
        if step is None:
            return inner(step_id, *more)
        try:
            return self._inside(step, name, inner, step_id, *more)
        finally:
            if step_id not in self._cache._steps:
                self._open.pop(step_id, None)
                step.set_attribute("stagecache.outcome", name)
                step.end()

    def _inside(self, step: Span, name: str, inner: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """Do it in a child of the step; the child is current, so that records and the engine's spans find it."""
        with self._tracer.start_as_current_span(f"stagecache.{name}", context=self._context_of(step)):
            return inner(*arguments, **named)

    def _traced_append(self, record: Loggable, timeout_s: float, *, urgent: bool = True) -> int:
        context = self._current().get_span_context()
        log = self._cache.session.log
        if context.trace_flags.sampled:
            write_context(self._cache.session.control.words, log.head + 1, context.trace_id, context.span_id)
        return self._append(record, timeout_s, urgent=urgent)
