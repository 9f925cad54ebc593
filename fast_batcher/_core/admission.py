"""Who is refused, and who is dropped unserved, because the answer would come too late. Pure.

Part of the scheduler; on its thread. A request has a *target*: the deadline that its caller named,
or `max_latency` after its arrival, whichever is first. A request with the default timeout alone has
none: that timeout is a safety net, and nothing is predicted for it.

- At the door a request is refused whose answer would come after its target.
- When a batch leaves, those of it that would be late even so (95 % quantile) are dropped, if others
  can run in their place; else the batch becomes smaller.
- Two rules keep a wrong estimate from refusing for ever, for what is never run is never measured:
  an idle batcher takes any request, and a free worker runs the last candidate, late or not.

A target ends nothing by itself: a request that runs past it is answered, until its deadline.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from math import ceil, inf
from typing import NamedTuple

from fast_batcher._core.batch_packer import BatchPacker
from fast_batcher._core.messages import Refusal, Request
from fast_batcher._core.ranked_queue import WorkAhead
from fast_batcher._core.request_queue import RequestQueue
from fast_batcher._core.service_model import ServiceModel
from fast_batcher.errors import DeadlineExceededError

# A prediction is so many times what the service model says. Under overload whoever is let in is on
# the edge of being late: the model is off by one or two percent, for that is how it learns, and the
# event loop takes a request before its arrival is noticed and after its answer is known. With 1.0
# and one such millisecond in 50 the simulated goodput at five times the capacity falls to 88 %,
# with 1.05 it stays at 98 % or more; it costs the room for so many more to wait in. A request that
# finds a free worker is not on that edge.
SAFETY_FACTOR = 1.05


class Backlog(NamedTuple):
    """What stands between a new request and its answer."""

    # Requests that wait.
    ahead: int
    # Seconds until a worker can begin with the first of them, by the 95 % quantile; infinite
    # without a ready worker.
    delay: float
    # Ready workers.
    workers: int
    # Nothing waits and nothing runs.
    is_idle: bool
    # What waits costs so much together, where there are costs.
    cost: float = 0.0
    # Every worker has a full batch that waits for the one before it.
    is_behind: bool = False


class Selection(NamedTuple):
    """The batch that leaves."""

    requests: list[Request]
    # Whether it is smaller than it could be, for the sake of a target.
    is_smaller: bool


class Admission:
    """Predicts from the service model when requests would be answered.

    Args:
        service: Seconds of a batch by its size.
        max_batch_size: Most requests in a batch.
        packer: Fills batches by cost, if there are costs; what a batch is charged takes the place
            of its size then.
    """

    def __init__(
        self, service: ServiceModel, max_batch_size: int, packer: BatchPacker | None = None
    ) -> None:
        self._service = service
        self.max_batch_size = max_batch_size
        self._packer = packer

    def size_of(self, requests: list[Request]) -> float:
        """What the service model calls the size of a batch."""
        return len(requests) if self._packer is None else self._packer.charge(requests)

    def seconds_until_answered(self, backlog: Backlog, more: int = 0) -> float:
        """Predict how long a new request would take.

        It waits for the workers, for the full batches before its own and for its own, all by the
        95 % quantile, and `SAFETY_FACTOR` times that unless a worker is free. Its own batch is a
        full one if it has to wait for another, for then it fills: see docs/decisions/0013.
        With several workers the last batch of a queue may end before the one before it; what comes
        later is never predicted to end earlier, so that lengths can be searched.

        Args:
            backlog: As it is before this turn's arrivals.
            more: How many of them are taken before this one.

        Returns:
            Seconds, 0.0 while nothing is known.
        """
        if not self._service.is_known or backlog.delay == inf:
            return 0.0
        most = self.max_batch_size
        batches, rest = divmod(backlog.ahead + more, most)
        if not batches and not backlog.is_behind:
            return _safety_factor(backlog) * (backlog.delay + self._service.high(rest + 1))
        full = self._service.high(most)
        return SAFETY_FACTOR * (backlog.delay + batches * full / backlog.workers + full)

    def seconds_behind(self, backlog: Backlog, ahead: WorkAhead, cost: float) -> float:
        """The same where requests are not equals.

        Args:
            backlog: As it is before this turn's arrivals; `ahead` takes the place of its own.
            ahead: What goes first.
            cost: Of the request, 1.0 without costs.
        """
        if not self._service.is_known or backlog.delay == inf:
            return 0.0
        full = self._full_charge(ahead.cost + cost, ahead.requests + 1)
        batches = max(ahead.cost // full, ahead.groups - 1)
        if not batches and not backlog.is_behind:
            return _safety_factor(backlog) * (backlog.delay + self._service.high(ahead.cost + cost))
        # Batches of small groups are smaller.
        usual = min(full, ahead.cost / max(batches, 1))
        before = batches * self._service.high(usual) / backlog.workers
        return SAFETY_FACTOR * (backlog.delay + before + self._service.high(max(full, cost)))

    def seconds_until_drained(self, backlog: Backlog) -> float | None:
        """How long it takes to serve all that wait, None if that is not known."""
        if not self._service.is_known or backlog.delay == inf:
            return None
        full, batches = float(self.max_batch_size), ceil(backlog.ahead / self.max_batch_size)
        if self._packer is not None and backlog.ahead:
            full = self._full_charge(backlog.cost, backlog.ahead)
            # Rounding may have left nothing of the costs of those that wait.
            batches = ceil(backlog.cost / full) if full else batches
        return backlog.delay + batches * self._service.median(full) / backlog.workers

    def _full_charge(self, cost: float, requests: int) -> float:
        """A full batch has its number of requests, of the mean cost, or costs all that it may."""
        full = self.max_batch_size * cost / requests
        return full if self._packer is None else min(full, self._packer.max_batch_cost)

    def find_late_equals(
        self, now: float, backlog: Backlog, requests: list[Request]
    ) -> list[Request]:
        """`find_late` for requests, at least one, that all have the same target.

        Nearly every turn is settled by two predictions, be it under little load or far too much.
        """
        left = _target_of(requests[0]) - now
        if self.seconds_until_answered(backlog, len(requests) - 1) <= left:
            return []
        taken = bisect_right(
            range(len(requests)),
            left,
            key=lambda more: self.seconds_until_answered(backlog, more),
        )
        if backlog.is_idle:
            taken = max(taken, 1)
        late = requests[taken:]
        seconds = self.seconds_until_answered(backlog, taken)
        refusal = self.refusal(backlog.ahead + taken, seconds, left)
        for request in late:
            request.refusal = refusal
        return late

    def find_late(
        self,
        now: float,
        backlog: Backlog,
        requests: Sequence[Request],
        predict: Callable[[Request, int], float] | None = None,
    ) -> list[Request]:
        """Those of the arrivals that have to be refused, with their refusals.

        Args:
            now: The moment.
            backlog: What they would wait for.
            requests: All of this turn, in their order; those that have a target have it set.
            predict: The seconds that a request would take when so many are taken before it; None
                where all are equals.
        """
        late: list[Request] = []
        taken = 0
        # It is the same for equals until one more is taken.
        seconds = 0.0 if predict is not None else self.seconds_until_answered(backlog)
        refusals: dict[float, Refusal] = {}
        for request in requests:
            if predict is not None:
                seconds = predict(request, taken)
            target = _target_of(request)
            if now + seconds > target and not (backlog.is_idle and taken == 0):
                if predict is not None or target not in refusals:
                    ahead = backlog.ahead + taken
                    refusals[target] = self.refusal(ahead, seconds, target - now)
                request.refusal = refusals[target]
                late.append(request)
            else:
                taken += 1
                if predict is None:
                    seconds = self.seconds_until_answered(backlog, taken)
        return late

    def refusal_of_late(self, backlog: Backlog) -> Refusal:
        """What those are told that have waited in vain."""
        return Refusal(
            DeadlineExceededError,
            "the answer would have come too late, and others could be answered in time; "
            f"{backlog.ahead} requests wait",
            self.seconds_until_drained(backlog),
        )

    def refusal(self, ahead: int, seconds: float, left: float) -> Refusal:
        """What one is told whose answer would take so long, and who has only so much time left."""
        return Refusal(
            DeadlineExceededError,
            f"the answer would take {seconds:.3g} seconds, and {max(left, 0.0):.3g} are left; "
            f"{ahead} requests wait already",
            max(0.0, seconds - left),
        )

    def take(self, start: float, queue: RequestQueue, late: list[Request]) -> Selection:
        """Take the next batch out of the queue.

        Args:
            start: The moment at which the worker can begin with it.
            queue: At least one request.
            late: Gets the requests that are dropped, because they would be late; they are settled.
        """
        requests = queue.take(self.max_batch_size)
        if not self._service.is_known:
            return Selection(requests, is_smaller=False)
        while True:
            finish = start + self._service.high(self.size_of(requests))
            if finish <= min(map(_target_of, requests)):
                return Selection(requests, is_smaller=False)
            if not queue.size:
                break
            # Others can run in their place.
            in_time = self._drop(requests, late, lambda request: _target_of(request) < finish)  # noqa: B023  called at once
            queue.put_back(in_time)
            requests = queue.take(self.max_batch_size)
        requests = self._without_hopeless(start, requests, late)
        return self._make_smaller(start, requests, queue)

    def _without_hopeless(
        self, start: float, requests: list[Request], late: list[Request]
    ) -> list[Request]:
        """Drop those that would be late even alone, but not the last candidate."""
        last = requests[-1]

        def is_hopeless(request: Request) -> bool:
            return _target_of(request) < start + self._service.high(self.size_of([request]))

        if all(map(is_hopeless, requests)):
            self._drop(requests[:-1], late, is_hopeless)
            return [last]
        return self._drop(requests, late, is_hopeless)

    def _drop(
        self, requests: list[Request], late: list[Request], is_late: Callable[[Request], bool]
    ) -> list[Request]:
        """Settle those that are late; returns the others."""
        kept = []
        for request in requests:
            if is_late(request):
                request.is_settled = True
                late.append(request)
            else:
                kept.append(request)
        return kept

    def _make_smaller(
        self, start: float, requests: list[Request], queue: RequestQueue
    ) -> Selection:
        # The more, the later, and the earlier the first target among them: so it can be searched.
        targets = list(accumulate(map(_target_of, requests), min))
        size = (
            bisect_left(
                range(2, len(requests) + 1),
                True,
                key=lambda size: (
                    start + self._service.high(self.size_of(requests[:size])) > targets[size - 1]
                ),
            )
            + 1
        )
        queue.put_back(requests[size:])
        return Selection(requests[:size], is_smaller=size < len(requests))


def _target_of(request: Request) -> float:
    return inf if request.target is None else request.target


def _safety_factor(backlog: Backlog) -> float:
    """A target just above a batch's time must not keep requests from a free worker."""
    return SAFETY_FACTOR if backlog.delay or backlog.ahead else 1.0
