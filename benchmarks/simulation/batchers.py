"""Our scheduler, packers, and the exact optimum, for virtual time. No process, no clock."""

from collections import deque
from collections.abc import Sequence
from math import inf
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.simulation.models import Encoder
from fast_batcher._core.policy import make_policy
from fast_batcher._core.prediction import Method
from fast_batcher._core.queue import BatchPacker, PaddedPacker
from fast_batcher._core.scheduler import Scheduler
from fast_batcher._core.service_model import ScalarModel, ServiceModel, Shape
from fast_batcher._core.values import Action, Batch, Dispatch, Limits, Rejection, Release, Request

# The defaults of `DynBatcher`.
DEFAULT_TIMEOUT = 30.0
LEAST_QUEUE_SIZE, QUEUE_BATCHES = 1024, 8
WORKER = 0


class Ours(Scheduler):
    """The scheduler of a batcher with one worker.

    Args:
        policy: "adaptive", "greedy" or "fixed".
        max_batch_size: Most requests in a batch.
        max_delay: The setting of `DynBatcher`, seconds.
        target: `max_latency`, seconds, or None.
        costs: Of the requests by their number; batches are then filled by cost.
        max_batch_cost: Most that a batch costs; None for a full batch of requests that cost 1.
        methods: Names of the requests' methods by their number; None for a model without methods.
        packer: Fills batches by cost in another way.
        warm_up: Sizes and seconds of the warm-up batches.
        allowed: The allowed batch sizes that the scheduler knows.
        in_share: Requests in flight that are of one share; None for no shares.
    """

    def __init__(
        self,
        policy: str,
        max_batch_size: int,
        *,
        max_delay: float | None = None,
        target: float | None = None,
        costs: Sequence[float] | None = None,
        max_batch_cost: float | None = None,
        methods: Sequence[str] | None = None,
        packer: BatchPacker | None = None,
        warm_up: Sequence[tuple[int, float]] = (),
        allowed: tuple[int, ...] = (),
        in_share: int | None = None,
    ) -> None:
        if costs is not None and packer is None:
            packer = PaddedPacker(max_batch_cost or float(max_batch_size))
        self._method_names = methods
        self._costs = costs
        self._in_share = in_share
        self._method_of = {
            name: Method(name, None, max_batch_size) for name in sorted(set(methods or ()))
        }
        super().__init__(
            make_policy(policy, max_delay),
            Limits(
                max_batch_size=max_batch_size,
                max_queue_size=max(LEAST_QUEUE_SIZE, QUEUE_BATCHES * max_batch_size),
                timeout=DEFAULT_TIMEOUT,
                max_latency=target,
            ),
            packer=packer,
            methods=[*self._method_of.values()],
        )
        sizes = {"infer": allowed} if allowed else {}
        self.worker_ready(0.0, WORKER, warm_up, allowed=sizes)

    def submit(self, now: float, requests: list[Request]) -> list[tuple[Request, Rejection]]:
        """Submit them with their costs, methods and shares."""
        for request in requests:
            if self._costs is not None:
                request.cost = self._costs[request.value % len(self._costs)]
            if self._method_names is not None:
                request.group = self._method_of[self._method_names[request.value]].group
            if self._in_share is not None:
                request.rank(0, request.caller // self._in_share)
                self.rank_requests(request.share)
        return super().submit(now, requests)


class Product(ScalarModel):
    """Learns the time of a padded batch by one number, its size times its longest input."""

    def __init__(self) -> None:
        super().__init__(ServiceModel(), 0)

    def observe(self, shape: Shape, seconds: float) -> None:
        """Learn from a batch."""
        super().observe(_multiply(shape), seconds)

    def median(self, shape: Shape) -> float:
        """Return the median seconds of such batches."""
        return super().median(_multiply(shape))

    def high(self, shape: Shape) -> float:
        """Return the 95 % quantile of such batches."""
        return super().high(_multiply(shape))


def _multiply(shape: Shape) -> Shape:
    return shape._replace(requests=shape.requests * shape.longest)


class TrueTimes:
    """Knows the times, without noise."""

    is_known = True

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder

    def observe(self, shape: Shape, seconds: float) -> None:
        """Learn nothing."""

    def median(self, shape: Shape) -> float:
        """Return the seconds of such batches."""
        return self._encoder.seconds(shape.requests, shape.longest)

    high = median


class _Padded(BatchPacker):
    """Another packer of padded batches."""

    def charge(self, shape: Shape) -> float:
        """Return the size times the highest cost."""
        return shape.requests * shape.longest


class ByLength(_Padded):
    """Sorts the window by length, and takes a full batch around the first request."""

    def fill(self, chosen: list[Request], window: Sequence[Request], most: int) -> None:
        """Fill."""
        first = window[0]
        ordered = sorted(window, key=lambda request: request.cost)
        start = max(0, min(ordered.index(first) - most // 2, len(ordered) - most))
        chosen += [first, *(one for one in ordered[start : start + most] if one is not first)]
        del chosen[most:]


class Greedy(_Padded):
    """Adds what pads least, one by one, and keeps the size with most work per second."""

    def fill(self, chosen: list[Request], window: Sequence[Request], most: int) -> None:
        """Fill."""
        first, *rest = window
        chosen.append(first)
        highest = total = first.cost
        # The nearest last.
        shorter = sorted([one for one in rest if one.cost <= highest], key=lambda one: one.cost)
        longer = sorted([one for one in rest if one.cost > highest], key=lambda one: -one.cost)
        best, best_size = self._rate(1, highest, total), 1
        while len(chosen) < most and (shorter or longer):
            wasted_by_shorter = highest - shorter[-1].cost if shorter else inf
            wasted_by_longer = (longer[-1].cost - highest) * len(chosen) if longer else inf
            request = (shorter if wasted_by_shorter <= wasted_by_longer else longer).pop()
            highest = max(highest, request.cost)
            total += request.cost
            chosen.append(request)
            rate = self._rate(len(chosen), highest, total)
            if rate >= best:
                best, best_size = rate, len(chosen)
        del chosen[best_size:]

    def _rate(self, size: int, highest: float, work: float) -> float:
        if not self.times.is_known:
            return 0.0
        return work / self.times.median(Shape(size, highest, work))


class Program(_Padded):
    """Divides the sorted window into batches that take the least time together.

    Sends the batch that has the first request. A dynamic program: O(window * most).
    """

    def fill(self, chosen: list[Request], window: Sequence[Request], most: int) -> None:
        """Fill."""
        first = window[0]
        if not self.times.is_known:
            chosen.append(first)
            return
        ordered = sorted(window, key=lambda request: request.cost)
        best = [0.0] + [inf] * len(ordered)
        sizes = [0] * len(best)
        for end in range(1, len(best)):
            longest = ordered[end - 1].cost
            for size in range(1, min(most, end) + 1):
                seconds = best[end - size] + self.times.median(Shape(size, longest, 0.0))
                if seconds < best[end]:
                    best[end], sizes[end] = seconds, size
        end, at = len(ordered), ordered.index(first)
        while not end - sizes[end] <= at < end:
            end -= sizes[end]
        chosen += [first, *(one for one in ordered[end - sizes[end] : end] if one is not first)]


class Planned(Ours):
    """Sends what a table says.

    Args:
        sizes: By queue length while the worker is free, how many to send; 0 to wait for the next
            arrival. A longer queue counts as the longest in the table.
    """

    def __init__(self, sizes: npt.NDArray[np.int64]) -> None:
        super().__init__("greedy", len(sizes))
        self._sizes: list[int] = sizes.tolist()
        self._waiting: deque[Request] = deque()
        # The batch of the worker, None while it is free; and the number of batches so far.
        self._batch: Batch | None = None
        self._count = 0

    def submit(self, now: float, requests: list[Request]) -> list[tuple[Request, Rejection]]:
        """Let them wait; none is rejected."""
        self._waiting.extend(requests)
        return []

    def batch_done(self, now: float, worker: int, batch_id: int, *_: bool) -> Batch | None:
        """Free the worker."""
        batch, self._batch = self._batch, None
        return batch

    def poll(self, now: float, **_: Any) -> tuple[list[Action], None]:
        """Look up how many to send."""
        queue = self._waiting
        size = self._sizes[min(len(queue), len(self._sizes) - 1)] if self._batch is None else 0
        if size == 0:
            return [], None
        requests = [queue.popleft() for _ in range(size)]
        self._count += 1
        self._batch = Batch(self._count, WORKER, requests, Release.IDLE, inf, size, now)
        return [Dispatch(self._batch)], None
