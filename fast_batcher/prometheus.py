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
from collections.abc import Callable, Sequence
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
from fast_batcher.stats import BatcherStats

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
    registered = _registered.get(registry)
    if registered is None:
        registered = _registered[registry] = _Registered(registry)
    else:
        registered.register_again(registry)
    if batcher not in registered.batchers:
        registered.batchers.add(batcher)
        observer = PrometheusObserver(batcher, registered)
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
    registered = _registered.get(registry)
    if registered is None:
        return "/metrics has no metrics of a batcher: call instrument(batcher) with its registry"
    if registered.reported_elsewhere:
        return (
            "/metrics of this process shows 0 for what another server process reports, of "
            f"{', '.join(sorted(registered.reported_elsewhere))}: set PROMETHEUS_MULTIPROC_DIR to "
            "an empty directory, and each process shows the sums of all"
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


class Metric(NamedTuple):
    """Declaration of a metric; all series have the label `model`, the batcher's name."""

    kind: type[Counter | Gauge | Histogram]
    text: str
    # Name of a further label, and its values that are known.
    label: str = ""
    known: Sequence[str] = ()
    # Reads the value from the statistics; None for a metric that events change.
    read: Callable[[BatcherStats], float] | None = None
    # Only of a batcher whose model answers in steps.
    is_of_streams: bool = False
    # Whether each server process reports its own part, also with `shared`.
    is_of_process: bool = False
    buckets: Sequence[float] = SECONDS
    # How a gauge is combined over server processes. Seconds of several do not add up.
    over_processes: Literal["livesum", "livemax"] = "livesum"

    def make(self, name: str, registry: CollectorRegistry) -> Any:
        """Make the metric for all batchers of a registry."""
        options: dict[str, Any] = {}
        if self.kind is Histogram:
            options["buckets"] = self.buckets
        elif self.kind is Gauge:
            options["multiprocess_mode"] = self.over_processes
        labels = ("model", self.label) if self.label else ("model",)
        return self.kind(f"fast_batcher_{name}", self.text, labels, registry=registry, **options)


# The one list of the metrics, by their names; docs/observability.md describes them.
METRICS = {
    "requests_total": Metric(Counter, "Requests that have ended.", "outcome", get_args(Outcome)),
    "batches_total": Metric(
        Counter, "Batches that workers have answered.", "release", [*map(str, Release)]
    ),
    "worker_restarts_total": Metric(Counter, "Workers that took another's place."),
    "late_errors_total": Metric(
        Counter,
        "Batches whose error no caller has got, because they had left.",
        read=lambda stats: stats.late_errors,
    ),
    "event_loop_blocked_seconds_total": Metric(
        Counter,
        "Time for which the event loop of an API process was blocked, at least.",
        read=lambda stats: stats.loop_blocked,
        is_of_process=True,
    ),
    "cache_requests_total": Metric(
        Counter,
        "Calls of a batcher with a cache, by its result.",
        "result",
        get_args(CacheResult),
    ),
    "batch_size": Metric(Histogram, "Requests in answered batches.", buckets=BATCH_SIZES),
    "queue_wait_seconds": Metric(
        Histogram, "From a request's arrival until its worker began with it."
    ),
    "infer_seconds": Metric(Histogram, "Time that the model took for a batch."),
    "request_seconds": Metric(
        Histogram, "From a request's arrival to its end, but for rejected requests."
    ),
    "gc_pause_seconds": Metric(
        Histogram, "Pauses of the API process by Python's garbage collector."
    ),
    "first_chunk_seconds": Metric(
        Histogram,
        "From a stream's arrival to its first chunk, noted at its end.",
        is_of_streams=True,
    ),
    "chunk_gap_seconds": Metric(
        Histogram,
        "Mean time between the chunks of a stream, noted at its end.",
        is_of_streams=True,
    ),
    "chunks_total": Metric(
        Counter,
        "Chunks that workers have sent.",
        read=lambda stats: stats.chunks,
        is_of_streams=True,
    ),
    "live_streams": Metric(
        Gauge,
        "Streams that have a place in a worker.",
        read=lambda stats: stats.live_streams,
        is_of_streams=True,
    ),
    "stream_places": Metric(
        Gauge,
        "Places for streams in the ready workers.",
        read=lambda stats: stats.places or 0,
        is_of_streams=True,
    ),
    "queue_size": Metric(
        Gauge, "Requests that wait for a worker.", read=lambda stats: stats.waiting
    ),
    "workers_ready": Metric(
        Gauge, "Workers that have loaded the model.", read=lambda stats: stats.workers_ready
    ),
    "workers_wanted": Metric(
        Gauge,
        "Workers that there should be.",
        read=lambda stats: 0 if stats.state in ("draining", "closed") else stats.num_workers,
    ),
    "in_flight": Metric(Gauge, "Requests that workers have.", read=lambda stats: stats.running),
    "sessions": Metric(Gauge, "Live sessions.", read=lambda stats: stats.sessions),
    "gpu_reserved_bytes": Metric(
        Gauge,
        "Memory of the GPU that PyTorch has reserved in a worker.",
        "worker",
    ),
    "backlog_seconds": Metric(
        Gauge,
        "Predicted time in which the ready workers answer everything that waits and runs.",
        # It changes in steps of 1 / 1024, because sums of such steps are exact.
        read=lambda stats: round(1024 * (stats.backlog or 0.0)) / 1024,
        over_processes="livemax",
    ),
}


class _Registered:
    """The metrics of one registry, and the batchers whose observers set them."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.batchers: WeakSet[DynBatcher[Any, Any]] = WeakSet()
        # Names of the batchers whose gauges another server process sets.
        self.reported_elsewhere: set[str] = set()
        self.metrics: dict[str, Any] = {n: one.make(n, registry) for n, one in METRICS.items()}

    def register_again(self, registry: CollectorRegistry) -> None:
        """Register metrics that something has removed, as fixtures of tests clear a registry."""
        for metric in self.metrics.values():
            with contextlib.suppress(KeyError):  # it was removed
                registry.unregister(metric)
            registry.register(metric)


# The metrics that this module has made, by their registries.
_registered: WeakKeyDictionary[CollectorRegistry, _Registered] = WeakKeyDictionary()

# Name of a metric, with the value of its further label if it has one.
_Key = str | tuple[str, str]


class _Series(dict[_Key, Any]):
    """The time series of one batcher, looked up once: `labels` takes longer than `inc`."""

    def __init__(self, metrics: dict[str, Any], model: str) -> None:
        self._metrics = metrics
        self._model = model

    def make_known(self, name: str, metric: Metric) -> None:
        """Make the series of a metric: a rate needs a zero to begin with."""
        for key in [(name, value) for value in metric.known] if metric.label else [name]:
            self[key]

    def __missing__(self, key: _Key) -> Any:
        """Make a series."""
        name, *labels = (key,) if isinstance(key, str) else key
        series = self[key] = self._metrics[name].labels(self._model, *labels)
        return series


class PrometheusObserver(Observer):
    """Sets the metrics of one batcher; `instrument` makes it.

    Args:
        batcher: The batcher, whose `stats` give the metrics that no event changes.
        registered: The metrics of a registry.
    """

    def __init__(self, batcher: DynBatcher[Any, Any], registered: _Registered) -> None:
        self._batcher = batcher
        self._registered = registered
        self._timer: asyncio.Handle | None = None
        # This batcher's part of the values that are read from its statistics.
        self._shown: dict[_Key, float] = {}

    @cached_property
    def _series(self) -> _Series:
        """The batcher's series, made at its first event.

        In multiprocess mode a series is written to a file at once. A worker that imports the app's
        module instruments a batcher as well, but there it has no events.
        """
        return _Series(self._registered.metrics, self._batcher.name)

    def batch_answered(self, event: BatchAnswered) -> None:
        """Count a batch and its requests."""
        series = self._series
        series["batches_total", event.release].inc()
        if event.chunks is None:
            series["batch_size"].observe(event.size)
        elif event.requests:  # else it is told again when it ends
            self._count_stream(event.chunks)
        series["infer_seconds"].observe(event.infer_seconds)
        for request in event.requests:
            series["queue_wait_seconds"].observe(request.queue_wait)
            series["request_seconds"].observe(request.total)
        for outcome, count in Counts([request.outcome for request in event.requests]).items():
            series["requests_total", outcome].inc(count)

    def request_ended(self, event: RequestEnded) -> None:
        """Count a request."""
        self._series["requests_total", event.outcome].inc()
        if event.outcome != "rejected":
            self._series["request_seconds"].observe(event.wait)
        if event.chunks is not None:
            self._count_stream(event.chunks)

    def _count_stream(self, chunks: ChunkTimes) -> None:
        if chunks.first_seconds is not None:
            self._series["first_chunk_seconds"].observe(chunks.first_seconds)
        if chunks.mean_gap is not None:
            self._series["chunk_gap_seconds"].observe(chunks.mean_gap)

    def cache_used(self, event: CacheUsed) -> None:
        """Count a call that used the cache."""
        self._series["cache_requests_total", event.result].inc()

    def collection_paused(self, event: CollectionPaused) -> None:
        """Note a pause."""
        self._series["gc_pause_seconds"].observe(event.seconds)

    def worker_changed(self, event: WorkerChanged) -> None:
        """Count a restart, and set the gauges as soon as the batcher has noted the change."""
        if event.change == "restarted":
            self._series["worker_restarts_total"].inc()
        self.refresh_soon()

    def reporter_changed(self, event: ReporterChanged) -> None:
        """Set the gauges, or set them to zero if another process shows them."""
        elsewhere = self._registered.reported_elsewhere
        (elsewhere.discard if event.is_reporter else elsewhere.add)(self._batcher.name)
        stats = self._batcher.stats
        for name, metric in METRICS.items():
            if metric.read is not None and metric.kind is Counter and not metric.is_of_process:
                self._shown[name] = metric.read(stats)  # another process has counted this
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
        """Bring the metrics that are read from the statistics up to date."""
        stats = self._batcher.stats
        for name, metric in METRICS.items():
            if metric.is_of_streams and stats.places is None:
                continue
            if metric.read is None:
                self._series.make_known(name, metric)
            else:
                is_ours = stats.is_reporter or metric.is_of_process
                self._show(metric, name, metric.read(stats), is_ours=is_ours)
        name = "gpu_reserved_bytes"
        gone = {key: 0 for key in self._shown if key[0] == name}  # workers that have ended
        found = {(name, str(worker)): used for worker, used in stats.gpu_bytes.items()}
        for key, used in (gone | found).items():
            self._show(METRICS[name], key, used, is_ours=stats.is_reporter)

    def _show(self, metric: Metric, key: _Key, value: float, *, is_ours: bool) -> None:
        """Add what is new in a value: batchers of one name, and server processes, are summed."""
        if metric.kind is Gauge:
            value *= is_ours
            self._series[key].inc(value - self._shown.get(key, 0))
        elif is_ours:
            self._series[key].inc(max(0, value - self._shown.get(key, 0)))
        self._shown[key] = value
