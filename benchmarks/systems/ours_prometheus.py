"""fast_batcher with Prometheus metrics, which are scraped each second."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest

from benchmarks.scenarios import Load, Process
from benchmarks.systems import ours
from fast_batcher.prometheus import instrument

DISTRIBUTIONS = ["fast_batcher", "prometheus-client"]


@asynccontextmanager
async def opened(load: Load, **settings: Any) -> AsyncIterator[Process]:
    """Start the worker and the scrapes, and wait until the worker is ready.

    Args:
        load: Of the model.
        settings: Of the batcher.
    """
    registry = CollectorRegistry()

    async def scrape() -> None:
        while True:
            await asyncio.to_thread(generate_latest, registry)  # as the route does
            await asyncio.sleep(1)

    batcher = ours.make_batcher(load, **settings)
    instrument(batcher, registry)
    async with batcher:
        scrapes = asyncio.create_task(scrape())
        yield batcher.process_batched
        scrapes.cancel()
