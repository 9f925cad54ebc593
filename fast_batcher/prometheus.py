"""Prometheus metrics of batchers, as an observer that sets metrics of `prometheus_client`.

    batcher --events--> PrometheusObserver --> metrics of a registry <-- /metrics
            <--stats-- each second, for the gauges

The observer runs where the batcher's observers run: in the API process, on the event loop's thread.
The metrics are ordinary ones of `prometheus_client`, so that its multiprocess mode
(`PROMETHEUS_MULTIPROC_DIR`) adds up the server processes of an app.
"""

import asyncio
import contextlib
import logging
import os
from collections import Counter as Counts
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args
from weakref import WeakKeyDictionary, WeakSet

from fast_batcher._core.values import Release
from fast_batcher.batcher import DynBatcher, check_batchers
from fast_batcher.errors import ConfigurationError
from fast_batcher.observing import (
    BatchAnswered,
    CacheResult,
    CacheUsed,
    ChunkTimes,
    CollectionPaused,
    Observer,
    Outcome,
    ReporterChanged,
    RequestEnded,
    WorkerChanged,
)

if TYPE_CHECKING:
    from fastapi import APIRouter

try:
    from prometheus_client import (
        CONTENT_TYPE_LATEST,
        REGISTRY,
        CollectorRegistry,
        Counter,
        Gauge,
        Histogram,
        generate_latest,
    )
    from prometheus_client.multiprocess import MultiProcessCollector
except ModuleNotFoundError as _missing:
    if _missing.name != "prometheus_client":
        raise
    raise ModuleNotFoundError(
        "fast_batcher.prometheus needs prometheus-client: pip install 'fast_batcher[prometheus]'",
        name="prometheus_client",
    ) from _missing

logger: logging.Logger = logging.getLogger("fast_batcher")

# Seconds between two settings of the gauges: shorter than any usual scrape interval.
REFRESH_INTERVAL = 1.0
# Upper bounds of buckets. All batchers of a registry share them, and `max_batch_size` may change
# while a batcher runs, so that they cannot depend on it.
BATCH_SIZES = tuple(2**exponent for exponent in range(11))
SECONDS = (*(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05), *(0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30))


def instrument(batcher: DynBatcher[Any, Any], registry: CollectorRegistry | None = None) -> None:
    """Record Prometheus metrics of a batcher from now on.

    Batchers share the metrics of a registry, and differ in the label `model`, the batcher's name.
    Batchers with the same name share their metrics, which are sums. A second call for the same
    batcher and registry has no effect.

    Args:
        batcher: The batcher, open or not.
        registry: The registry of the metrics, None for `prometheus_client.REGISTRY`.

    Raises:
        ValueError: The registry already has other metrics with one of these names.
        ConfigurationError: An argument is of another type.
    """
    check_batchers("instrument", batcher)
    registry = _check_registry("instrument", registry)
    metrics = _metrics.get(registry)
    if metrics is None:
        metrics = _metrics[registry] = _Metrics(registry)
    else:
        metrics.register_again(registry)
    if batcher not in metrics.batchers:
        metrics.batchers.add(batcher)
        observer = PrometheusObserver(batcher, metrics)
        batcher.add_observer(observer)
        if batcher.state not in ("new", "closed"):
            observer.refresh_soon()


def metrics_router(registry: CollectorRegistry | None = None) -> "APIRouter":
    """Make the route `/metrics`, for an app that has none yet. Needs FastAPI.

    In the multiprocess mode of `prometheus_client` it answers with the metrics of all server
    processes, whatever the registry.

    Args:
        registry: The registry to show, None for `prometheus_client.REGISTRY`.

    Raises:
        ConfigurationError: `registry` is of another type, for example a batcher.
    """
    registry = _check_registry("metrics_router", registry)
    try:
        from fastapi import APIRouter, Response
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "metrics_router needs FastAPI: pip install 'fast_batcher[fastapi]'", name="fastapi"
        ) from error

    router = APIRouter(include_in_schema=False)
    warned = {""}  # each problem is logged once

    # A plain function, which runs in a thread: the event loop does not wait for the text.
    @router.get("/metrics")
    def metrics() -> Response:
        shown = registry
        if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
            shown = CollectorRegistry()
            MultiProcessCollector(shown)  # type: ignore[no-untyped-call]  # it has no annotations
        elif (lack := _describe_lack(registry)) not in warned:
            warned.add(lack)
            logger.warning("%s", lack)
        return Response(generate_latest(shown), headers={"Content-Type": CONTENT_TYPE_LATEST})

    return router


def _describe_lack(registry: CollectorRegistry) -> str:
    """Describe why a page with the metrics of a registry misleads; "" if it does not."""
    metrics = _metrics.get(registry)
    if metrics is None:
        return "/metrics has no metrics of a batcher: call instrument(batcher) with its registry"
    if metrics.reported_elsewhere:
        return (
            "/metrics of this process shows 0 for what another server process reports, of "
            f"{', '.join(sorted(metrics.reported_elsewhere))}: set PROMETHEUS_MULTIPROC_DIR to an "
            "empty directory, and each process shows the sums of all"
        )
    return ""


def _check_registry(caller: str, registry: CollectorRegistry | None) -> CollectorRegistry:
    """Return a registry, by default that of the process."""
    if registry is None:
        return REGISTRY
    if not isinstance(registry, CollectorRegistry):
        raise ConfigurationError(
            f"{caller}: registry={registry!r:.100}: give a prometheus_client.CollectorRegistry, or "
            "omit it; `instrument(batcher)` adds the metrics of a batcher"
        )
    return registry


class _Metrics:
    """The metrics of one registry, and the batchers whose observers set them."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.batchers: WeakSet[DynBatcher[Any, Any]] = WeakSet()
        # Names of the batchers whose gauges another server process sets.
        self.reported_elsewhere: set[str] = set()

        def count(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"fast_batcher_{name}", text, ("model", *labels), registry=registry)

        def distribute(name: str, text: str, buckets: tuple[float, ...] = SECONDS) -> Histogram:
            name = f"fast_batcher_{name}"
            return Histogram(name, text, ("model",), registry=registry, buckets=buckets)

        def show(
            name: str,
            text: str,
            over_processes: Literal["livesum", "livemax"] = "livesum",
            labels: tuple[str, ...] = ("model",),
        ) -> Gauge:
            name = f"fast_batcher_{name}"
            return Gauge(name, text, labels, registry=registry, multiprocess_mode=over_processes)

        self.requests: Counter = count("requests_total", "Requests that have ended.", "outcome")
        self.batches: Counter = count(
            "batches_total", "Batches that workers have answered.", "release"
        )
        self.restarts: Counter = count(
            "worker_restarts_total", "Workers that took another's place."
        )
        self.late_errors: Counter = count(
            "late_errors_total", "Batches whose error no caller has got, because they had left."
        )
        self.loop_blocked: Counter = count(
            "event_loop_blocked_seconds_total",
            "Time for which the event loop of an API process was blocked, at least.",
        )
        self.cache: Counter = count(
            "cache_requests_total", "Calls of a batcher with a cache, by its result.", "result"
        )
        self.batch_size: Histogram = distribute(
            "batch_size", "Requests in answered batches.", BATCH_SIZES
        )
        self.queue_wait: Histogram = distribute(
            "queue_wait_seconds", "From a request's arrival until its worker began with it."
        )
        self.infer: Histogram = distribute("infer_seconds", "Time that the model took for a batch.")
        self.request: Histogram = distribute(
            "request_seconds", "From a request's arrival to its end, but for rejected requests."
        )
        self.first_chunk: Histogram = distribute(
            "first_chunk_seconds", "From a stream's arrival to its first chunk, noted at its end."
        )
        self.chunk_gap: Histogram = distribute(
            "chunk_gap_seconds", "Mean time between the chunks of a stream, noted at its end."
        )
        self.chunks: Counter = count("chunks_total", "Chunks that workers have sent.")
        self.live_streams: Gauge = show("live_streams", "Streams that have a place in a worker.")
        self.places: Gauge = show("stream_places", "Places for streams in the ready workers.")
        self.gc_pause: Histogram = distribute(
            "gc_pause_seconds", "Pauses of the API process by Python's garbage collector."
        )
        self.queue_size: Gauge = show("queue_size", "Requests that wait for a worker.")
        self.workers_ready: Gauge = show("workers_ready", "Workers that have loaded the model.")
        self.workers_wanted: Gauge = show("workers_wanted", "Workers that there should be.")
        self.in_flight: Gauge = show("in_flight", "Requests that workers have.")
        self.sessions: Gauge = show("sessions", "Live sessions.")
        self.gpu_bytes: Gauge = show(
            "gpu_reserved_bytes",
            "Memory of the GPU that PyTorch has reserved in a worker.",
            labels=("model", "worker"),
        )
        # Seconds of several server processes do not add up.
        self.backlog: Gauge = show(
            "backlog_seconds",
            "Predicted time in which the ready workers answer everything that waits and runs.",
            "livemax",
        )

    def register_again(self, registry: CollectorRegistry) -> None:
        """Register metrics that something has removed, as fixtures of tests clear a registry."""
        for metric in vars(self).values():
            if isinstance(metric, Counter | Gauge | Histogram):
                with contextlib.suppress(KeyError):  # it was removed
                    registry.unregister(metric)
                registry.register(metric)


# The metrics that this module has made, by their registries.
_metrics: WeakKeyDictionary[CollectorRegistry, _Metrics] = WeakKeyDictionary()


class Figures(NamedTuple):
    """The values of the gauges of one batcher."""

    waiting: int = 0
    workers_ready: int = 0
    workers_wanted: int = 0
    running: int = 0
    backlog: float = 0.0
    sessions: int = 0
    live_streams: int = 0
    places: int = 0


class _Series:
    """The time series of one batcher, looked up once: `labels` takes longer than `inc`."""

    def __init__(self, metrics: _Metrics, model: str) -> None:
        # Every series exists from the start, because a rate needs a zero to begin with.
        self.requests = {
            outcome: metrics.requests.labels(model, outcome) for outcome in get_args(Outcome)
        }
        self.batches = {
            str(release): metrics.batches.labels(model, str(release)) for release in Release
        }
        self.restarts = metrics.restarts.labels(model)
        self.late_errors = metrics.late_errors.labels(model)
        self.loop_blocked = metrics.loop_blocked.labels(model)
        self.cache = {
            result: metrics.cache.labels(model, result) for result in get_args(CacheResult)
        }
        self.batch_size = metrics.batch_size.labels(model)
        self.queue_wait = metrics.queue_wait.labels(model)
        self.infer = metrics.infer.labels(model)
        self.request = metrics.request.labels(model)
        self.gc_pause = metrics.gc_pause.labels(model)
        self.gauges = (
            metrics.queue_size.labels(model),
            metrics.workers_ready.labels(model),
            metrics.workers_wanted.labels(model),
            metrics.in_flight.labels(model),
            metrics.backlog.labels(model),
            metrics.sessions.labels(model),
        )


class _StreamSeries:
    """The further time series of a batcher whose model answers in steps."""

    def __init__(self, metrics: _Metrics, model: str) -> None:
        self.first_chunk = metrics.first_chunk.labels(model)
        self.chunk_gap = metrics.chunk_gap.labels(model)
        self.chunks = metrics.chunks.labels(model)
        self.gauges = metrics.live_streams.labels(model), metrics.places.labels(model)


class PrometheusObserver(Observer):
    """Sets the metrics of one batcher; `instrument` makes it.

    Args:
        batcher: The batcher, whose `stats` give the gauges and the late errors.
        metrics: The metrics of a registry.
    """

    def __init__(self, batcher: DynBatcher[Any, Any], metrics: _Metrics) -> None:
        self._batcher = batcher
        self._metrics = metrics
        self._timer: asyncio.Handle | None = None
        # This batcher's part of the gauges; its late errors, chunks and seconds of a blocked loop
        # that are counted already.
        self._shown = [0.0] * len(Figures())
        self._late_errors = self._chunks = 0
        self._loop_blocked = 0.0
        self._gpu_bytes: dict[int, int] = {}

    @cached_property
    def _series(self) -> _Series:
        """The batcher's series, made at its first event.

        In multiprocess mode a series is written to a file at once. A worker that imports the app's
        module instruments a batcher as well, but there it has no events.
        """
        return _Series(self._metrics, self._batcher.name)

    @cached_property
    def _streams(self) -> _StreamSeries:
        return _StreamSeries(self._metrics, self._batcher.name)

    def batch_answered(self, event: BatchAnswered) -> None:
        """Count a batch and its requests."""
        series = self._series
        series.batches[event.release].inc()
        if event.chunks is None:
            series.batch_size.observe(event.size)
        elif event.requests:  # else it is told again when it ends
            self._count_stream(event.chunks)
        series.infer.observe(event.infer_seconds)
        for request in event.requests:
            series.queue_wait.observe(request.queue_wait)
            series.request.observe(request.total)
        for outcome, count in Counts([request.outcome for request in event.requests]).items():
            series.requests[outcome].inc(count)

    def request_ended(self, event: RequestEnded) -> None:
        """Count a request."""
        self._series.requests[event.outcome].inc()
        if event.outcome != "rejected":
            self._series.request.observe(event.wait)
        if event.chunks is not None:
            self._count_stream(event.chunks)

    def _count_stream(self, chunks: ChunkTimes) -> None:
        if chunks.first_seconds is not None:
            self._streams.first_chunk.observe(chunks.first_seconds)
        if chunks.mean_gap is not None:
            self._streams.chunk_gap.observe(chunks.mean_gap)

    def cache_used(self, event: CacheUsed) -> None:
        """Count a call that used the cache."""
        self._series.cache[event.result].inc()

    def collection_paused(self, event: CollectionPaused) -> None:
        """Note a pause."""
        self._series.gc_pause.observe(event.seconds)

    def worker_changed(self, event: WorkerChanged) -> None:
        """Count a restart, and set the gauges as soon as the batcher has noted the change."""
        if event.change == "restarted":
            self._series.restarts.inc()
        self.refresh_soon()

    def reporter_changed(self, event: ReporterChanged) -> None:
        """Set the gauges, or set them to zero if another process shows them."""
        elsewhere = self._metrics.reported_elsewhere
        (elsewhere.discard if event.is_reporter else elsewhere.add)(self._batcher.name)
        # Another process has counted these.
        stats = self._batcher.stats
        self._late_errors, self._chunks = stats.late_errors, stats.chunks
        self.refresh_soon()

    def refresh_soon(self) -> None:
        """Set the gauges in the loop's next turn, and then each second until the batcher closes."""
        if self._timer is not None:
            self._timer.cancel()
        try:
            self._timer = asyncio.get_running_loop().call_soon(self._refresh_each_second)
        except RuntimeError:  # `stop` has been called after the loop's end
            self._refresh()

    def _refresh_each_second(self) -> None:
        # A timer does this, not the scrape: in multiprocess mode a scrape reaches one process only.
        self._timer = None
        # First, because an error of a metric must not end the timer.
        if self._batcher.state != "closed":
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(REFRESH_INTERVAL, self._refresh_each_second)
        self._refresh()

    def _refresh(self) -> None:
        """Bring the gauges, and the counts of late errors and of chunks, up to date."""
        stats = self._batcher.stats
        values = Figures()
        if stats.is_reporter:
            is_ending = stats.state in ("draining", "closed")
            values = Figures(
                stats.waiting,
                stats.workers_ready,
                0 if is_ending else stats.num_workers,
                stats.running,
                # The gauge changes in steps of 1 / 1024, because sums of such steps are exact.
                round(1024 * (stats.backlog or 0.0)) / 1024,
                stats.sessions,
                stats.live_streams,
                stats.places or 0,
            )
        gauges: tuple[Gauge, ...] = self._series.gauges
        streams = None if stats.places is None else self._streams
        if streams is not None:
            gauges += streams.gauges
        for index, (gauge, value) in enumerate(zip(gauges, values, strict=False)):
            gauge.inc(value - self._shown[index])
            self._shown[index] = value
        self._show_gpu_bytes(stats.gpu_bytes if stats.is_reporter else {})
        late, chunks = stats.late_errors, stats.chunks
        if stats.is_reporter:
            self._series.late_errors.inc(max(0, late - self._late_errors))
            if streams is not None:
                streams.chunks.inc(max(0, chunks - self._chunks))
        self._late_errors, self._chunks = late, chunks
        # Each process has a loop of its own, whichever reports.
        blocked, self._loop_blocked = stats.loop_blocked - self._loop_blocked, stats.loop_blocked
        self._series.loop_blocked.inc(blocked)

    def _show_gpu_bytes(self, found: dict[int, int]) -> None:
        for worker in found.keys() | self._gpu_bytes.keys():
            gauge = self._metrics.gpu_bytes.labels(self._batcher.name, str(worker))
            gauge.inc(found.get(worker, 0) - self._gpu_bytes.get(worker, 0))
        self._gpu_bytes = found
