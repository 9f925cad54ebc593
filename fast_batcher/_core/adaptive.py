"""The adaptive policy: greedy, with two exceptions that need evidence. Pure; the scheduler asks it.

To wait pays where the callers of a batch come back soon after it and a batch costs much by itself:
greedy then sends those who are back, and the others wait for a second small batch. The derivation
of the gain is in docs/decisions/0012-the-hold.md.

To leave some of those that wait behind pays where a batch costs little by itself: `BatchSizes`.
"""

from collections import deque
from math import inf

from fast_batcher._core.batch_sizes import BatchSizes
from fast_batcher._core.load import Load
from fast_batcher._core.messages import Release
from fast_batcher._core.request_queue import RequestQueue
from fast_batcher._core.return_curve import ENOUGH, POINTS, ReturnCurve

# A hold must be worth this share of a lone request's time for everyone it concerns; less is within
# the noise of what has been learned.
LEAST_GAIN = 0.05
# Fewer expected arrivals than this are not worth looking at.
FEWEST = 0.05
# Clients at once: the most during this many batches.
PEAK_BATCHES = 16
# After this many answers without a hold none is thought of for so many more: a decision costs
# 0.1 to 0.3 ms while caches are cold, while a request waits and a worker idles.
# The rest doubles while nothing comes of it, up to a second or so of batches of 4 ms.
PATIENCE = 16
REST, LONGEST_REST = 64, 256
# The timer's lateness is averaged over about 16 holds; what is later than 5 ms is no lateness of a
# timer (1 ms with epoll, whose timeout is in whole milliseconds) but a loop that was blocked.
LATENESS_SHARE = 1 / 16
MOST_LATENESS = 0.005
# Of arrivals per second: a new count's share of the average; one is made at every rest.
RATE_SHARE = 1 / 4


class AdaptivePolicy:
    """Sends what waits at once, unless more is known to come soon and to be worth the wait.

    And all of it, unless the answers are known to come sooner in smaller batches.

    A hold lasts no longer than `max_delay` and a lone request's time, counted from the first moment
    at which a worker was free and requests waited; and never beyond the moment at which a waiting
    request would be late.

    Args:
        max_delay: The bound in seconds, or None.
    """

    def __init__(self, max_delay: float | None) -> None:
        self.learns = True
        # Until a batch has shown that there are more clients than workers.
        self.is_greedy = True
        self.is_holding = False
        self.rest = 0
        self._max_delay = inf if max_delay is None else max_delay
        # After a batch, and after an arrival at an idle system; each with its last event's moment
        # and size.
        self._after_batch = ReturnCurve()
        self._after_idle = ReturnCurve()
        self._last_batch, self._last_size = -inf, 1
        self._last_idle = -inf
        # Seconds of a lone request, as they were at the last batch.
        self._alone = 0.0
        self._peaks: deque[int] = deque(maxlen=PEAK_BATCHES)
        self._in_vain = 0
        self._next_rest = REST
        # Of a hold: when it must be over, and until when it is to last as far as is known.
        self._limit = inf
        self._hold_until = inf
        # No new plan before this moment: one takes 20 us, and every arrival asks for one.
        self._next_plan = -inf
        self._lateness = 0.0
        self.sizes: BatchSizes | None = None
        # When they were worked out last, how many requests had come by then, and the average of
        # those that come per second.
        self._sized_at, self._submitted, self._rate = -inf, 0, 0.0

    def arrived(self, now: float, count: int, is_idle: bool) -> None:
        """Learn when requests come."""
        self._after_batch.arrived(now, count)
        self._after_idle.arrived(now, count)
        if is_idle and self._alone and now - self._last_batch >= self._alone:
            # Those that come together are one event and its first returns.
            self._after_idle.begin(now, self._alone, 1)
            if count > 1:
                self._after_idle.arrived(now, count - 1)
            self._last_idle = now

    def batch_done(self, now: float, size: int, load: Load) -> None:
        """Learn that so many callers have their answers, and may come back."""
        self._peaks.append(size + load.running + load.waiting)
        self._last_batch, self._last_size = now, size
        if load.service.is_known:
            self._alone = load.service.median(1)
            self._after_batch.begin(now, self._alone, size)
        # Each client could have a worker of its own: there is nobody to wait for.
        self.is_greedy = max(self._peaks) <= load.workers
        self._in_vain += 1
        if self._in_vain == PATIENCE:
            self._find_sizes(now, load)
            self._begin_rest()

    def decide(self, now: float, queue: RequestQueue, load: Load) -> Release | float:
        """Send now, or hold until the moment at which the expected gain is largest."""
        was_holding = self.is_holding
        if was_holding and now >= self._hold_until:
            late = min(now - self._hold_until, MOST_LATENESS)
            self._lateness += (late - self._lateness) * LATENESS_SHARE
        if was_holding and now < self._next_plan:
            # Planned a moment ago; what has come since had been expected.
            until = self._hold_until if self._room(load) > 0 else now
        else:
            until = self._plan(now, load)
            self._next_plan = now + self._alone / POINTS
        if until > now:
            until = min(until, queue.earliest_deadline() - load.service.high(load.waiting + 1))
        if until > now:
            self.is_holding = True
            # Where it is worth waiting for more, nobody is left behind.
            self.sizes = None
            self._hold_until = until
            self._in_vain = 0
            self._next_rest = REST
            return until
        self.is_holding = False
        return Release.HOLD if was_holding else Release.IDLE

    def end_hold(self) -> None:
        """What was held has left or is gone, or no worker is free any more."""
        self.is_holding = False

    def end_rest(self) -> None:
        """Learn again, and decide from the next batch on if there are enough clients."""
        self.learns = True

    def _begin_rest(self) -> None:
        self._in_vain = 0
        self.rest = self._next_rest
        self._next_rest = min(2 * self._next_rest, LONGEST_REST)
        self.learns = False
        self.is_greedy = True
        # What was late under a load that has gone must not forbid holds for ever: without a hold
        # nobody would notice.
        self._lateness /= 2
        self._after_batch.forget_open()
        self._after_idle.forget_open()
        self._last_batch = self._last_idle = -inf

    def _find_sizes(self, now: float, load: Load) -> None:
        """How many of those that wait are sent until the next rest: all, unless enough is known."""
        seconds, count = now - self._sized_at, load.submitted - self._submitted
        self._sized_at, self._submitted = now, load.submitted
        self.sizes = None
        if seconds <= 0 or seconds == inf:
            return
        rate = count / seconds
        self._rate += (rate - self._rate) * (RATE_SHARE if self._rate else 1.0)
        known = load.service.costs()
        # Several workers share the queue, which the formula knows nothing of.
        if known is not None and load.workers == 1:
            costs, smallest = known
            # If more come than before, believe it at once: that leads to larger batches.
            self.sizes = BatchSizes(costs, max(self._rate, rate), smallest)

    def _plan(self, now: float, load: Load) -> float:
        """The moment until which to wait for the largest gain; `now` if there is none."""
        room = self._room(load)
        if room <= 0 or not load.service.is_known:
            return now
        alone = self._alone
        if now - self._last_batch < alone:
            curve, origin, size = self._after_batch, self._last_batch, self._last_size
        elif now - self._last_idle < alone:
            curve, origin, size = self._after_idle, self._last_idle, 1
        else:
            return now
        if not self.is_holding:
            self._limit = now + min(self._max_delay, alone)
        if now >= self._limit or curve.count < ENOUGH:
            return now
        part = alone / POINTS
        # Rounding may put the last moment before the end of the last part into the next one.
        since = min((now - origin) / part, POINTS - 1e-9)
        # Those who wait for the batch after this one are among them: more than find room in it.
        most = self._absent(load)
        expected = [min(returns, most) for returns in curve.expected(since, size)]
        if expected[-1] <= FEWEST:
            return now
        first = origin + (int(since) + 1) * part
        return _best_moment(now, first, part, self._limit, expected, self._lateness, load)

    def _room(self, load: Load) -> int:
        """How many more could come into the batch, as far as is known."""
        return min(load.max_batch_size - load.waiting, self._absent(load))

    def _absent(self, load: Load) -> int:
        """How many clients neither wait nor have a worker, as far as is known."""
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
    """The moment at which the gain of having waited is largest; `now` if it is too small.

    Args:
        now: The moment of the decision.
        first: The end of the present part of the curve, seconds.
        part: Seconds from there to the next one.
        limit: No moment after this one.
        expected: Requests that come until the end of each part, from the present one on, those
            included for whom the batch has no room.
        lateness: Seconds by which timers are late.
        load: What waits and how long batches take.
    """
    median = load.service.median
    waiting, most = load.waiting, load.max_batch_size
    # Who finds no room in the second batch either waits for it as long, held or not.
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
        # And the next round begins sooner. A batch of less than one is as rare as that request.
        sooner = time_now + min(total, 1.0) * time_others - time_held - min(later, 1.0) * time_later
        gain += everyone * sooner
        if gain > best and gain > least * (waiting + returns):
            best, best_moment = gain, moment
    return best_moment
