"""Policies: how long a batch that is not full waits while a worker is free. Pure.

The scheduler asks its policy only while a worker is free and requests wait; a full batch leaves at
once.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from math import inf
from typing import NamedTuple, NoReturn

from fast_batcher._core.queue import Queue
from fast_batcher._core.service_model import ServiceModel
from fast_batcher._core.values import Release, target_of
from fast_batcher.policy import BatchPolicy, QueueSummary


class Load(NamedTuple):
    """State of the scheduler that a policy may read, besides the queue."""

    # Requests waiting in the queue.
    waiting: int
    # Requests on workers whose callers still wait.
    running: int
    # Workers that are not retired.
    workers: int
    max_batch_size: int
    # Seconds of batches by size. It observes every batch while the policy learns.
    service: ServiceModel


# Seconds by which a hold ends before the batch would be late: timers fire late while the event loop
# works. Source: the 99 % quantile of the loop's lag that the soaks allow.
_TIMER_LATENESS = 0.005


def latest_start(deadline: float, seconds: float) -> float:
    """Return the moment at which the hold of a batch that takes these seconds has to end."""
    return deadline - seconds - _TIMER_LATENESS


class Policy(ABC):
    """Decides when the next batch leaves; may learn from arrivals and finished batches."""

    # Whether `arrived` and `batch_done` are to be called.
    learns = False
    # Whether `decide` may return a moment now; otherwise the batch leaves without asking.
    may_hold = True
    # Whether it keeps the hold of one queue. Of several queues none is held then.
    has_one_queue = False

    @abstractmethod
    def decide(self, now: float, queue: Queue, load: Load) -> Release | float:
        """Return why a batch that is not full leaves now, or until when it is held.

        A new arrival or completion asks again.
        """

    def end_hold(self) -> None:  # noqa: B027  most policies keep nothing of a hold
        """Learn that nothing is held: the batch has left, is empty, or no worker is free."""

    def arrived(self, now: float, count: int, is_idle: bool) -> None:  # noqa: B027
        """Learn of an arrival; `is_idle` if no other request was waiting or running."""

    def batch_done(self, now: float, size: int, load: Load) -> None:  # noqa: B027
        """Learn that a worker has answered a batch of this size; `load` no longer includes it."""

    def batch_skipped(self) -> None:  # noqa: B027
        """Learn that a worker has answered a batch while `learns` was False."""


class GreedyPolicy(Policy):
    """Work-conserving policy: a free worker takes the waiting requests at once.

    Source: at Poisson arrivals from 5 to 98 % load its mean latency is within 1 % of the exact
    optimum for models with a high fixed cost per batch, and fixed windows cost up to ten times
    as much: `benchmarks/results/simulation-open-loop.txt`.
    """

    may_hold = False

    def decide(self, now: float, queue: Queue, load: Load) -> Release | float:
        """Send now."""
        return Release.IDLE


class FixedPolicy(Policy):
    """Fixed window: a batch leaves `max_delay` after the arrival of its oldest request, or full.

    This is the documented rule of fast_dynamic_batcher.
    """

    def __init__(self, max_delay: float) -> None:
        self._max_delay = max_delay

    def decide(self, now: float, queue: Queue, load: Load) -> Release | float:
        """Wait for the end of the oldest request's window, unless its deadline comes first."""
        oldest = queue.oldest()
        assert oldest is not None, "the scheduler asks only while requests wait"
        window_end = oldest.arrival + self._max_delay
        if now >= window_end:
            return Release.WINDOW
        if queue.earliest_deadline() < window_end:
            return Release.DEADLINE
        return window_end


# Points of the curve: a hold ends at one of them. With more points each would have too few
# observations.
POINTS = 12
# A new observation's share of the average: it forgets over about 24 of them.
SHARE = 1 / 24
# Fewer observations are no evidence.
ENOUGH = 4


class ReturnCurve:
    """Average number of arrivals by the time since an event.

    The event is either the end of a batch, with the batch's size, after which most of its callers
    send their next requests; or an arrival at an idle batcher, with size one.
    """

    def __init__(self) -> None:
        # The last event.
        self.last_at = -inf
        self.last_size = 1.0
        # Observations so far.
        self.count = 0
        # Averages: of the arrivals up to the end of each part, and of the sizes.
        self._returns = [0.0] * POINTS
        self._size = 0.0
        # Observations in progress: moment and size of the event, seconds of one part, arrivals in
        # each part.
        self._open: list[tuple[float, float, float, list[int]]] = []

    def begin(self, now: float, horizon: float, size: float) -> None:
        """Start to count the arrivals in the `horizon` seconds after an event."""
        self.close(now)
        self.last_at, self.last_size = now, size
        self._open.append((now, horizon / POINTS, size, [0] * POINTS))

    def arrived(self, now: float, count: int) -> None:
        """Record that `count` requests have arrived together."""
        is_over = False
        for origin, part, _, arrivals in self._open:
            at = int((now - origin) / part)
            if at < POINTS:
                arrivals[at] += count
            else:
                is_over = True
        if is_over:
            self.close(now)

    def close(self, now: float) -> None:
        """Add finished observations to the averages."""
        still_open = []
        for observed in self._open:
            origin, part, size, arrivals = observed
            if int((now - origin) / part) < POINTS:
                still_open.append(observed)
                continue
            self.count += 1
            share = max(SHARE, 1 / self.count)
            self._size += (size - self._size) * share
            so_far = 0
            for at, count in enumerate(arrivals):
                so_far += count
                self._returns[at] += (so_far - self._returns[at]) * share
        self._open = still_open

    def forget_open(self) -> None:
        """Discard observations in progress: arrivals will not be reported for a while."""
        self._open.clear()
        self.last_at = -inf

    def expected(self, since: float, size: float) -> list[float]:
        """Return the expected number of further arrivals until the end of each part.

        Below the average size of events the number is in proportion to `size`, above it the
        average: arrivals that are independent of the events would be overestimated after every
        large one.
        """
        first = int(since)
        before = self._returns[first - 1] if first else 0.0
        here = before + (since - first) * (self._returns[first] - before)
        scale = min(size / self._size, 1.0)
        return [(returns - here) * scale for returns in self._returns[first:]]


# A hold must be worth this share of a lone request's time for every request it concerns; less is
# within the noise of what has been learned.
LEAST_GAIN = 0.05
# Fewer expected arrivals than this do not matter.
FEWEST = 0.05
# The number of clients is estimated as the highest seen during this number of batches.
PEAK_BATCHES = 16
# The policy rests after PATIENCE answers without a hold: for REST answers it learns nothing and
# holds nothing. A decision costs 0.1 to 0.3 ms while caches are cold, in which a request waits and
# a worker idles. A rest doubles while no hold follows, up to LONGEST_REST: a second or so of
# batches of 4 ms.
PATIENCE = 16
REST, LONGEST_REST = 64, 256
# The timer's lateness is averaged over about 16 holds. Lateness above 5 ms is not the timer's (1 ms
# with epoll, whose timeout is in whole milliseconds): the event loop was blocked.
LATENESS_SHARE = 1 / 16
MOST_LATENESS = 0.005


class AdaptivePolicy(Policy):
    """Sends waiting requests at once, unless a hold for further arrivals is expected to pay.

    A hold lasts at most for `max_delay` and for a lone request's time, counted from the first
    moment at which a worker was free and requests waited. It ends before a waiting request would be
    late.

    Waiting pays where the callers of a batch send their next requests soon after it, and a batch
    has a high fixed cost: the greedy policy then sends the first requests that return, and the
    others wait for a second small batch. The derivation of the gain is in
    docs/decisions/0012-the-hold.md.
    """

    has_one_queue = True

    def __init__(self, max_delay: float | None) -> None:
        # False during a rest.
        self.learns = True
        self._is_holding = False
        # False until a batch has shown that there are more clients than workers, and in a rest.
        self.may_hold = False
        self._max_delay = inf if max_delay is None else max_delay
        # Arrivals after a batch, and after an arrival at an idle system.
        self._after_batch = ReturnCurve()
        self._after_idle = ReturnCurve()
        # Seconds of a lone request, as of the last batch.
        self._alone = 0.0
        # Requests that waited or ran when the recent batches ended.
        self._peaks: deque[int] = deque(maxlen=PEAK_BATCHES)
        # Answers since the last hold. Answers left in the present rest, and in all of the next one.
        self._without_hold = 0
        self._rest = 0
        self._next_rest = REST
        # Hard limit and currently planned end of a hold.
        self._limit = inf
        self._hold_until = inf
        # The earliest moment for another plan: a plan takes 20 us, and every arrival asks for one.
        self._next_plan = -inf
        # Seconds by which timers are late on average.
        self._lateness = 0.0

    def arrived(self, now: float, count: int, is_idle: bool) -> None:
        """Learn from the moment of an arrival."""
        self._after_batch.arrived(now, count)
        self._after_idle.arrived(now, count)
        if is_idle and self._alone and now - self._after_batch.last_at >= self._alone:
            # The first of requests that arrive together is the event; the others are returns.
            self._after_idle.begin(now, self._alone, 1)
            if count > 1:
                self._after_idle.arrived(now, count - 1)

    def batch_done(self, now: float, size: int, load: Load) -> None:
        """Learn that the callers of a batch have their answers and may send their next requests."""
        self._peaks.append(size + load.running + load.waiting)
        if load.service.is_known:
            self._alone = load.service.median(1)
            self._after_batch.begin(now, self._alone, size)
        # Otherwise each client could have a worker for itself, and no batch would become larger.
        self.may_hold = max(self._peaks) > load.workers
        self._without_hold += 1
        if self._without_hold == PATIENCE:
            self._begin_rest()

    def batch_skipped(self) -> None:
        """Learn again at the end of a rest; the next answered batch allows holds."""
        self._rest -= 1
        if not self._rest:
            self.learns = True

    def decide(self, now: float, queue: Queue, load: Load) -> Release | float:
        """Send now, or hold until the moment at which the expected gain is largest."""
        was_holding = self._is_holding
        if not self.may_hold:
            return Release.HOLD if was_holding else Release.IDLE
        if was_holding and now >= self._hold_until:
            late = min(now - self._hold_until, MOST_LATENESS)
            self._lateness += (late - self._lateness) * LATENESS_SHARE
        if was_holding and now < self._next_plan:
            # The plan is a moment old, and what has arrived since was expected.
            until = self._hold_until if self._room(load) > 0 else now
        else:
            until = self._plan(now, load)
            self._next_plan = now + self._alone / POINTS
        if until > now:
            seconds = load.service.high(load.waiting + 1)
            until = min(until, latest_start(queue.earliest_deadline(), seconds))
        if until > now:
            self._is_holding = True
            self._hold_until = until
            self._without_hold = 0
            self._next_rest = REST
            return until
        self._is_holding = False
        return Release.HOLD if was_holding else Release.IDLE

    def end_hold(self) -> None:
        """Forget the hold: its batch has left, is empty, or no worker is free any more."""
        self._is_holding = False

    def _begin_rest(self) -> None:
        self._without_hold = 0
        self._rest = self._next_rest
        self._next_rest = min(2 * self._next_rest, LONGEST_REST)
        self.learns = False
        self.may_hold = False
        # Lateness is measured during holds only. Halving it lets holds resume after a load that
        # made timers late.
        self._lateness /= 2
        self._after_batch.forget_open()
        self._after_idle.forget_open()

    def _plan(self, now: float, load: Load) -> float:
        """Return the end of the most profitable hold; `now` if no hold pays."""
        room = self._room(load)
        if room <= 0 or not load.service.is_known:
            return now
        alone = self._alone
        is_after_batch = now - self._after_batch.last_at < alone
        curve = self._after_batch if is_after_batch else self._after_idle
        if now - curve.last_at >= alone:
            return now
        if not self._is_holding:
            self._limit = now + min(self._max_delay, alone)
        if now >= self._limit or curve.count < ENOUGH:
            return now
        part = alone / POINTS
        # Rounding may put the last moment before the end of the last part into the next one.
        since = min((now - curve.last_at) / part, POINTS - 1e-9)
        # Includes requests that find the batch full and join the next one.
        most = self._absent(load)
        expected = [min(returns, most) for returns in curve.expected(since, curve.last_size)]
        if expected[-1] <= FEWEST:
            return now
        first = curve.last_at + (int(since) + 1) * part
        return _best_moment(now, first, part, self._limit, expected, self._lateness, load)

    def _room(self, load: Load) -> int:
        """Return the estimated number of requests that can still join the batch."""
        return min(load.max_batch_size - load.waiting, self._absent(load))

    def _absent(self, load: Load) -> int:
        """Return the estimated number of clients without a waiting or running request."""
        return max(self._peaks, default=0) - load.running - load.waiting


def _best_moment(
    now: float,
    first: float,
    part: float,
    limit: float,
    expected: list[float],
    lateness: float,
    load: Load,
) -> float:
    """Return the moment at which the gain of waiting is largest; `now` if it is too small."""
    # Most sizes below are means: at one just below a step, half of the batches are above it.
    median = load.service.median_between
    waiting, most = load.waiting, load.max_batch_size
    # A request without room in the second batch either waits as long with a hold as without one.
    total = min(expected[-1], float(most))
    everyone = waiting + total
    time_now = median(waiting)
    time_others = median(max(total, 1.0))
    least = LEAST_GAIN * median(1)
    best, best_moment = 0.0, now
    for number, returns in enumerate(expected):
        returns = min(returns, float(most - waiting))
        moment = first + number * part
        if moment > limit:
            break
        if moment <= now or returns <= FEWEST:
            continue
        later = total - returns
        time_later = median(max(later, 1.0))
        time_held = moment - now + lateness + median(waiting + returns)
        gain = everyone * (time_now - time_held) + total * time_others - later * time_later
        # The next round begins sooner. A batch of less than one request is as rare as the request.
        sooner = time_now + min(total, 1.0) * time_others - time_held - min(later, 1.0) * time_later
        gain += everyone * sooner
        if gain > best and gain > least * (waiting + returns):
            best, best_moment = gain, moment
    return best_moment


# Batches' worth of time before a deadline at which a batch leaves: one in twenty takes longer than
# the quantile, and the way to the worker takes time, too.
SAFETY = 2


class OwnPolicy(Policy):
    """Asks a rule of the user's; `max_delay` and the earliest deadline limit its holds.

    Args:
        rule: The rule.
        max_delay: Longest hold from the arrival of the oldest request, infinite for no limit.
        report: Takes an error that the rule has raised.
    """

    # It learns nothing itself: the service model observes the batches while a policy learns.
    learns = True

    def __init__(
        self, rule: BatchPolicy, max_delay: float, report: Callable[[BaseException], None]
    ) -> None:
        self._rule = rule
        self._max_delay = max_delay
        self._report = report

    def decide(self, now: float, queue: Queue, load: Load) -> Release | float:
        """Hold the batch as long as the rule says, but not beyond the limits.

        Before a batch was measured none is held: the limit before a deadline would be unknown.
        """
        if not load.service.is_known:
            return Release.IDLE
        oldest = queue.oldest()
        assert oldest is not None, "the scheduler asks only while requests wait"
        # Each of several queues has its own hold, which ends with its oldest request.
        held_until = oldest.held_until
        if held_until is not None and now >= held_until:
            return Release.HOLD
        until_target = target_of(oldest) - now
        sizes = load.waiting, load.max_batch_size
        waited = now - oldest.arrival
        summary = QueueSummary(*sizes, waited, until_target, load.running, load.workers)
        try:
            seconds = float(self._rule.hold(summary, load.service))
        except BaseException as error:  # noqa: BLE001  the user's function
            self._report(error)
            seconds = 0.0
        if not seconds > 0:  # also for NaN
            return Release.IDLE if held_until is None else Release.HOLD
        until = min(now + seconds, oldest.arrival + self._max_delay)
        if until <= now:
            return Release.WINDOW
        latest = latest_start(queue.earliest_deadline(), SAFETY * load.service.high(load.waiting))
        if latest <= now:
            return Release.DEADLINE
        oldest.held_until = min(until, latest)
        return oldest.held_until


def make_policy(
    name: str | BatchPolicy,
    max_delay: float | None,
    report: Callable[[BaseException], None] | None = None,
) -> Policy:
    """Make the policy of this name, or for a rule of the user's, whose errors are reported."""
    if not isinstance(name, str):
        return OwnPolicy(name, inf if max_delay is None else max_delay, report or _raise)
    if name == "fixed":
        return FixedPolicy(inf if max_delay is None else max_delay)
    if name == "greedy" or max_delay == 0:
        return GreedyPolicy()
    return AdaptivePolicy(max_delay)


def _raise(error: BaseException) -> NoReturn:
    raise error
