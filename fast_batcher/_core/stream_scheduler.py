"""The scheduler of a model that answers in steps. Pure.

Each of its batches is a *stream*: one call, which has a place in its worker from the dispatch to
the end. Nothing is held and nothing is learned from batches: predictions are about free places.
"""

from collections import Counter
from collections.abc import Mapping
from math import inf
from typing import Any

from fast_batcher._core.queue import Queue, RankedQueue
from fast_batcher._core.scheduler import Admission, Scheduler, reject_late_arrival
from fast_batcher._core.sessions import SessionQueue
from fast_batcher._core.stream_table import StreamTable
from fast_batcher._core.values import Batch, Rejection, Request, Share


class StreamAdmission(Admission):
    """Rejects streams that would have no place within `max_latency`."""

    _workers: StreamTable

    def _seconds_until_room(self, now: float, queue: Queue | SessionQueue) -> float | None:
        """Predict the seconds until a stream has a place."""
        return self._workers.predict(now)(0) or None

    def _reject_late(
        self, now: float, requests: list[Request], queue: RankedQueue | SessionQueue
    ) -> tuple[list[Request], list[tuple[Request, Rejection]]]:
        """Reject the streams that would have no place within `max_latency`."""
        accepted: list[Request] = []
        rejected: list[tuple[Request, Rejection]] = []
        if self._max_latency == inf:
            return requests, rejected
        predict = self._workers.predict(now)
        accepted_of: Counter[Share] = Counter()
        for request in requests:
            priority, share = request.priority, request.share
            ahead = queue.ahead_of(priority, share).requests + accepted_of[share]
            seconds = predict(ahead)
            if seconds <= self._max_latency:
                accepted.append(request)
                accepted_of[share] += 1
            else:
                late = reject_late_arrival(ahead, seconds, self._max_latency, "first chunk")
                rejected.append((request, late))
        return accepted, rejected


class StreamScheduler(Scheduler):
    """The queue, the workers and the streams of one batcher."""

    _make_workers = StreamTable
    _make_admission = StreamAdmission
    _workers: StreamTable

    @property
    def figures(self) -> dict[str, Any]:
        """Fields of `BatcherStats` that depend on the kind of the model."""
        most, slots = self._workers.places, self._workers.slots.values()
        live = sum([min(len(slot.batches), most) for slot in slots])
        return {"places": most * self.ready_count, "live_streams": live}

    def seconds_of_backlog(self, now: float) -> float | None:
        """Predict the seconds until the next stream has a place."""
        return self._workers.predict(now)(self._queue.size)

    def seconds_behind(self, now: float) -> float | None:
        """Predict the seconds until the waiting streams have places, 0 if none waits."""
        return self.seconds_of_backlog(now) if self._queue.size else 0.0

    @property
    def full_batch(self) -> tuple[float, int] | None:
        """Predicted seconds between the ends of two streams of a worker, and 1; None if unknown."""
        return self._workers.pace

    @property
    def needed_workers(self) -> int:
        """Workers that have places for the live streams, and for one more."""
        workers = self._workers
        cost = sum([workers.sum_costs(slot) for slot in workers.slots.values()])
        return int(max(len(workers.batches) / workers.places, cost / workers.most_cost)) + 1

    def _learn_warm_up(self, *_: object) -> None:
        """Learn nothing: the times are those of whole answers."""

    def _learn(self, *_: object) -> None:
        """Learn nothing: `StreamTable.take_back` does."""

    def stream_evicted(self, batch: Batch) -> list[Request]:
        """Let a stream begin again that has made room for others; return it if it fails instead.

        Called after `batch_done`. The shell settles the returned request.
        """
        self._next_expiry = min(self._next_expiry, batch.deadline)
        return self._retries.after_eviction(batch)

    def stepped(
        self, now: float, worker: int, streams: list[Batch], costs: Mapping[int, float]
    ) -> None:
        """Record that a worker has sent chunks of streams, and their new costs by batch id.

        A stream that begins again keeps its cost.
        """
        self._workers.begin_step(now, worker)
        for batch in streams:
            batch.has_stepped = True
        for batch_id, cost in costs.items():
            if (found := self._workers.find(worker, batch_id)) is not None:
                found.call.cost = cost

    def pause(self, batch: Batch) -> None:
        """Record that a stream is left out of the steps, because its caller does not read."""
        batch.is_paused = True
        self._workers.slots[batch.worker].paused += 1

    def resume(self, now: float, batch: Batch) -> None:
        """Record that a stream takes part in the steps again."""
        self._workers.resume(now, batch)
