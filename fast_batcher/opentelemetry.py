"""OpenTelemetry traces of batches, as an observer. Needs the package `opentelemetry-api` alone.

    caller's span --------------------------------------+     (of one sampled caller)
      |- queue                                          |
      |- infer  ---link--->  <model> batch  <--child of-+
                               |   ---links--->  the span of every sampled caller
                               +- spans that the model makes in `infer`

A stream is a batch of one request: its span `<model> stream` has the first chunk as an event, and
the number of chunks as an attribute.

The observer runs in the API process. The batch's span begins there when the batch is dispatched.
Its context goes with the batch, in the W3C format, and is made current around `infer`. With
`shared`, the API process of one sampled caller makes all spans of the batch after its end, and the
context of that caller is current around `infer`.
"""

import time
from collections.abc import Iterable
from contextlib import AbstractContextManager
from contextvars import Context as CallerContext
from contextvars import Token
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from fast_batcher._process import monotonic
from fast_batcher.observing import (
    AnsweredRequest,
    BatchAnswered,
    BatchDispatched,
    BatchLost,
    CarriedContext,
    ChunkTimes,
    Observer,
)

try:
    from opentelemetry.context import Context, attach, detach
    from opentelemetry.trace import (
        Link,
        Span,
        Status,
        StatusCode,
        TracerProvider,
        get_current_span,
        get_tracer,
        set_span_in_context,
    )
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
except ModuleNotFoundError as _missing:
    if _missing.name is None or _missing.name.partition(".")[0] != "opentelemetry":
        raise
    raise ModuleNotFoundError(
        "fast_batcher.opentelemetry needs opentelemetry-api: "
        "pip install 'fast_batcher[opentelemetry]'",
        name="opentelemetry",
    ) from _missing

if TYPE_CHECKING:
    from fast_batcher.batcher import DynBatcher

# Both ends of a worker's pipe use this format, whatever propagators the app sets.
_W3C = TraceContextTextMapPropagator()


def instrument(
    batcher: "DynBatcher[Any, Any]", tracer_provider: TracerProvider | None = None
) -> None:
    """Trace the batches of a batcher from now on.

    Call it once. For a decorated function give the decorator `observers=[OpenTelemetryObserver()]`.

    Args:
        batcher: The batcher, open or not.
        tracer_provider: Makes the spans, None for the global one.
    """
    batcher.add_observer(OpenTelemetryObserver(tracer_provider))


class CurrentContext(AbstractContextManager[None]):
    """Makes a context of OpenTelemetry current; it is pickled as W3C trace context.

    Args:
        context: The context.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._token: Token[Context] | None = None

    def __enter__(self) -> None:
        self._token = attach(self._context)

    def __exit__(self, *_: object) -> None:
        if self._token is not None:
            detach(self._token)

    def __reduce__(self) -> tuple[Any, ...]:
        carrier: dict[str, str] = {}
        _W3C.inject(carrier, self._context)
        return _read_carrier, (carrier,)


def _read_carrier(carrier: dict[str, str]) -> CurrentContext:
    return CurrentContext(_W3C.extract(carrier, Context()))


@dataclass(frozen=True, slots=True)
class _Traced:
    """The span of a batch that runs, with the spans of its sampled callers."""

    span: Span
    # Spans, by the id of the caller's context, which the event of the dispatch keeps alive.
    callers: dict[int, Span]
    # Nanoseconds to add to a moment of the monotonic clock. One number for all spans of a batch, so
    # that a step of the wall clock cannot put them into another order.
    offset: int

    def wall(self, moment: float) -> int:
        """Convert a moment of the monotonic clock to nanoseconds of the wall clock."""
        return round(moment * 1e9) + self.offset

    def end(self, moment: float, chunks: ChunkTimes | None) -> None:
        """End the span of the batch, which may be a stream."""
        if chunks is not None:
            self.span.set_attribute("fast_batcher.stream.chunks", chunks.count)
            if chunks.count:
                self.span.add_event("first chunk", timestamp=self.wall(chunks.first_at))
        self.span.end(self.wall(moment))


class OpenTelemetryObserver(Observer):
    """Makes the spans of batches, and two spans below the span of each sampled caller.

    One observer may serve several batchers and decorated functions.

    Args:
        tracer_provider: Makes the spans, None for the global one.
    """

    needs_context = True

    def __init__(self, tracer_provider: TracerProvider | None = None) -> None:
        self._tracer = get_tracer("fast_batcher", tracer_provider=tracer_provider)
        # The batches that run.
        self._traced: WeakKeyDictionary[BatchDispatched, _Traced] = WeakKeyDictionary()

    def carry_context(self, context: CallerContext) -> CarriedContext | None:
        """Follow the batches of sampled callers."""
        span = context.run(get_current_span)
        if not span.get_span_context().is_valid:
            return None
        return CarriedContext(
            CurrentContext(set_span_in_context(span, Context())), is_followed=_is_sampled(span)
        )

    def batch_dispatched(self, event: BatchDispatched) -> CurrentContext | None:
        """Begin the span of a batch if a caller is sampled; return the context for its worker."""
        callers = _find_spans(event.contexts)
        if not callers:
            return None
        sampled = {key: span for key, span in callers.items() if _is_sampled(span)}
        if not sampled:  # the model's own spans must not be sampled either
            unsampled = next(iter(callers.values()))
            return CurrentContext(set_span_in_context(unsampled, Context()))
        spans = [*dict.fromkeys(sampled.values())]
        offset = time.time_ns() - round(monotonic() * 1e9)
        span = self._tracer.start_span(
            f"{event.model} {'stream' if event.is_stream else 'batch'}",
            # The child of a sampled span is sampled by every usual sampler; a root might not be.
            context=set_span_in_context(spans[0], Context()),
            links=[Link(span.get_span_context()) for span in spans],
            attributes={
                "fast_batcher.model": event.model,
                "fast_batcher.worker": event.worker,
                "fast_batcher.batch.id": event.batch_id,
                "fast_batcher.batch.size": event.size,
                "fast_batcher.batch.cost": event.cost,
                "fast_batcher.batch.release": event.release,
            },
            start_time=round(event.dispatched_at * 1e9) + offset,
        )
        self._traced[event] = _Traced(span, sampled, offset)
        return CurrentContext(set_span_in_context(span, Context()))

    def batch_answered(self, event: BatchAnswered) -> None:
        """End the span of a batch, and add the spans of its requests."""
        traced = None if event.dispatched is None else self._traced.pop(event.dispatched, None)
        if traced is None:
            return
        failed = sum([request.outcome == "failed" for request in event.requests])
        if failed or event.retried:
            text = f"{failed} requests failed, {event.retried} are tried again"
            traced.span.set_status(Status(StatusCode.ERROR, text))
        traced.end(event.answered_at, event.chunks)
        answered = [
            (traced.callers.get(id(request.context)), request) for request in event.requests
        ]
        for caller, request in dict(answered).items():
            if caller is not None:
                self._add_spans(traced, caller, event, request)

    def batch_lost(self, event: BatchLost) -> None:
        """End the span of a batch that has no answer."""
        traced = self._traced.pop(event.dispatched, None)
        if traced is not None:
            # It is usual that the caller of a stream leaves before its end.
            if event.chunks is None or event.reason != "skipped":
                traced.span.set_status(Status(StatusCode.ERROR, event.reason))
            traced.end(monotonic(), event.chunks)

    def _add_spans(
        self, traced: _Traced, caller: Span, event: BatchAnswered, request: AnsweredRequest
    ) -> None:
        """Add the spans `queue` and `infer` below a caller's span."""
        context = set_span_in_context(caller, Context())
        arrived = traced.wall(event.began_at - request.queue_wait)
        began = traced.wall(event.began_at)
        queue = self._tracer.start_span("queue", context=context, start_time=arrived)
        queue.end(began)
        links = [Link(traced.span.get_span_context())]
        infer = self._tracer.start_span("infer", context=context, links=links, start_time=began)
        if request.outcome == "failed":
            infer.set_status(StatusCode.ERROR)
        ended = min(event.began_at + event.infer_seconds, event.answered_at)
        infer.end(traced.wall(ended))


def _find_spans(contexts: Iterable[CallerContext | None]) -> dict[int, Span]:
    """Return the current valid span of each context, by the context's id."""
    distinct = {id(context): context for context in contexts if context is not None}
    spans = {key: context.run(get_current_span) for key, context in distinct.items()}
    return {key: span for key, span in spans.items() if span.get_span_context().is_valid}


def _is_sampled(span: Span) -> bool:
    return span.get_span_context().trace_flags.sampled
