"""The status page without a browser: its data, its headers, its stream, and the server's end."""

import asyncio
import base64
import hashlib
import json
import os
import re
import signal
from collections.abc import Callable
from math import exp
from pathlib import Path
from typing import Any

import httpx2
import pytest
import status_app
import stream_status_app
from fastapi import Depends, FastAPI, HTTPException
from models.base import Echo
from models.crashing import Crashes
from models.loading import RaisesOnLoad
from models.ordinary import Gated
from servers import Server, serve
from shared_hosts import Hosts, hosts
from starlette.requests import HTTPConnection
from starlette.testclient import TestClient
from waits import LIMIT, Gate, call, one_loop, outcome, until

from fast_batcher import DynBatcher
from fast_batcher._opening.life import END_SIGNALS
from fast_batcher.errors import ConfigurationError, QueueFullError
from fast_batcher.fastapi import status_router
from fast_batcher.fastapi.errors import RecentErrors
from fast_batcher.fastapi.status.page import MOST_EVENTS, PageData, Streams
from fast_batcher.fastapi.status.recorder import Recorder, quantiles
from fast_batcher.observing import AnsweredRequest, BatchAnswered, WorkerChange, WorkerChanged

__all__ = ["hosts", "serve"]

PATHS = ("/inside/batchers", "/inside/batchers.json", "/inside/batchers/events")


def read_one(report: PageData) -> dict[str, Any]:
    (found,) = report.read()["batchers"]
    return dict(found)


def problems_of(report: PageData) -> list[tuple[str, str]]:
    return [(one["level"], one["text"]) for one in read_one(report)["problems"]]


# --- data -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_page_data_equal_statistics_without_model_text() -> None:
    with TestClient(status_app.app) as client:
        for name, count in (("first", 700), ("second", 1000)):
            assert client.post(f"/call/{name}/fine?count={count}").json() == count
        failed = client.post("/call/first/raise")
        text = client.get("/inside/batchers.json").text
        data = json.loads(text)
        stats = {name: one.stats for name, one in status_app.batchers.items()}
    assert "secret" not in text
    assert data["pid"] == os.getpid()
    assert [one["name"] for one in data["batchers"]] == ["first", "second", "third"]
    for one in data["batchers"]:
        own = stats[one["name"]]
        assert {name: getattr(own, name) for name in one["totals"]} == one["totals"]
        assert one["totals"]["batches"] == sum(one["batch_sizes"].values())
        assert one["releases"] == own.releases
        assert one["batch_sizes"] == {str(size): n for size, n in own.batch_sizes.items()}
        assert one["workers_ready"] == one["num_workers"] == len(one["workers"])
        assert sum(worker["batches"] for worker in one["workers"]) == own.batches
        for worker in one["workers"]:
            assert (worker["state"], worker["exits"]) == ("ready", 0)
            assert worker["memory_bytes"] > 2**20
    first, _, third = data["batchers"]
    assert {one["outcome"]: one["count"] for one in first["ends"]} == {
        "completed": 700,
        "failed": 1,
    }
    for times in first["latency"].values():
        assert 0 < times["p50"] <= times["p95"] <= times["p99"]
    assert first["learned"]
    assert sum(one or 0 for one in first["timeline"]["requests_per_second"]) * 5 == 701
    assert "batches in" in first["explanation"]["text"]
    assert first["problems"] == [
        {
            "level": "warning",
            "text": "1 request failed within a minute",
            "detail": "error of the model 1",
        }
    ]
    assert (third["latency"]["total"]["p50"], third["problems"]) == (None, [])
    latest = data["errors"][0]
    assert latest["error_id"] == failed.json()["error_id"]
    assert (latest["status"], latest["code"]) == (500, "inference_failed")
    assert (latest["type"], latest["route"]) == ("ValueError", "/call/{name}/{value}")


@pytest.mark.anyio
@one_loop
@pytest.mark.slow
async def test_a_problem_is_told_while_it_lasts(gate: Gate) -> None:
    batcher = DynBatcher(Gated, 1, model_args=(gate.path,), max_queue_size=2, auto_open=False)
    report = PageData((batcher,))
    assert problems_of(report) == [("warning", "Not opened yet")]
    async with batcher:
        assert problems_of(report) == []
        # The worker takes two, one of them in advance.
        calls = [call(batcher, number) for number in range(2)]
        await gate.visit()
        await until(lambda: batcher.stats.running == 2)
        calls += [call(batcher, number) for number in range(2)]
        await until(lambda: batcher.stats.waiting == 2)
        rejected = call(batcher, 4)
        await outcome(rejected)
        assert problems_of(report) == [
            ("critical", "The queue is full: calls are rejected"),
            ("warning", "1 request was rejected within a minute"),
        ]
        gate.close()
        for task in calls:
            await outcome(task)
        assert problems_of(report) == [("warning", "1 request was rejected within a minute")]
    assert problems_of(report)[0] == ("critical", "Closed: every call is rejected")
    (worker,) = read_one(report)["workers"]
    assert (worker["state"], worker["pid"], worker["exits"]) == ("retired", None, 0)


@pytest.mark.anyio
@one_loop
@pytest.mark.slow
async def test_only_lost_worker_is_shown_as_problem() -> None:
    crashing = DynBatcher(Crashes, idempotent=False)
    recycling = DynBatcher(Echo, max_batches_per_worker=1)
    reports = [PageData((one,)) for one in (crashing, recycling)]
    async with crashing, recycling:
        await outcome(call(crashing, "exit 3"))
        assert problems_of(reports[0])[0] == ("critical", "No worker is ready: calls wait")
        await until(lambda: crashing.stats.workers_ready == 1)
        assert ("warning", "A worker was lost, and replaced") in problems_of(reports[0])
        (worker,) = read_one(reports[0])["workers"]
        assert (worker["exits"], worker["exit_text"]) == (1, "exit code 3")
        assert await outcome(call(recycling, 1)) == 1
        await until(lambda: read_one(reports[1])["workers"][0]["exits"] == 1)
        (worker,) = read_one(reports[1])["workers"]
        assert (worker["state"], worker["exit_text"]) == ("ready", "recycled")
        assert problems_of(reports[1]) == []


@pytest.mark.anyio
@one_loop
@pytest.mark.slow
async def test_follower_shows_problems_of_shared_counts(hosts: Hosts) -> None:
    """The first client of the host gets the events; the page of the second has the counts."""
    options: Any = {"shared": "test", "idempotent": False, "restart_backoff": 0.01}
    reporter, follower = (DynBatcher(Crashes, **options) for _ in "12")
    reports = [PageData((one,)) for one in (reporter, follower)]
    async with reporter, follower:
        await until(lambda: read_one(reports[0])["is_reporter"])
        assert problems_of(reports[1]) == []
        assert len(await reporter.process_many(["fine"] * 50)) == 50
        await outcome(call(reporter, "exit 3"))
        await until(lambda: follower.stats.failed == 1 and follower.stats.restarts == 1)
        assert problems_of(reports[1]) == [
            ("warning", "A worker was lost, and replaced"),
            ("warning", "1 request failed within a minute"),
        ]
        found = read_one(reports[1])
        details = [one["detail"] for one in found["problems"]]
        assert details == [
            "lost once in five minutes; which and why is not known here",
            "reason not known here 1",
        ]
        assert not found["is_reporter"]
        assert found["requests_per_second"] > 0
        assert (found["latency"]["total"]["p50"], found["workers"][0]["state"]) == (None, "unknown")
        await reporter.aclose()
        await until(lambda: read_one(reports[1])["is_reporter"])
        assert len(await follower.process_many(["fine"] * 50)) == 50
        await until(lambda: read_one(reports[1])["latency"]["total"]["p50"] is not None)
        ends = {one["outcome"]: one["count"] for one in read_one(reports[1])["ends"]}
    assert ends == {"completed": 100, "failed": 1}


@pytest.mark.anyio
@one_loop
@pytest.mark.slow
async def test_rejections_are_no_requests_per_second(gate: Gate) -> None:
    batcher = DynBatcher(Gated, 1, model_args=(gate.path,), max_queue_size=1)
    report = PageData((batcher,))
    async with batcher:
        calls = [call(batcher, number) for number in range(9)]
        await gate.visit()
        await until(lambda: batcher.stats.rejected > 0)
        found = read_one(report)
        assert found["requests_per_second"] == 0
        assert found["rejected_per_second"] > 0
        assert sum(one or 0 for one in found["timeline"]["requests_per_second"]) == 0
        gate.close()
        for task in calls:
            await outcome(task)


def test_equal_errors_are_one_line_with_their_count() -> None:
    errors, connection = RecentErrors(), HTTPConnection({"type": "http", "headers": []})
    for number in range(20):
        errors.note(QueueFullError("full"), connection, 503, "queue_full", f"id {number}")
        errors.note(ValueError("words"), connection, 500, "inference_failed", f"own {number}")
    found = [(one.kind, one.answers, one.error_id) for one in errors.newest_first()]
    assert found == [("ValueError", 20, "own 19"), ("QueueFullError", 20, "id 19")]


@pytest.mark.anyio
@one_loop
@pytest.mark.slow
async def test_broken_batcher_is_shown_without_model_text() -> None:
    batcher = DynBatcher(RaisesOnLoad, auto_open=False)
    report = PageData((batcher,))
    await outcome(asyncio.create_task(batcher.open()))
    try:
        (problem,) = read_one(report)["problems"]
        assert problem["text"] == "Broken: every call fails at once"
        assert problem["detail"].startswith("the model did not load; the log has its traceback")
    finally:
        await batcher.aclose()


def test_quantiles_are_accurate_in_bounded_memory() -> None:
    recorder = Recorder(DynBatcher("app:Model", auto_open=False), 1)
    times = [exp(number / 1000) / 1000 for number in range(10_000)]
    for second in range(1000):
        requests = [AnsweredRequest("completed", one, one) for one in times[second::1000]]
        event = BatchAnswered(
            *("", 0, 1, 10, 10.0, "full"),
            dispatched_at=0.0,
            began_at=0.0,
            answered_at=float(second),
            infer_seconds=0.0,
            requests=requests,
        )
        recorder.batch_answered(event)
    assert len(recorder.slots) == 60
    recent = recorder.read(999.0)
    assert recent.ends.total() == recent.total.total() == 3000
    assert len(recent.total) < 250
    kept = sorted(time for second in range(700, 1000) for time in times[second::1000])
    for found, share in zip(quantiles(recent.total), (0.5, 0.95, 0.99), strict=True):
        assert found == pytest.approx(kept[int(share * 3000) - 1], rel=0.05)
    assert recorder.read(2000.0).ends.total() == 0


@pytest.mark.slow
def test_page_data_of_streams_equal_statistics() -> None:
    with TestClient(stream_status_app.app) as client:
        first = client.get("/inside/batchers.json").json()["batchers"]
        assert client.post("/call/5?count=9").json() == 9
        counts, echoes = client.get("/inside/batchers.json").json()["batchers"]
        stats = stream_status_app.counts.stats
    assert (echoes["streams"], first[0]["streams"]["chunks_per_second"]) == (None, None)
    streams = counts["streams"]
    assert streams.pop("chunks_per_second") > 0
    assert streams == {
        "live": 0,
        "places": 4,
        "first_chunk": {"p50": stats.first_chunk_p50, "p95": stats.first_chunk_p95},
        "chunk_gap": {"p50": stats.chunk_gap_p50, "p95": stats.chunk_gap_p95},
    }
    assert counts["workers"][0]["batches"] == counts["totals"]["completed"] == 9


# --- routes ---------------------------------------------------------------------------------------


def test_removed_workers_are_not_shown() -> None:
    recorder = Recorder(DynBatcher("app:Model", auto_open=False), 1)

    def change(worker: int, change: WorkerChange, pid: int) -> None:
        # The workers are threads of one process.
        recorder.worker_changed(WorkerChanged("model", worker, change, 1, worker_id=pid))

    change(1, "started", 5)
    change(1, "ready", 5)
    assert [seat.state for seat in recorder.seats.values()] == ["unknown", "ready"]
    change(1, "removed", 5)
    recorder.resize(1)
    # It finishes its batches, and ends.
    change(1, "lost", 5)
    assert [seat.state for seat in recorder.seats.values()] == ["unknown"]
    assert not recorder.losses
    change(1, "started", 6)
    change(1, "lost", 5)
    change(1, "ready", 6)
    assert [seat.state for seat in recorder.seats.values()] == ["unknown", "ready"]
    assert not recorder.losses


def test_page_is_one_file_with_strict_policy() -> None:
    batcher: DynBatcher[Any, Any] = DynBatcher("app:Model", auto_open=False)
    app = FastAPI()
    app.include_router(status_router(batcher))
    page = TestClient(app).get("/batchers")
    policy = page.headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy
    for tag in ("style", "script"):
        (text,) = re.findall(rf"<{tag}>(.*?)</{tag}>", page.text, re.S)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
        assert len(text) > 1000
    assert re.findall(r"""(?:https?:)?//[\w.]+[^\s"']*""", re.sub(r"// .*", "", page.text)) == [
        "http://www.w3.org/2000/svg"  # a name, not an address
    ]
    assert page.headers["Cache-Control"] == "no-store"
    assert app.openapi()["paths"] == {}


def test_every_route_has_the_dependencies() -> None:
    def reject() -> None:
        raise HTTPException(401)

    batcher: DynBatcher[Any, Any] = DynBatcher("app:Model", auto_open=False)
    app = FastAPI()
    app.include_router(status_router(batcher, prefix="/inside", dependencies=[Depends(reject)]))
    assert [TestClient(app).get(path).status_code for path in PATHS] == [401] * 3


def test_a_page_without_batchers_is_an_error() -> None:
    with pytest.raises(ConfigurationError, match="status_router: give one or more batchers"):
        status_router()


# --- the stream -----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("number", END_SIGNALS)
def test_open_page_does_not_delay_shutdown(
    serve: Callable[..., Server], number: signal.Signals
) -> None:
    server = serve("status_app:app", "--no-access-log", folder=Path(__file__).parent)
    url = server.url()
    with httpx2.stream("GET", f"{url}{PATHS[2]}", timeout=LIMIT) as stream:
        assert stream.headers["Content-Type"].startswith("text/event-stream")
        events = 0
        for line in stream.iter_lines():
            if line.startswith("data: "):
                events += 1
                assert len(json.loads(line.removeprefix("data: "))["batchers"]) == 3
                if events == 2:
                    server.process.send_signal(number)
    # Without the signal the stream would have gone on.
    assert 2 <= events < MOST_EVENTS
    server.wait_for_exit()
    assert "Application shutdown complete" in server.output


@pytest.mark.anyio
@one_loop
async def test_the_last_stream_puts_the_signal_handlers_back() -> None:
    before = [signal.getsignal(number) for number in END_SIGNALS]
    streams = Streams()
    first, second = (streams.run(lambda: "{}") for _ in "12")
    for stream in (first, second):
        assert (await anext(stream), await anext(stream)) == ("retry: 1000\n\n", "data: {}\n\n")
    await first.aclose()  # type: ignore[attr-defined]
    assert [signal.getsignal(number) for number in END_SIGNALS] != before
    await second.aclose()  # type: ignore[attr-defined]
    assert [signal.getsignal(number) for number in END_SIGNALS] == before


@pytest.mark.anyio
@one_loop
async def test_stream_ends_by_itself_without_signals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fast_batcher.fastapi.status.page.INTERVAL", 0.0)
    assert len([text async for text in Streams().run(lambda: "{}")]) == 1 + MOST_EVENTS
