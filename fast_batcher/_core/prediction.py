"""Sizes and times of batches, and the predictions made from them. Pure; part of the scheduler.

A model has one method or several, each with a batch size and learned times of its own. Requests of
different methods never share a batch, because each request is in a group of its method.

All predictions read the 95 % quantile of the measured times, unless they say otherwise.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from math import ceil, inf
from typing import Final, NamedTuple

from fast_batcher._core.queue import BatchPacker, WorkAhead
from fast_batcher._core.service_model import ScalarModel, ServiceModel, Shape
from fast_batcher._core.values import Batch, Group, Release, Request
from fast_batcher._core.workers import WorkerSlot
from fast_batcher.stats import SAMPLED_BATCHES

# Full batches that must succeed before a larger one is tried. A failed try costs its requests one
# more batch, so failures should be rare.
FIRST_WAIT: Final = 32
# The wait doubles with each failure, up to a try in 4096 batches: less than 0.1 % of the work.
MAX_WAIT: Final = 4096
# Each step adds an eighth of the size, at least one: the way back from half to full size takes six
# steps.
STEP_SHARE: Final = 8


class SizeCap:
    """Largest size of a batch for now: `max_batch_size`, or less after it ran out of memory."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.size = most
        # Whether successes are counted: from the first failure until enough full batches of the
        # largest size have succeeded.
        self.is_watching = False
        # The largest batch that succeeded since the first failure.
        self._good = 0
        # Full batches that must succeed before a larger try, and full batches that have succeeded.
        self._wait = FIRST_WAIT
        self._seen = 0
        # Size, `is_watching`, `_good` and `_wait` before the batch that is being divided.
        self._before = (most, False, 0, FIRST_WAIT)

    def limit(self, most: int) -> None:
        """Set another `max_batch_size`; a lower limit found by failures stays."""
        self._most = most
        if not self.is_watching:
            self.size = most
        self.size = min(self.size, most)
        self._good = min(self._good, most)
        self._before = (self.size, self.is_watching, self._good, self._wait)

    def ran_out(self, size: int, *, is_retry: bool = False) -> None:
        """Lower the limit after a batch of this size has run out of memory.

        The new limit is the largest size that has succeeded, or else half of this one. A request
        that runs out of memory alone is too large by itself, and says nothing about other batches:
        the limit returns to its value before that batch was divided.
        """
        if not is_retry:
            self._before = (self.size, self.is_watching, self._good, self._wait)
        if size == 1:
            self.size, self.is_watching, self._good, self._wait = self._before
            return
        known = self._good if self._good < size else 0
        self.size = max(1, min(self.size, max(known, size // 2)))
        self._good = min(self._good, self.size)
        if self.is_watching:
            self._wait = min(2 * self._wait, MAX_WAIT)
        self._seen = 0
        self.is_watching = True

    def went_well(self, size: int) -> None:
        """Count a success; raise the limit after enough batches of the present limit's size.

        Called while `is_watching`.
        """
        self._good = max(self._good, size)
        if size < self.size:  # no evidence about larger batches
            return
        self._seen += 1
        if self._seen < self._wait:
            return
        self._seen = 0
        if self.size == self._most:
            self.is_watching = False
            self._wait, self._good = FIRST_WAIT, 0
        self.size = min(self._most, self.size + max(1, self.size // STEP_SHARE))


class Method:
    """A method of a model, "infer" or marked with `batchable`."""

    def __init__(self, name: str, own_size: int | None, batcher_size: int) -> None:
        self.name = name
        # The `max_batch_size` of the method; None for the batcher's.
        self._own_size = own_size
        self._batcher_size = batcher_size
        self.size_cap = SizeCap(own_size or batcher_size)
        # Seconds of its batches by their size.
        self.service = ServiceModel()
        # The group of its requests, where there is no `group_by`.
        self.group = Group(None, self)

    def reconfigure(self, batcher_size: int) -> None:
        """Use another `max_batch_size` of the batcher, unless the method has its own."""
        self._batcher_size = batcher_size
        self._limit_size()

    def use_steps(self, steps: tuple[int, ...]) -> None:
        """Use other allowed batch sizes; no batch is larger than the largest of them."""
        if steps != self.service.steps:
            self.service.use_steps(steps)
            self._limit_size()

    def _limit_size(self) -> None:
        most = self._own_size or self._batcher_size
        self.size_cap.limit(min([most, *self.service.steps[-1:]]))


class Methods:
    """The methods of a model, one or more."""

    def __init__(self, methods: Sequence[Method]) -> None:
        self.all = methods
        # The method of requests that name none.
        self.first = methods[0]

    def of(self, requests: Sequence[Request]) -> Method:
        """Return the method of requests that may share a batch."""
        group = requests[0].group
        return self.first if group is None or group.method is None else group.method

    @property
    def largest_size(self) -> int:
        """Most requests that a batch of any method may have now."""
        return max([method.size_cap.size for method in self.all])

    def ran_out(self, batch: Batch) -> None:
        """Make batches smaller, because the model ran out of memory with this one."""
        cap = batch.method.size_cap
        cap.ran_out(len(batch.requests), is_retry=batch.release is Release.RETRY)


# A prediction is the estimate of the service model times this factor. Under overload every accepted
# request is close to its target: the model is off by one or two percent, because of the way it
# learns, and the event loop takes time before the scheduler sees an arrival and after its answer.
# The simulated goodput at five times the capacity, where the loop takes one millisecond of 50, is
# 88 % with 1.0 and 98 % or more with 1.05. The price is a queue shorter by the same factor.
# A request that finds a free worker has slack, and needs no factor.
SAFETY_FACTOR = 1.05


class Backlog(NamedTuple):
    """Work and delays before a new request."""

    # Waiting requests, and the sum of their costs.
    requests: int
    cost: float
    # Seconds until a worker can begin with the first of them; infinite without a ready worker.
    delay: float
    # Workers that are not retired.
    workers: int
    # Nothing waits and nothing runs.
    is_idle: bool
    # Every worker has a full batch that waits for the one before it.
    is_behind: bool


class BatchTimes:
    """Measured seconds of batches, and the predictions made from them."""

    def __init__(self, methods: Methods, packer: BatchPacker | None) -> None:
        self._methods = methods
        self._packer = packer
        self.has_costs = packer is not None
        # The service model of all methods together.
        self.by_size = methods.first.service if len(methods.all) == 1 else ServiceModel()
        self.by_shape = ScalarModel(self.by_size, 0) if packer is None else packer.times
        # Whether predictions are needed by anything but the policy. Learning costs each batch some
        # microseconds, so it begins when a prediction may first be needed.
        self.is_wanted = self.has_costs
        # Costs of the answered requests, and of their batches, which may be padded.
        self._answered_cost = self._computed_cost = 0.0
        # Of recent batches with costs: the size, and the cost of one of the requests, at random.
        self._recent_costs: deque[tuple[int, float]] = deque(maxlen=SAMPLED_BATCHES)
        # Elements of the inputs of collations, and of the batches that were made of them.
        self.own_elements = self.computed_elements = 0
        # Sizes and seconds of warm-up batches whose costs are unknown: see `price_warm_ups`.
        self.unpriced_warm_ups: list[tuple[float, float]] = []

    @property
    def is_known(self) -> bool:
        """Whether there has been an observation; without one nothing can be predicted."""
        return self.by_shape.is_known

    @property
    def padding(self) -> float:
        """Share of the computed elements, or else cost, that was padding or filling, 0 to 1."""
        if self.computed_elements:
            return 1 - self.own_elements / self.computed_elements
        return 1 - self._answered_cost / self._computed_cost if self._computed_cost else 0.0

    def _shape_of(self, requests: list[Request]) -> Shape:
        """Return the shape of these requests as one batch."""
        if self._packer is None:
            return _make_shape(len(requests), 1.0)
        costs = [request.cost for request in requests]
        service = self._methods.of(requests).service
        return Shape(service.fill(len(costs)), max(costs), sum(costs))

    def seconds_of(self, requests: list[Request]) -> float:
        """Predict the seconds of a batch of these requests; only if `is_known`."""
        service = self._methods.of(requests).service
        if self._packer is None and service.is_known:
            return service.high(len(requests))
        return self.by_shape.high(self._shape_of(requests))

    def observe(self, batch: Batch, seconds: float) -> None:
        """Learn from an answered batch."""
        size = len(batch.requests)
        self.by_size.observe(size, seconds)
        service = batch.method.service
        if service is not self.by_size:
            service.observe(size, seconds)
        if self._packer is not None:
            shape = self._shape_of(batch.requests)
            self._answered_cost += shape.cost
            self._computed_cost += self._packer.charge(shape)
            self.by_shape.observe(shape, seconds)
            self._recent_costs.append((size, batch.requests[batch.id % size].cost))
        else:
            self._answered_cost += size
            self._computed_cost += service.fill(size)

    def use_steps(self, allowed: Mapping[str, tuple[int, ...]]) -> bool:
        """Set the allowed batch sizes of methods by name; return whether there are any."""
        for method in self._methods.all:
            method.use_steps(allowed.get(method.name, ()))
        has_steps = any(allowed.values())
        self.is_wanted = self.is_wanted or has_steps
        return has_steps

    def observe_warm_up(self, times: Iterable[tuple[float, float]]) -> None:
        """Learn from the sizes and seconds of the batches of `infer` that warmed a worker up."""
        for size, seconds in times:
            for service in {self.by_size, self._methods.first.service}:
                service.observe(size, seconds)
            if self._packer is not None and not self.is_known:
                self.unpriced_warm_ups.append((size, seconds))

    def price_warm_ups(self, requests: Collection[Request]) -> None:
        """Assume that each input of the warm-up costs what these requests do on average.

        Only the model knows what they cost; answered batches correct the assumption. Waiting for
        the first answered batch instead, which may be slow for reasons of its own, would reject
        requests that can be served.
        """
        if not requests:
            return
        cost = sum([request.cost for request in requests]) / len(requests)
        for size, seconds in self.unpriced_warm_ups:
            self.by_shape.observe(_make_shape(size, cost), seconds)
        self.unpriced_warm_ups.clear()

    def seconds_until_free(
        self, now: float, slot: WorkerSlot, read: Callable[[Shape], float] | None = None
    ) -> float:
        """Predict, by `high` or `read`, the seconds until a worker has answered its batches."""
        if not slot.batches or not self.is_known:
            return 0.0
        read = read or self.by_shape.high
        first, *others = [read(self._shape_of(batch.requests)) for batch in slot.batches]
        return max(0.0, first - (now - slot.started_at)) + sum(others)

    def seconds_until_answered(self, backlog: Backlog, ahead: WorkAhead, cost: float) -> float:
        """Predict the seconds until a new request is answered.

        The prediction is the sum of the time until a worker is free, the full batches before the
        request's own batch, and that batch; times `SAFETY_FACTOR` unless a worker is free now. A
        batch that waits for another counts as full, because it fills meanwhile: see
        docs/decisions/0013. Of equal requests a later one is never predicted to be answered
        earlier, although with several workers the last batch of a queue may end first.
        """
        if not self.is_known or backlog.delay == inf:
            return 0.0
        high = self.by_shape.high
        mean = (ahead.cost + cost) / (ahead.requests + 1)
        full = self._full_size(mean, ahead.requests + 1)
        batches = max(ahead.cost // (full * mean), ahead.groups - 1)
        # A long input of a padded batch makes all others long.
        alone = high(_make_shape(1, cost)) if self.has_costs else 0.0
        if not batches and not backlog.is_behind:
            # A target just above a batch's time must not keep requests from a free worker.
            factor = SAFETY_FACTOR if backlog.delay or backlog.requests else 1.0
            together = high(_make_shape(ahead.requests + 1, mean))
            return factor * (backlog.delay + max(together, alone))
        # Requests of many groups make more and smaller batches.
        usual = min(full, ahead.requests / max(batches, 1))
        before = batches * high(_make_shape(usual, mean)) / backlog.workers
        return SAFETY_FACTOR * (backlog.delay + before + max(high(_make_shape(full, mean)), alone))

    def seconds_until_drained(self, backlog: Backlog) -> float | None:
        """Predict by medians the seconds until the queue is empty; None before any observation."""
        if not self.is_known or backlog.delay == inf:
            return None
        mean = backlog.cost / backlog.requests if self.has_costs and backlog.requests else 1.0
        full = self._full_size(mean, backlog.requests)
        batches = ceil(backlog.requests / full)
        seconds = batches * self.by_shape.median(_make_shape(full, mean))
        return backlog.delay + seconds / backlog.workers

    def seconds_of_backlog(
        self, now: float, slots: Sequence[WorkerSlot], requests: int, cost: float
    ) -> float | None:
        """Predict by medians the seconds in which these workers answer all they have and the queue.

        Divided by the workers, or by 1 if there are none; None before any observation.
        """
        if not self.is_known:
            return None
        median = self.by_shape.median
        work = sum([self.seconds_until_free(now, slot, median) for slot in slots])
        if requests:
            mean = cost / requests if self.has_costs else 1.0
            full = self._full_size(mean, requests)
            batches, rest = divmod(requests, full)
            work += batches * median(_make_shape(full, mean))
            work += median(_make_shape(rest, mean)) if rest else 0.0
        return work / max(1, len(slots))

    def seconds_each(self, size: float) -> float | None:
        """Predict by medians the mean seconds per request in full batches of at most this size.

        Each of the recent requests is taken to be among others of its own cost. None without costs.
        """
        if self._packer is None or not self._recent_costs:
            return None
        total = 0.0
        for weight, cost in self._recent_costs:
            full = min(size, max(1.0, self._packer.max_batch_cost / cost))
            shape = _make_shape(self.by_size.fill(full), cost)
            total += weight * self.by_shape.median(shape) / full
        return total / sum([weight for weight, _ in self._recent_costs])

    @property
    def full_batch(self) -> tuple[float, int] | None:
        """Predict by the median the seconds of a full batch; return them with its size."""
        size = self.by_size.best_size(self._methods.largest_size)
        return (self.by_size.median(size), size) if self.by_size.is_known else None

    def _full_size(self, mean: float, requests: int) -> float:
        """Return the requests of a full batch at this mean cost: full by number, or by cost.

        With allowed sizes it is the best size for this number of requests.
        """
        size = float(self._methods.largest_size)
        if self.by_size.steps and self._packer is None:
            size = float(self.by_size.best_size(max(1, min(self._methods.largest_size, requests))))
        # Rounding may have left a mean of 0.
        if self._packer is None or not mean:
            return size
        return min(size, max(1.0, self._packer.max_batch_cost / mean))


def _make_shape(requests: float, cost: float) -> Shape:
    """Return the shape of requests that all have this cost."""
    return Shape(requests, cost, requests * cost)
