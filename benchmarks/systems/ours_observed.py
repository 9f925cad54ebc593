"""fast_batcher with Prometheus metrics, scraped each second, and traces of 1 % of the requests.

The other requests have a span that is not sampled, as those of an instrumented app.
"""

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from opentelemetry import trace
from opentelemetry.context import Context, attach, detach
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from prometheus_client import CollectorRegistry, generate_latest

from benchmarks.scenarios import Load, Process
from benchmarks.systems import ours
from fast_batcher import opentelemetry, prometheus

DISTRIBUTIONS = ["fast_batcher", "prometheus-client", "opentelemetry-sdk"]

# One request in this many is traced.
TRACED_EVERY = 100
UNSAMPLED = trace.NonRecordingSpan(trace.SpanContext(trace_id=1, span_id=1, is_remote=False))


class Drops(SpanExporter):
    """Exports nothing."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Drop the spans."""
        return SpanExportResult.SUCCESS


@asynccontextmanager
async def opened(load: Load, **settings: Any) -> AsyncIterator[Process]:
    """Start the worker and the scrapes, and wait until the worker is ready.

    Args:
        load: Of the model.
        settings: Of the batcher.
    """
    registry = CollectorRegistry()
    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(Drops()))
    tracer = provider.get_tracer("app")

    async def scrape() -> None:
        while True:
            await asyncio.to_thread(generate_latest, registry)  # as the route does
            await asyncio.sleep(1)

    batcher = ours.make_batcher(load, **settings)
    prometheus.instrument(batcher, registry)
    opentelemetry.instrument(batcher, provider)
    numbers = itertools.count(1)

    async def process(value: Any) -> Any:
        if next(numbers) % TRACED_EVERY:
            return await batcher.process_batched(value)
        with tracer.start_as_current_span("request", context=Context()):
            return await batcher.process_batched(value)

    async with batcher:
        scrapes = asyncio.create_task(scrape())
        token = attach(trace.set_span_in_context(UNSAMPLED))
        yield process
        detach(token)
        scrapes.cancel()
    provider.shutdown()
