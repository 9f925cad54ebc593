"""The data of the status page: figures of batchers, ready for JSON. API process, event loop.

It holds no inputs, outputs or messages of models. Moments are seconds ago.
"""

import json
import os
from pathlib import Path
from typing import Any

from fast_batcher._process import monotonic
from fast_batcher.batcher import DynBatcher
from fast_batcher.fastapi.recent_errors import recent_errors
from fast_batcher.fastapi.status.problems import find_problems
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
from fast_batcher.stats import Explanation

_PAGE_SIZE = os.sysconf("SC_PAGE_SIZE")
# An explanation takes some milliseconds, and is about the last thousand batches.
EXPLAIN_SECONDS = 5.0
# A text takes milliseconds, and a second may pass until a page asks for the next one.
SHARED_SECONDS = 0.5
# Counts of `BatcherStats` since the batcher was made.
TOTALS = (
    *("submitted", "completed", "failed", "expired", "cancelled", "rejected"),
    *("batches", "restarts"),
)
# Errors that are shown, of all codes.
SHOWN_ERRORS = 20


class BatcherReport:
    """The figures of one batcher.

    Args:
        batcher: The batcher, which gets an observer.
    """

    def __init__(self, batcher: DynBatcher[Any, Any]) -> None:
        self._batcher = batcher
        settings = batcher._settings  # noqa: SLF001  the page shows the limits
        recycles = settings.max_batches_per_worker is not None or settings.max_rss_bytes is not None
        self._recorder = Recorder(batcher, batcher.stats.num_workers, recycles=recycles)
        self._explanation = Explanation()
        self._explained_at = float("-inf")
        batcher.add_observer(self._recorder)

    def read(self, now: float) -> dict[str, Any]:
        """Return the present figures."""
        stats, recorder, batcher = self._batcher.stats, self._recorder, self._batcher
        recorder.sample()
        settings = batcher._settings  # noqa: SLF001
        problems = find_problems(batcher, stats, recorder, settings.queue_limit, now)
        return {
            "name": batcher.name,
            "state": stats.state,
            "is_ready": batcher.is_ready,
            # False: another server process has the events, and this one the shared counts alone.
            "is_reporter": stats.is_reporter,
            "problems": [one._asdict() for one in problems],
            "workers_ready": stats.workers_ready,
            "num_workers": stats.num_workers,
            "workers": [
                {"index": index, **_describe_seat(seat, stats.state, now)}
                for index, seat in enumerate(recorder.seats)
            ],
            "waiting": stats.waiting,
            "max_queue_size": settings.queue_limit,
            "running": stats.running,
            "max_batch_size": settings.max_batch_size,
            "totals": {name: getattr(stats, name) for name in TOTALS},
            **self._explain(now),
            **self._recent(now),
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
                "total": [_named(one) for one in recorder.quantiles_of_total(now)],
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
        one = self._explanation
        return {
            "explanation": {
                "text": str(one),
                "load": one.load,
                "busy": one.busy,
                "capacity": one.capacity,
            },
            "learned": [
                {"size": size, "median": median, "p95": high}
                for size, median, high in one.service_times
            ],
        }


class Report:
    """The figures of this process and of its batchers.

    Args:
        batchers: The batchers.
    """

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
            "batchers": [one.read(now) for one in self._reports],
            "error_counts": dict(recent_errors.counts),
            "errors": [
                {
                    "age": now - one.at,
                    "status": one.status,
                    "code": one.code,
                    "type": one.kind,
                    "route": one.route,
                    "count": one.answers,
                    "error_id": one.error_id,
                }
                for one in recent_errors.newest_first()[:SHOWN_ERRORS]
            ],
        }


def _named(values: Quantiles) -> dict[str, float | None]:
    return {f"p{share * 100:.0f}": value for share, value in zip(SHARES, values, strict=True)}


def _describe_seat(seat: Seat, batcher_state: str, now: float) -> dict[str, Any]:
    """Describe a worker, as far as its batcher still has it."""
    state, pid = seat.state, seat.pid
    memory = None if pid is None else _read_memory(pid)
    if batcher_state in ("new", "closed") and state != "unknown":
        state, pid = "retired", None
    elif batcher_state == "broken" and state == "loading" and memory is None:
        state, pid = (
            "lost",
            None,
        )  # no event tells the end of a worker that has not loaded the model
    return {
        "state": state,
        "pid": pid,
        "age": None if state == "unknown" else now - seat.since,
        "batches": seat.batches,
        "memory_bytes": None if pid is None else memory,
        "exits": seat.exits,
        "exit_text": seat.exit_text,
        "exit_age": now - seat.exited_at if seat.exit_text else None,
    }


def _read_memory(pid: int) -> int | None:
    """Return the resident memory of a process in bytes, None where it cannot be read."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_SIZE
    except (OSError, IndexError):  # it has just ended, or this is no Linux
        return None
