"""The data of the status page, what is wrong with the batchers, and the routes. API process.

    find_problems  what is wrong, in plain words, worst first
    PageData       the page's data, as JSON
    Streams        the open pages, which must not keep the server from ending
    status_router  the routes

For a person who was woken: a problem says what callers notice, and the detail says why. The data
hold no inputs, outputs or messages of models. Moments are seconds ago.

A server waits for its open connections before it ends an app's lifespan, so that no shutdown of the
app can end them: the signals that end a server must. Another program's signal handlers are kept.
"""

import asyncio
import base64
import hashlib
import json
import os
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import cache
from importlib.resources import files
from typing import Any, Literal, NamedTuple

from fastapi import APIRouter
from fastapi.params import Depends
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse

from fast_batcher._core.loop_lag import SERIOUS
from fast_batcher._opening.life import call_on_end
from fast_batcher._opening.loop_watch import find_lag
from fast_batcher._process import monotonic, read_rss
from fast_batcher.batcher import DynBatcher, check_batchers
from fast_batcher.errors import ConfigurationError
from fast_batcher.fastapi.errors import find_answer, public_text, recent_errors
from fast_batcher.fastapi.status.recorder import (
    ANSWERS,
    SHARES,
    SLOT_SECONDS,
    SLOTS,
    Quantiles,
    Recorder,
    Seat,
    quantiles,
)
from fast_batcher.observing import Outcome
from fast_batcher.stats import BatcherStats, Explanation

# "critical": callers get errors or no answers now. "warning": it may come to that.
Level = Literal["critical", "warning"]

# Slots, a minute, in which requests that failed are reported; lost workers are for five.
RECENT_SLOTS = 12
LOSS_SECONDS = 300.0
# A blocked event loop is reported for a minute.
LOOP_SECONDS = 60.0
# Failures are critical from this number and share of the requests: a single bad input is not.
SERIOUS_COUNT, SERIOUS_SHARE = 5, 0.05
# Share of the queue from which it is nearly full.
NEARLY_FULL = 0.8

_BAD: dict[Outcome, str] = {
    "rejected": "were rejected",
    "failed": "failed",
    "expired": "expired",
}


class Problem(NamedTuple):
    """Something that is wrong."""

    level: Level
    text: str
    detail: str


def find_problems(
    batcher: DynBatcher[Any, Any],
    stats: BatcherStats,
    recorder: Recorder,
    queue_limit: int,
    now: float,
) -> list[Problem]:
    """Return the problems of a batcher, the critical ones first."""
    found = [
        *_of_state(batcher, stats),
        *_of_workers(stats, recorder, now),
        *_of_queue(stats, queue_limit),
        *_of_requests(recorder, now),
        *_of_loop(now),
    ]
    return sorted(found, key=lambda problem: problem.level != "critical")


def _of_state(batcher: DynBatcher[Any, Any], stats: BatcherStats) -> Iterator[Problem]:
    if stats.state == "broken":
        yield Problem("critical", "Broken: every call fails at once", _describe_break(batcher))
    elif stats.state == "closed":
        yield Problem("critical", "Closed: every call is rejected", "")
    elif stats.state == "new":
        yield Problem("warning", "Not opened yet", "the app's lifespan or the first call opens it")
    elif stats.state == "opening":
        ready = f"{stats.workers_ready} of {stats.num_workers} workers have loaded the model"
        yield Problem("warning", "Starting: calls wait", ready)
    elif stats.state == "draining":
        left = stats.waiting + stats.running
        yield Problem("warning", "Draining: new calls are rejected", f"{left:,} requests are left")
    elif stats.workers_ready and not batcher.is_ready:
        yield Problem("warning", "The server ends: readiness is off since SIGTERM", "")


def _describe_break(batcher: DynBatcher[Any, Any]) -> str:
    error = batcher.start_error
    if error is None:
        return ""
    text = public_text(error).removeprefix(f"{batcher.name}: ")
    if find_answer(error, 503).may_pass_later:
        return text
    return f"{text}; the log has its traceback, and it is not tried again"


def _of_workers(stats: BatcherStats, recorder: Recorder, now: float) -> Iterator[Problem]:
    losses = recorder.lost_since(now - LOSS_SECONDS)
    index, last = max(
        recorder.seats.items(), key=lambda item: item[1].exited_at if item[1].exit_text else -1.0
    )
    lost = ""
    if losses:
        times = "once" if losses == 1 else f"{losses} times"
        lost = f"lost {times} in five minutes; "
        if last.exit_text:
            ago = now - last.exited_at
            lost += f"last worker {index}, {ago:.0f} s ago: {last.exit_text}"
        else:
            lost += "which and why is not known here"
    # More are ready than wanted until the last ones have ended.
    missing = max(0, stats.num_workers - stats.workers_ready)
    if stats.state != "open" or not missing:
        if losses and stats.state in ("open", "broken"):
            text = "A worker was lost, and replaced" if not missing else "Workers were lost"
            yield Problem("warning", text, lost)
        return
    ready = sum(seat.state == "ready" for seat in recorder.seats.values())
    silent = ready - stats.workers_ready
    why = f"{silent} computes for longer than any caller waits; " if silent > 0 else ""
    if stats.workers_ready:
        text = f"{missing} of {stats.num_workers} workers not ready"
        yield Problem("warning", text, why + lost)
    else:
        yield Problem("critical", "No worker is ready: calls wait", why + lost)


def _of_queue(stats: BatcherStats, limit: int) -> Iterator[Problem]:
    detail = f"{stats.waiting:,} of {limit:,} requests wait"
    if stats.waiting >= limit:
        yield Problem("critical", "The queue is full: calls are rejected", detail)
    elif stats.waiting >= NEARLY_FULL * limit:
        yield Problem("warning", "The queue is nearly full", detail)


def _of_requests(recorder: Recorder, now: float) -> Iterator[Problem]:
    ends = recorder.read(now, RECENT_SLOTS).ends
    for outcome, verb in _BAD.items():
        reasons = Counter({why: count for (ended, why), count in ends.items() if ended == outcome})
        if count := reasons.total():
            is_serious = count >= max(SERIOUS_COUNT, SERIOUS_SHARE * ends.total())
            level: Level = "critical" if is_serious else "warning"
            noun = "request" if count == 1 else "requests"
            verb = verb.replace("were", "was") if count == 1 else verb
            detail = ", ".join(
                f"{why or 'error of the model'} {number:,}" for why, number in reasons.most_common()
            )
            yield Problem(level, f"{count:,} {noun} {verb} within a minute", detail)


def _of_loop(now: float) -> Iterator[Problem]:
    lag = find_lag()
    seconds = 0.0 if lag is None else lag.blocked(now - LOOP_SECONDS, now)
    if seconds >= SERIOUS:
        text = f"The event loop was blocked for {seconds:.1f} s within a minute"
        why = "a function of the app computes or waits without await; the model is not the cause"
        yield Problem("warning", text, why)


# An explanation takes some milliseconds, and is about the last thousand batches.
EXPLAIN_SECONDS = 5.0
# A text takes milliseconds, and a second may pass until a page asks for the next one.
SHARED_SECONDS = 0.5
# Seconds over which the chunks per second are averaged.
RATE_SECONDS = 10.0
# Counts of `BatcherStats` since the batcher was made.
TOTALS = (
    *("submitted", "completed", "failed", "refused", "expired", "cancelled", "rejected"),
    *("batches", "restarts"),
)
# Errors that are shown, of all codes.
SHOWN_ERRORS = 20


class BatcherReport:
    """The figures of one batcher, which gets an observer."""

    def __init__(self, batcher: DynBatcher[Any, Any]) -> None:
        self._batcher = batcher
        settings = batcher._settings  # noqa: SLF001  the page shows the limits
        recycles = settings.max_batches_per_worker is not None or settings.max_rss_bytes is not None
        self._recorder = Recorder(batcher, batcher.stats.num_workers, recycles=recycles)
        self._explanation = Explanation()
        self._explained_at = float("-inf")
        # Moments, and the chunks until then.
        self._chunks: deque[tuple[float, int]] = deque()
        batcher.add_observer(self._recorder)

    def read(self, now: float) -> dict[str, Any]:
        """Return the present figures."""
        stats, recorder, batcher = self._batcher.stats, self._recorder, self._batcher
        recorder.sample()
        recorder.resize(stats.num_workers)
        settings = batcher._settings  # noqa: SLF001
        problems = find_problems(batcher, stats, recorder, settings.queue_limit, now)
        return {
            "name": batcher.name,
            "state": stats.state,
            "is_ready": batcher.is_ready,
            # False: another server process has the events, and this one the shared counts alone.
            "is_reporter": stats.is_reporter,
            "problems": [problem._asdict() for problem in problems],
            "workers_ready": stats.workers_ready,
            "num_workers": stats.num_workers,
            "workers": [
                {
                    "index": index,
                    **_describe_seat(seat, stats.state, now),
                    "gpu_bytes": stats.gpu_bytes.get(index),
                }
                for index, seat in sorted(recorder.seats.items())
            ],
            "waiting": stats.waiting,
            "max_queue_size": settings.queue_limit,
            "running": stats.running,
            "max_batch_size": settings.max_batch_size,
            "streams": None if stats.places is None else self._describe_streams(stats, now),
            "totals": {name: getattr(stats, name) for name in TOTALS},
            # Those without their default. Values of objects and functions are the user's own.
            "settings": [
                {"name": name, "value": _show(setting.value), "source": setting.source}
                for name, setting in batcher.settings.items()
                if setting.source != "default"
            ],
            **self._explain(now),
            **self._recent(now),
        }

    def _describe_streams(self, stats: BatcherStats, now: float) -> dict[str, Any]:
        """Return the figures of streams; chunks per second are unknown at the first look."""
        readings = self._chunks
        readings.append((now, stats.chunks))
        while readings[0][0] < now - RATE_SECONDS:
            readings.popleft()
        (then, before) = readings[0]
        seconds = now - then
        return {
            "live": stats.live_streams,
            "places": stats.places,
            "chunks_per_second": max(0, stats.chunks - before) / seconds if seconds else None,
            "first_chunk": {"p50": stats.first_chunk_p50, "p95": stats.first_chunk_p95},
            "chunk_gap": {"p50": stats.chunk_gap_p50, "p95": stats.chunk_gap_p95},
        }

    def _recent(self, now: float) -> dict[str, Any]:
        """Return the figures of the last five minutes."""
        recorder = self._recorder
        recent = recorder.read(now)
        return {
            "requests_per_second": recorder.rate(now, *ANSWERS),
            "rejected_per_second": recorder.rate(now, "rejected"),
            "latency": {
                "queue_wait": _named(quantiles(recent.queue_wait)),
                "infer": _named(quantiles(recent.infer)),
                "total": _named(quantiles(recent.total)),
            },
            "timeline": {
                "requests_per_second": recorder.rates(now),
                "total": [_named(values) for values in recorder.quantiles_of_total(now)],
            },
            "batch_sizes": dict(sorted(recent.sizes.items())),
            "releases": dict(recent.releases.most_common()),
            "ends": [
                {"outcome": outcome, "reason": reason, "count": count}
                for (outcome, reason), count in recent.ends.most_common()
            ],
        }

    def _explain(self, now: float) -> dict[str, Any]:
        if now >= self._explained_at + EXPLAIN_SECONDS:
            self._explanation, self._explained_at = self._batcher.explain(), now
        explanation = self._explanation
        return {
            "explanation": {
                "text": str(explanation),
                "load": explanation.load,
                "busy": explanation.busy,
                "capacity": explanation.capacity,
            },
            "learned": [
                {"size": size, "median": median, "p95": high}
                for size, median, high in explanation.service_times
            ],
        }


class PageData:
    """The figures of this process and of its batchers."""

    def __init__(self, batchers: tuple[DynBatcher[Any, Any], ...]) -> None:
        self._reports = [BatcherReport(batcher) for batcher in batchers]
        self._text, self._text_made_at = "", float("-inf")

    def to_json(self) -> str:
        """Return the figures as JSON, at most half a second old: open pages share them."""
        now = monotonic()
        if now > self._text_made_at + SHARED_SECONDS:
            self._text = json.dumps(self.read(), separators=(",", ":"))
            self._text_made_at = now
        return self._text

    def read(self) -> dict[str, Any]:
        """Return the present figures; on the event loop's thread."""
        now = monotonic()
        return {
            "pid": os.getpid(),
            "slot_seconds": SLOT_SECONDS,
            "slots": SLOTS,
            "batchers": [report.read(now) for report in self._reports],
            "error_counts": dict(recent_errors.counts),
            "errors": [
                {
                    "age": now - error.at,
                    "status": error.status,
                    "code": error.code,
                    "type": error.kind,
                    "route": error.route,
                    "count": error.answers,
                    "error_id": error.error_id,
                }
                for error in recent_errors.newest_first()[:SHOWN_ERRORS]
            ],
        }


def _named(values: Quantiles) -> dict[str, float | None]:
    return {f"p{share * 100:.0f}": value for share, value in zip(SHARES, values, strict=True)}


def _describe_seat(seat: Seat, batcher_state: str, now: float) -> dict[str, Any]:
    """Describe a worker, as far as its batcher still has it."""
    state, pid = seat.state, seat.pid
    memory = None if pid is None or seat.node else read_rss(pid) or None
    if batcher_state in ("new", "closed") and state != "unknown":
        state, pid = "retired", None
    elif batcher_state == "broken" and state == "loading" and memory is None:
        # No event reports the end of a worker that has not loaded the model.
        state, pid = "lost", None
    return {
        "state": state,
        "pid": pid,
        "node": seat.node,
        "age": None if state == "unknown" else now - seat.since,
        "batches": seat.batches,
        "memory_bytes": None if pid is None else memory,
        "exits": seat.exits,
        "exit_text": seat.exit_text,
        "exit_age": now - seat.exited_at if seat.exit_text else None,
    }


# Seconds between two events.
INTERVAL = 1.0
# Events of a stream; then the page connects again. It bounds the shutdown of a server whose signals
# do not arrive here: its event loop runs in another thread.
MOST_EVENTS = 30


class Streams:
    """The open streams of one router."""

    def __init__(self) -> None:
        self._open = 0
        self._ending = asyncio.Event()
        self._handlers = ExitStack()

    async def run(self, make_text: Callable[[], str]) -> AsyncIterator[str]:
        """Yield server-sent events, one per second, until the server is asked to end.

        `make_text` returns the data of an event, in one line.
        """
        self._enter()
        try:
            yield "retry: 1000\n\n"
            for _ in range(MOST_EVENTS):
                if self._ending.is_set():
                    return
                yield f"data: {make_text()}\n\n"
                try:
                    await asyncio.wait_for(self._ending.wait(), INTERVAL)
                except TimeoutError:
                    continue
        finally:
            self._leave()

    def _enter(self) -> None:
        self._open += 1
        if self._open == 1:
            self._ending = asyncio.Event()
            ends = call_on_end(asyncio.get_running_loop(), self._ending.set)
            self._handlers.enter_context(ends)

    def _leave(self) -> None:
        self._open -= 1
        if not self._open:
            self._handlers.close()


_HEADERS = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
# A proxy (nginx) passes each event on at once.
_STREAM_HEADERS = {**_HEADERS, "X-Accel-Buffering": "no"}


def status_router(
    *batchers: DynBatcher[Any, Any],
    prefix: str = "",
    dependencies: Sequence[Depends] = (),
    include_in_schema: bool = False,
) -> APIRouter:
    """Make the status page `/batchers`, its data `/batchers.json`, and `/batchers/events`.

    The page shows the batchers of the process that answers: what is wrong with them, and their
    figures of the last five minutes, which count from this call. Whoever can reach the routes can
    read them: they show names, process ids, types of errors and paths of routes, and neither inputs
    nor messages. Protect them with `dependencies` or at the proxy.

    Args:
        batchers: One or more batchers, in the order of the page. Give them before they open: the
            page knows nothing of workers that were started before.
        prefix: Prefix of the paths.
        dependencies: Of all three routes, for example `[Depends(check_password)]`.
        include_in_schema: Whether OpenAPI shows the routes.
    """
    if not batchers:
        raise ConfigurationError("status_router: give one or more batchers")
    check_batchers("status_router", *batchers)
    router = APIRouter(
        prefix=prefix,
        dependencies=dependencies,
        include_in_schema=include_in_schema,
        tags=["status"],
    )
    report, streams = PageData(batchers), Streams()

    @router.get("/batchers", response_class=HTMLResponse)
    async def page() -> Response:
        html, policy = _make_page()
        return HTMLResponse(html, headers={**_HEADERS, **policy})

    @router.get("/batchers.json")
    async def data() -> Response:
        return JSONResponse(report.read(), headers=_HEADERS)

    @router.get("/batchers/events", response_class=StreamingResponse)
    async def events() -> Response:
        stream = streams.run(report.to_json)
        return StreamingResponse(stream, media_type="text/event-stream", headers=_STREAM_HEADERS)

    return router


@cache
def _make_page() -> tuple[str, dict[str, str]]:
    """Return the page with style and script in it, and the headers that allow just these."""
    folder = files("fast_batcher.fastapi.status")
    html, style, script = (
        folder.joinpath(name).read_text(encoding="utf-8")
        for name in ("page.html", "style.css", "script.js")
    )
    policy = (
        f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'; require-trusted-types-for 'script'"
    )
    headers = {"Content-Security-Policy": policy, "Referrer-Policy": "no-referrer"}
    return html.replace("/* style */", style).replace("/* script */", script), headers


def _hash(text: str) -> str:
    """Return a source of a content security policy that allows this very text inline."""
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"


def _show(value: object) -> str:
    """Write the value of an option; of objects and functions the type alone."""
    if value is None or isinstance(value, bool | int | float | str):
        return str(value)
    if isinstance(value, list | tuple) and all(isinstance(part, str) for part in value):
        return ", ".join(value)
    return f"a {type(value).__name__}"
