"""Prometheus metrics: in this process, and of two servers that a real Prometheus scrapes."""

import asyncio
import contextlib
import itertools
import json
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import httpx2
import pytest
import yaml
from fastapi import FastAPI
from models.base import Echo
from models.crashing import Crashes
from models.on_gpu import OnGpu
from models.ordinary import Gated
from models.raising import FailsAtGate
from models.remembering import Diary, Line
from models.stepped import Counter as Steps
from models.stepped import Plan
from programs import run_command
from prometheus_client import CollectorRegistry, Gauge, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_fastapi_instrumentator import Instrumentator
from server_load import GUNICORN, URL
from servers import Server, find_free_port, get, serve
from shared_hosts import Hosts, hosts
from starlette.testclient import TestClient
from waits import LIMIT, Gate, call, one_loop, outcome, until

from fast_batcher import DynBatcher, InferenceError
from fast_batcher.caching import LRUCache
from fast_batcher.fastapi.status.page import BatcherReport
from fast_batcher.prometheus import instrument, metrics_router

__all__ = ["hosts", "serve"]

pytestmark = pytest.mark.slow

DOCS = Path(__file__).parents[2] / "docs"
ALERTS = DOCS / "prometheus" / "alerts.yml"
DASHBOARD = DOCS / "grafana" / "fast_batcher.json"

# Calls by which each of two processes has had one.
MOST_CALLS = 10_000

has_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None or shutil.which("promtool") is None,
    reason="a real Prometheus is needed: apt-get install prometheus",
)


class Readings:
    """The samples of a registry, without the common beginning of their names."""

    def __init__(self, registry: CollectorRegistry, model: str) -> None:
        self._registry = registry
        self._model = model

    def __call__(self, name: str, **labels: str) -> float | None:
        labels = {"model": self._model, **labels}
        return self._registry.get_sample_value(f"fast_batcher_{name}", labels)


# --- in this process ------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_late_errors_are_a_metric(gate: Gate) -> None:
    registry = CollectorRegistry()
    batcher = DynBatcher(FailsAtGate, name="late", model_args=(gate.path,))
    instrument(batcher, registry)
    read = Readings(registry, "late")
    async with batcher:
        left = call(batcher, "raise")
        visit = await gate.visit()
        assert read("late_errors_total") == 0
        left.cancel()
        await outcome(left)
        visit.let_on()
        await until(lambda: read("late_errors_total") == 1)
    assert read("late_errors_total") == batcher.stats.late_errors


@pytest.mark.anyio
@one_loop
async def test_metrics_equal_statistics_after_deaths() -> None:
    registry = CollectorRegistry()
    options: Any = {"max_restarts": None, "restart_backoff": 0.01, "num_workers": 2}
    batcher = DynBatcher(Crashes, 4, name="crashes", **options)
    other = DynBatcher(Echo, name="echo")
    for one in (batcher, other, batcher):
        instrument(one, registry)
    read = Readings(registry, "crashes")
    async with batcher, other:
        words = ["exit 3" if number % 8 == 0 else "fine" for number in range(40)]
        calls = [call(batcher, word) for word in words]
        left = call(batcher, "fine")
        await asyncio.sleep(0)
        left.cancel()
        for task in (*calls, left):
            await outcome(task)
        assert await other.process_batched(1) == 1
        stats = batcher.stats
        await until(lambda: read("workers_ready") == 2)
        assert read("worker_restarts_total") == batcher.stats.restarts > 0
    ended = {one: read("requests_total", outcome=one) for one in ("completed", "failed")}
    assert ended == {"completed": stats.completed, "failed": stats.failed}
    assert read("requests_total", outcome="cancelled") == stats.cancelled == 1
    assert read("requests_total", outcome="expired") == 0
    assert read("request_seconds_count") == 41
    assert read("infer_seconds_count") == read("batch_size_count")
    assert Readings(registry, "echo")("requests_total", outcome="completed") == 1
    assert read("workers_ready") == 0


@pytest.mark.anyio
@pytest.mark.usefixtures("hosts")
@pytest.mark.parametrize("shared", [False, True])
async def test_reserved_gpu_memory_is_a_metric_of_each_worker(
    caplog: pytest.LogCaptureFixture, *, shared: bool
) -> None:
    """The worker notes it when it is ready, and at most a second or a ping later."""
    registry = CollectorRegistry()
    options: Any = {"shared": shared, "num_workers": 2}
    batcher = DynBatcher(OnGpu, 1, model_args=(2**20,), name="on_gpu", **options)
    instrument(batcher, registry)
    page = BatcherReport(batcher)
    read = Readings(registry, "on_gpu")
    with caplog.at_level("INFO", "fast_batcher"):
        async with batcher:
            await until(lambda: batcher.stats.gpu_bytes == {0: 2**20, 1: 2**20})
            shown = page.read(monotonic())["workers"]
            assert [worker["gpu_bytes"] for worker in shown] == [2**20, 2**20]
            await batcher.process_batched(2**21)
            await until(lambda: sorted(batcher.stats.gpu_bytes.values()) == [2**20, 2**21])
            await until(
                lambda: (
                    sum(read("gpu_reserved_bytes", worker=str(one)) or 0 for one in (0, 1))
                    == 3 * 2**20
                )
            )
    assert "on cuda:0" in caplog.text
    assert "1 MiB of the GPU" in caplog.text
    await until(lambda: read("gpu_reserved_bytes", worker="0") == 0)
    assert batcher.stats.gpu_bytes == {}


@pytest.mark.anyio
@one_loop
@pytest.mark.parametrize("ending", ["aclose", "stop"])
async def test_gauges_sum_batchers_of_one_name(gate: Gate, ending: str) -> None:
    registry = CollectorRegistry()
    read = Readings(registry, "gated")

    def gauges() -> tuple[float | None, ...]:
        names = ("queue_size", "in_flight", "workers_ready", "workers_wanted")
        return tuple(map(read, names))

    async with contextlib.AsyncExitStack() as stack:
        batchers = [DynBatcher(Gated, 1, model_args=(gate.path,), name="gated") for _ in "12"]
        for one in batchers:
            await stack.enter_async_context(one)
            instrument(one, registry)
        calls = [call(batchers[0], number) for number in range(3)] + [call(batchers[1], 3)]
        # The last change of a worker is long past when these wait: a timer sets the gauges.
        await gate.visit()
        await gate.visit()
        # A worker has the next batch, too.
        await until(lambda: gauges() == (1, 3, 2, 2))
        gate.close()
        assert [await outcome(task) for task in calls] == [0, 1, 2, 3]
        if ending == "stop":
            for one in batchers:
                one.stop()
            await until(lambda: gauges() == (0, 0, 0, 0))
    assert gauges() == (0, 0, 0, 0)
    assert read("backlog_seconds") == 0


@pytest.mark.anyio
@one_loop
async def test_live_sessions_are_counted() -> None:
    registry = CollectorRegistry()
    async with DynBatcher(Diary, workers="threads", name="diary") as batcher:
        instrument(batcher, registry)
        async with batcher.session() as session:
            await session.process_batched(Line("s", 1))
            labels = {"model": "diary"}
            sessions = partial(registry.get_sample_value, "fast_batcher_sessions", labels)
            await until(lambda: sessions() == 1)
        await until(lambda: sessions() == 0)


@pytest.mark.anyio
@one_loop
async def test_an_error_of_a_metric_ends_no_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    registry, errors = CollectorRegistry(), list[Any]()
    read = Readings(registry, "Echo")
    batcher = DynBatcher(Echo)
    instrument(batcher, registry)
    asyncio.get_running_loop().set_exception_handler(lambda _, one: errors.append(one["exception"]))

    def fail(*_: Any) -> None:
        raise OSError("no space left on device")

    async with batcher:
        await until(lambda: read("workers_ready") == 1)
        with monkeypatch.context() as patch:
            patch.setattr(Gauge, "inc", fail)
            await until(lambda: len(errors) == 2)
    await until(lambda: read("workers_ready") == 0)
    assert {*map(type, errors)} == {OSError}


@pytest.mark.anyio
@one_loop
@pytest.mark.parametrize("shared", [False, True], ids=["own", "shared"])
async def test_metrics_of_streams_equal_statistics(hosts: Hosts, shared: bool) -> None:
    registry = CollectorRegistry()
    options: Any = {"model_args": (0.001,), "max_batch_size": 4, "num_workers": 2}
    batcher = DynBatcher(Steps, name="steps", shared=shared, **options)
    instrument(batcher, registry)
    read = Readings(registry, "steps")
    async with batcher:
        await until(lambda: (read("stream_places"), read("live_streams")) == (8, 0))
        assert read("chunks_total") == 0
        async with await batcher.stream(Plan("long", 10**9)) as left:
            await anext(left)
            await until(lambda: read("live_streams") == 1)
            assert read("first_chunk_seconds_count") == 0
        for plan in (Plan("a", 1), Plan("b", 5), Plan("c", 9, 1, "end")):
            _ = [chunk async for chunk in await batcher.stream(plan)]
        assert isinstance(await outcome(call(batcher, Plan("f", 9, 3, "fail"))), InferenceError)
        await until(lambda: read("requests_total", outcome="failed") == 1)
        await until(lambda: batcher.stats.live_streams == 0)
        assert read("requests_total", outcome="completed") == 3
        assert read("requests_total", outcome="cancelled") == 1
        # The stream that ends without a chunk has no times, and a stream of one chunk has no gap.
        assert read("first_chunk_seconds_count") == 4
        assert read("chunk_gap_seconds_count") in (2, 3)
        assert read("batch_size_count") == 0
        stats = batcher.stats
        if shutil.which("promtool") is not None:
            promtool("check", "metrics", text=generate_latest(registry).decode())
    await until(lambda: (read("stream_places"), read("live_streams")) == (0, 0))
    assert read("chunks_total") == stats.chunks > 1 + 5


def test_metrics_coexist_with_metrics_of_app() -> None:
    registry = CollectorRegistry()
    batcher = DynBatcher(Echo, name="beside")
    instrument(batcher, registry)
    app = FastAPI(lifespan=batcher.lifespan)
    Instrumentator(registry=registry).instrument(app).expose(app, endpoint="/theirs")
    app.include_router(metrics_router(registry))

    @app.get("/echo/{number}")
    async def echo(number: int) -> int:
        result: int = await batcher.process_batched(number)
        return result

    completed = 'fast_batcher_requests_total{model="beside",outcome="completed"} 1.0'
    with TestClient(app) as client:
        assert client.get("/echo/5").json() == 5
        for path in ("/theirs", "/metrics"):
            page = client.get(path)
            assert page.headers["Content-Type"].startswith("text/plain; version=")
            assert completed in page.text
            assert 'http_requests_total{handler="/echo/{number}"' in page.text


def scrape(registry: CollectorRegistry) -> None:
    app = FastAPI()
    app.include_router(metrics_router(registry))
    client = TestClient(app)
    for _ in range(2):  # a problem is logged once
        assert client.get("/metrics").status_code == 200


def test_page_without_a_batcher_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    registry = CollectorRegistry()
    scrape(registry)
    (message,) = caplog.messages
    assert message.endswith("call instrument(batcher) with its registry")
    instrument(DynBatcher(Echo), registry)
    caplog.clear()
    scrape(registry)
    assert caplog.messages == []


@pytest.mark.anyio
@one_loop
async def test_page_of_a_process_that_does_not_report_is_a_warning(
    hosts: Hosts, caplog: pytest.LogCaptureFixture
) -> None:
    registries = CollectorRegistry(), CollectorRegistry()
    batchers = [DynBatcher(Echo, name="echo", shared=True) for _ in registries]
    for batcher, registry in zip(batchers, registries, strict=True):
        instrument(batcher, registry)
    async with batchers[0], batchers[1]:
        await until(lambda: sum(one.stats.is_reporter for one in batchers) == 1)
        caplog.clear()
        for registry in registries:
            await asyncio.to_thread(scrape, registry)
        (message,) = caplog.messages
        assert "0 for what another server process reports, of echo: set PROMETHEUS_" in message


def test_metrics_return_to_a_registry_that_was_cleared() -> None:
    """As fixtures of tests clear it, who know no other way to begin again."""
    registry = CollectorRegistry()

    def names() -> set[str]:
        return {metric.name for metric in registry.collect()}

    instrument(DynBatcher(Echo, name="first"), registry)
    before = names()
    for collector in [*registry._collector_to_names]:
        registry.unregister(collector)
    instrument(DynBatcher(Echo, name="second"), registry)
    assert names() == before
    other = Gauge("fast_batcher_queue_size", "Of another library.", registry=None)
    for collector in [*registry._collector_to_names]:
        registry.unregister(collector)
    registry.register(other)
    with pytest.raises(ValueError, match="Duplicated timeseries"):
        instrument(DynBatcher(Echo, name="third"), registry)


def cache_results(page: str) -> dict[str, float]:
    """The calls of a batcher named "cached" that a page of metrics shows, by result."""
    name = re.escape('fast_batcher_cache_requests_total{model="cached",result=')
    found = re.findall(rf'^{name}"(\w+)"\}} (\S+)$', page, re.MULTILINE)
    return {result: float(count) for result, count in found}


def test_cache_metrics_equal_statistics() -> None:
    registry = CollectorRegistry()
    batcher = DynBatcher(Echo, name="cached", cache=LRUCache(9))
    instrument(batcher, registry)
    app = FastAPI(lifespan=batcher.lifespan)
    app.include_router(metrics_router(registry))

    @app.get("/echo/{number}")
    async def echo(number: int) -> list[int]:
        return await batcher.process_many([number] * 3)

    with TestClient(app) as client:
        for number in (5, 5, 6):
            assert client.get(f"/echo/{number}").json() == [number] * 3
        shown = cache_results(client.get("/metrics").text)
    stats = batcher.stats
    assert shown == {"hit": 3, "miss": 2, "coalesced": 4}
    assert (stats.cache_hits, stats.cache_misses, stats.cache_coalesced) == (3, 2, 4)


def test_shared_processes_sum_cache_metrics(
    hosts: Hosts, metrics_folder: Path, serve: Callable[..., Server]
) -> None:
    """One of the processes alone is told of the batches; each has a cache of its own."""
    # Its first process listens for both, so that no connection is refused.
    server = serve("", command=[*GUNICORN, "apps.cached:app"])
    url, asked = server.wait_for(URL)[1], Counter[int]()
    while len(asked) < 2 and asked.total() < MOST_CALLS:
        asked[get(f"{url}/echo/1").json()] += 1
    shown = cache_results(get(f"{url}/metrics").text)
    server.process.terminate()
    server.wait_for_exit()
    calls = asked.total()
    assert len(asked) == 2, "one of the two processes has got all calls"
    # In each process the first three share a miss.
    assert {"hit": 0} | shown == {"miss": 2, "hit": 3 * (calls - 2), "coalesced": 4}


@pytest.mark.parametrize(
    ("missing", "statement", "told"),
    [
        ("prometheus_client", "import fast_batcher.prometheus", r"fast_batcher\[prometheus\]"),
        ("fastapi", "from fast_batcher import prometheus as p; p.metrics_router()", "FastAPI"),
    ],
)
def test_missing_package_is_named(missing: str, statement: str, told: str) -> None:
    program = f"import sys; sys.modules[{missing!r}] = None; {statement}"
    done = run_command([sys.executable, "-c", program])
    assert re.search(rf"ModuleNotFoundError: .*needs.*{told}", done.stderr)


# --- the rules and the dashboard ------------------------------------------------------------------


def expressions() -> list[str]:
    """All PromQL of the alert rules and of the dashboard."""
    groups = yaml.safe_load(ALERTS.read_text())["groups"]
    rules = [rule["expr"] for group in groups for rule in group["rules"]]
    panels = json.loads(DASHBOARD.read_text())["panels"]
    return rules + [target["expr"] for panel in panels for target in panel.get("targets", [])]


def names_in(expression: str) -> set[str]:
    """The names of the series that an expression reads."""
    for part in (r"\{[^}]*\}", r"\[[^]]*\]", r"\b(?:by|without|on|ignoring)\s*\([^)]*\)"):
        expression = re.sub(part, " ", expression)
    words = re.findall(r"(?<![\w$.])[A-Za-z_]\w*\b(?!\s*\()", expression)
    return set(words) - {"and", "or", "unless", "by"}


def test_documented_metrics_exist() -> None:
    registry = CollectorRegistry()
    for batcher, value in ((DynBatcher(Echo), 1), (DynBatcher(Steps), Plan("p", 2))):
        instrument(batcher, registry)
        asyncio.run(answer_one(batcher, value))
    families = [*registry.collect()]
    page = set(re.findall(r"`(fast_batcher_\w+)` \|", (DOCS / "observability.md").read_text()))
    assert {name.removesuffix("_total") for name in page} == {one.name for one in families}
    series = {sample.name for one in families for sample in one.samples}
    # Prometheus makes the first one itself; the other has samples on a GPU only.
    series |= {"up", "fast_batcher_gpu_reserved_bytes"}
    named = set().union(*map(names_in, expressions()))
    assert len(named) > 8
    assert named - series == set()


async def answer_one(batcher: DynBatcher[Any, Any], value: Any) -> None:
    async with batcher:
        await batcher.process_batched(value)


# --- two servers and a real Prometheus ------------------------------------------------------------


class Prometheus:
    """A Prometheus that scrapes servers each second, and has our rules."""

    def __init__(self, folder: Path, targets: list[str]) -> None:
        self._url = f"http://127.0.0.1:{find_free_port()}"
        config = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(ALERTS)],
            "scrape_configs": [{"job_name": "app", "static_configs": [{"targets": targets}]}],
        }
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        self._log = (folder / "prometheus.log").open("w")
        self._process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address={self._url.removeprefix('http://')}",
            ],
            stderr=self._log,
        )

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._log.close()

    def get(self, path: str, **parameters: str) -> Any:
        """Answer of the API; None until it arrives."""
        try:
            page = get(f"{self._url}/api/v1/{path}", params=parameters)
        except httpx2.TransportError:
            return None
        return page.json()["data"] if page.status_code == 200 else None

    def query(self, expression: str) -> dict[str, float]:
        """The values of an expression, by the label `outcome`."""
        found = self.get("query", query=expression) or {"result": []}
        return {one["metric"].get("outcome", ""): float(one["value"][1]) for one in found["result"]}

    def wait_for(self, expression: str, value: float) -> None:
        deadline = monotonic() + LIMIT
        while (found := self.query(expression).get("")) != value:
            assert monotonic() < deadline, (expression, found)
            sleep(0.01)  # without it the wait would take a core from the servers


@pytest.fixture
def watch(tmp_path: Path) -> Iterator[Callable[..., Prometheus]]:
    started: list[Prometheus] = []

    def start(*urls: str) -> Prometheus:
        started.append(Prometheus(tmp_path, [url.removeprefix("http://") for url in urls]))
        return started[-1]

    yield start
    for one in started:
        one.close()


# A hundred requests. One of them kills a worker, and when it is tried again another.
PATHS = ["/double/-1", *["/double/1", "/leave/2", "/double/3?timeout=0.001"] * 33]


def send(url: str, count: int) -> Counter[int]:
    """Send so many requests of all kinds, side by side; the statuses of the answers."""

    def ask(path: str) -> int:
        return get(url + path).status_code

    with ThreadPoolExecutor(16) as threads:
        return Counter(threads.map(ask, itertools.islice(itertools.cycle(PATHS), count)))


def promtool(*command: str, text: str = "") -> None:
    done = run_command(["promtool", *command], input=text)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout


@pytest.fixture
def metrics_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of prometheus_client's multiprocess mode, for the servers of a test."""
    folder = tmp_path / "metrics"
    folder.mkdir()
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(folder))
    return folder


@pytest.fixture
def two_servers(serve: Callable[..., Server], metrics_folder: Path) -> Server:
    options = ("--workers", "2", "--no-access-log")
    return serve("metrics_app:app", *options, folder=Path(__file__).parent)


@has_prometheus
def test_prometheus_counts_requests_of_two_servers_once(
    two_servers: Server, metrics_folder: Path, watch: Callable[..., Prometheus]
) -> None:
    url = two_servers.url()
    pids = {two_servers.wait_for(r"Started server process \[(\d+)\]")[1] for _ in "12"}
    prometheus = watch(url)
    prometheus.wait_for("sum(fast_batcher_workers_ready)", 4)

    statuses = send(url, 400)
    prometheus.wait_for("sum(fast_batcher_requests_total)", 400)
    found = prometheus.query("sum by (outcome) (fast_batcher_requests_total)")
    assert found["completed"] == statuses[200] > 0
    assert found["cancelled"] == statuses[204] == 132
    assert found["failed"] == statuses[500] == 4
    assert found["expired"] + found["rejected"] == statuses[503] + statuses[504]
    prometheus.wait_for("sum(fast_batcher_request_seconds_count)", 400 - found["rejected"])
    assert prometheus.query("sum(fast_batcher_worker_restarts_total)")[""] > 0

    # A worker imports the app's module too, and leaves no file of its own.
    assert {path.stem.rpartition("_")[2] for path in metrics_folder.iterdir()} == pids
    for expression in expressions():
        expression = expression.replace("$__rate_interval", "1m").replace("$model", ".*")
        assert prometheus.get("query", query=expression) is not None, expression
    rules = [rule for group in prometheus.get("rules")["groups"] for rule in group["rules"]]
    assert {rule["health"] for rule in rules} <= {"ok", "unknown"}
    promtool("check", "rules", str(ALERTS))
    promtool("check", "metrics", text=get(f"{url}/metrics").text)

    two_servers.process.terminate()
    two_servers.wait_for_exit()
    registry = CollectorRegistry()
    MultiProcessCollector(registry, str(metrics_folder))  # type: ignore[no-untyped-call]
    read = Readings(registry, "Fragile")
    assert [read(name) for name in ("queue_size", "in_flight", "workers_ready")] == [0, 0, 0]


@has_prometheus
def test_an_alert_names_a_target_that_is_gone(tmp_path: Path) -> None:
    """Its figures have ended, so that no other alert sees it."""
    series = {"up": "1x9 0x90", "fast_batcher_workers_wanted": "2x9 stale"}
    labels = {"job": "app", "instance": "one:8000"}
    text = ",".join(f'{name}="{value}"' for name, value in labels.items())
    alert = {
        "exp_labels": {**labels, "severity": "critical"},
        "exp_annotations": {
            "summary": "one:8000: no metrics for 5 minutes",
            "description": "The app does not run, or Prometheus does not reach its /metrics.",
        },
    }
    case = {
        "interval": "1m",
        "input_series": [
            {"series": f"{name}{{{text}}}", "values": values} for name, values in series.items()
        ],
        "alert_rule_test": [
            {"eval_time": f"{minute}m", "alertname": "FastBatcherTargetIsGone", "exp_alerts": found}
            for minute, found in ((5, []), (20, [alert]))
        ],
    }
    rules = tmp_path / "test.json"
    rules.write_text(json.dumps({"rule_files": [str(ALERTS)], "tests": [case]}))
    promtool("test", "rules", str(rules))
