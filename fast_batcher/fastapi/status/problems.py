"""Problems of a batcher in plain words, worst first. Pure, but for what it reads.

For a person who was woken: a problem says what callers notice, and the detail says why.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

from fast_batcher.batcher import DynBatcher
from fast_batcher.fastapi.errors import find_answer
from fast_batcher.fastapi.status.recorder import Recorder
from fast_batcher.observing import Outcome
from fast_batcher.stats import BatcherStats

# "critical": callers get errors or no answers now. "warning": it may come to that.
Level = Literal["critical", "warning"]

# Slots, a minute, in which requests that failed are reported; lost workers are for five.
RECENT_SLOTS = 12
LOSS_SECONDS = 300.0
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
    """Return the problems of a batcher, the critical ones first.

    Args:
        batcher: The batcher.
        stats: Its present statistics.
        recorder: Its past.
        queue_limit: Most waiting requests.
        now: The moment, of `time.monotonic`.
    """
    found = [
        *_of_state(batcher, stats),
        *_of_workers(stats, recorder, now),
        *_of_queue(stats, queue_limit),
        *_of_requests(recorder, now),
    ]
    return sorted(found, key=lambda one: one.level != "critical")


def _of_state(batcher: DynBatcher[Any, Any], stats: BatcherStats) -> Iterator[Problem]:
    if stats.state == "broken":
        error = batcher.start_error
        # Without the error of a model's constructor, which may hold secrets.
        safe = "" if error is None else find_answer(error, 503).detail or str(error)
        is_final = error is not None and not find_answer(error, 503).may_pass_later
        hint = "; the log has its traceback, and it is not tried again" if is_final else ""
        safe = safe.removeprefix(f"{batcher.name}: ")
        yield Problem("critical", "Broken: every call fails at once", f"{safe}{hint}")
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


def _of_workers(stats: BatcherStats, recorder: Recorder, now: float) -> Iterator[Problem]:
    losses = recorder.lost_since(now - LOSS_SECONDS)
    last = max(recorder.seats, key=lambda seat: seat.exited_at if seat.exit_text else -1.0)
    lost = ""
    if losses:
        times = "once" if losses == 1 else f"{losses} times"
        lost = f"lost {times} in five minutes; "
        if last.exit_text:
            index, ago = recorder.seats.index(last), now - last.exited_at
            lost += f"last worker {index}, {ago:.0f} s ago: {last.exit_text}"
        else:
            lost += "which and why is not known here"
    missing = stats.num_workers - stats.workers_ready
    if stats.state != "open" or not missing:
        if losses and stats.state in ("open", "broken"):
            text = "A worker was lost, and replaced" if not missing else "Workers were lost"
            yield Problem("warning", text, lost)
        return
    silent = sum(seat.state == "ready" for seat in recorder.seats) - stats.workers_ready
    why = f"{silent} computes for longer than any caller waits; " if silent > 0 else ""
    if stats.workers_ready:
        text = f"{missing} of {stats.num_workers} workers not ready"
        yield Problem("warning", text, why + lost)
    else:
        yield Problem("critical", "No worker is ready: calls wait", why + lost)


def _of_queue(stats: BatcherStats, limit: int) -> Iterator[Problem]:
    if stats.waiting >= limit:
        detail = f"{stats.waiting:,} of {limit:,} requests wait"
        yield Problem("critical", "The queue is full: calls are rejected", detail)
    elif stats.waiting >= NEARLY_FULL * limit:
        detail = f"{stats.waiting:,} of {limit:,} requests wait"
        yield Problem("warning", "The queue is nearly full", detail)


def _of_requests(recorder: Recorder, now: float) -> Iterator[Problem]:
    ends = recorder.read(now, RECENT_SLOTS).ends
    for outcome, verb in _BAD.items():
        reasons = Counter({why: count for (what, why), count in ends.items() if what == outcome})
        if count := reasons.total():
            is_serious = count >= max(SERIOUS_COUNT, SERIOUS_SHARE * ends.total())
            level: Level = "critical" if is_serious else "warning"
            noun = "request" if count == 1 else "requests"
            verb = verb.replace("were", "was") if count == 1 else verb
            detail = ", ".join(
                f"{why or 'error of the model'} {number:,}" for why, number in reasons.most_common()
            )
            yield Problem(level, f"{count:,} {noun} {verb} within a minute", detail)
