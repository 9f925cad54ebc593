"""The scheduler of a model that answers in steps. Pure.

Each of its batches is a *stream*: one call, which has a place in its worker from the dispatch to
the end. A worker computes all of its streams at the same time, up to a number, its places, and up
to a cost of all. Nothing is held and nothing is learned from batches: predictions are about free
places.

    StreamTable      the streams of each worker, and the prediction of the next free place
    StreamAdmission  rejects streams that would have no place in time
    StreamScheduler  the queue, the workers and the streams of one batcher
"""

from collections import Counter, deque
from collections.abc import Callable, Mapping
from math import inf
from typing import Any, Final

from fast_batcher._core.admission import Admission, reject_late_arrival
from fast_batcher._core.queue import Queue, RankedQueue
from fast_batcher._core.scheduler import Scheduler
from fast_batcher._core.sessions import SessionQueue
from fast_batcher._core.values import Batch, Limits, Rejection, Request, Share
from fast_batcher._core.workers import Slots, WorkerSlot, WorkerTable
from fast_batcher.errors import DeadlineExceededError
from fast_batcher.observing import ChunkTimes

# Streams whose lengths are kept: the 95 % quantile of 128 is their seventh longest.
MOST_LENGTHS: Final = 128


class StreamTable(WorkerTable):
    """Workers by number, their streams, and the lengths of the last streams."""

    def __init__(self, limits: Limits) -> None:
        super().__init__(limits)
        # Streams that a worker computes at a time; further ones wait there.
        self.places = limits.places
        self.most_cost = limits.most_stream_cost
        self._sends_ahead = limits.batches_per_worker > limits.places
        # Seconds for which the last streams kept their places.
        self._lengths: deque[float] = deque(maxlen=MOST_LENGTHS)

    def retire(self, worker: int, ends_at: float = inf) -> None:
        """Give a worker no more streams; its own end at the latest at this moment."""
        super().retire(worker)
        if worker in self.slots:
            self.slots[worker].ends_at = ends_at
            self.next_expiry = min(self.next_expiry, ends_at)

    def least_loaded(
        self, below: float = inf, slots: Slots = None, queue: Queue | None = None
    ) -> WorkerSlot | None:
        """Return the worker with the fewest streams that can begin the next one, or None."""
        assert queue is not None, "it has the stream, whose cost matters"
        return super().least_loaded(below, self._list_places(queue.choose(1)[0].cost))

    def find_for_retry(self, cost: float) -> WorkerSlot | None:
        """Return the worker for a stream that begins again, beside others, or None.

        Of the streams with which a worker has died, one at a time is on trial, until its first
        chunk: if its worker dies, too, the others are not suspected.
        """
        slot = super().least_loaded(inf, self._list_places(cost))
        if slot is None or any(batch.is_on_trial for batch in slot.batches):
            return None
        return slot

    def _list_places(self, cost: float) -> list[WorkerSlot]:
        """Return the workers that can begin a stream of this cost.

        Without other workers a stream may also be sent ahead, and wait in the worker. Beside others
        it waits in the queue, for the worker that has room first.
        """
        if self._sends_ahead and len(self.assignable) == 1:
            return [slot for slot in self.assignable if not self._is_full(slot)]
        return [
            slot
            for slot in self.assignable
            if len(slot.batches) < self.places
            and (not slot.batches or self.sum_costs(slot) + cost <= self.most_cost)
        ]

    def sum_costs(self, slot: WorkerSlot) -> float:
        """Return the cost of a worker's streams together."""
        return sum([batch.call.cost for batch in slot.batches])

    def _is_full(self, slot: WorkerSlot) -> bool:
        """Return whether the streams of a worker cost the most; the youngest may wait there."""
        return self.sum_costs(slot) >= self.most_cost

    def give(self, now: float, slot: WorkerSlot, batch: Batch) -> None:
        """Add a stream; the times of its chunks begin."""
        batch.call.chunk_times, batch.call.chunks = ChunkTimes(batch.call.arrival), []
        super().give(now, slot, batch)

    def take_back(self, now: float, batch: Batch) -> None:
        """Remove a stream from its worker, and learn from its length; the next one joins."""
        slot, began_at = self.slots[batch.worker], batch.joined_at
        had_place = batch in slot.batches[: self.places]
        super().take_back(now, batch)
        batch.began_at, batch.infer_seconds = began_at, now - began_at
        if had_place and batch.requests:  # it could be sent
            self._lengths.append(batch.infer_seconds)
            if len(slot.batches) >= self.places:
                slot.batches[self.places - 1].began_at = now

    def resume(self, now: float, batch: Batch) -> None:
        """Record that a stream takes part in the steps again; a worker that rested begins one."""
        slot = self.slots[batch.worker]
        if len(slot.batches) == slot.paused:
            self._begin_first(now, slot)
        batch.is_paused = False
        slot.paused -= 1

    def _can_leave(self, slot: WorkerSlot, batch: Batch) -> bool:
        """Return True: a stream leaves with the present step."""
        return True

    def _find_cause(self, slot: WorkerSlot, batch: Batch) -> Rejection | None:
        """Describe why a stream is late that the costs of others hold back; None for others."""
        cost = self.sum_costs(slot) if self.most_cost < inf else 0.0
        if cost <= self.most_cost or batch.is_paused or len(slot.batches) == 1:
            return None
        call = batch.call
        if slot.started_at <= call.deadline - (call.timeout or self._timeout):
            return None  # no step has passed it over: the model is slow
        return Rejection(
            DeadlineExceededError,
            f"no chunk came in time, because the stream waited for others to end: the streams of "
            f"its worker cost {cost:g}, and max_batch_cost={self.most_cost:g}; raise it, or lower "
            "max_batch_size",
        )

    @property
    def pace(self) -> tuple[float, int] | None:
        """Seconds between the ends of two streams of a busy worker, and 1; None if unknown."""
        lengths = sorted(self._lengths)
        return (lengths[len(lengths) // 2] / self.places, 1) if lengths else None

    def predict(self, now: float) -> Callable[[int], float]:
        """Return a function from a number of requests to the seconds until one behind has a place.

        A stream is predicted to end at the median length. Past that it ends at the 95 % quantile,
        and past that, or while nothing is known, it goes on for as long as it has run. Requests
        that wait take the places as they become free, each for the median.
        """
        ends: list[float] = []
        ahead = 0
        lengths = sorted(self._lengths) or [0.0]
        median, high = lengths[len(lengths) // 2], lengths[len(lengths) * 95 // 100]
        for slot in self.assignable:
            running = slot.batches[: self.places]
            ahead += len(slot.batches) - len(running)
            for batch in running:
                seconds = now - batch.joined_at
                later = [end - seconds for end in (median, high) if seconds < end]
                ends.append(later[0] if later else seconds)
            if not self._is_full(slot):
                ends += [0.0] * (self.places - len(running))
        ends.sort()

        def seconds_until_place(waiting: int) -> float:
            if not ends:  # no worker is ready
                return 0.0
            rounds, place = divmod(ahead + waiting, len(ends))
            return rounds * median + ends[place]

        return seconds_until_place


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
        slot = self._workers.slots.get(worker)
        if slot is not None and slot.started_at != inf:  # `infer_timeout` is that of one step
            slot.started_at, slot.is_stalled = now, False
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
