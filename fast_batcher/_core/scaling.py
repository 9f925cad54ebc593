"""Scaling: the number of workers of a batcher whose `num_workers` is a range. Pure.

The shell measures the load each `SCALING_INTERVAL` seconds, and `Scaling.decide` returns a new
number of workers, or None. The signal is the predicted backlog: the seconds in which the ready
workers answer everything that waits and runs. The share of the time in which workers are busy is
none: the adaptive policy keeps them busy with smaller batches at half of the capacity.

    up     as soon as the backlog has stayed above a target for `PATIENCE`, by as many workers as
           the arrivals need; workers that still load count as present
    down   by one worker, each time the load has been low for `QUIET`, and the remaining workers
           have places for the live streams or sessions, and for one more

Streams that run keep no caller waiting: without a stream in the queue, the backlog counts as 0.
"""

from collections import deque
from math import ceil, inf
from typing import Final, NamedTuple

from fast_batcher._core.explanation import HIGH_LOAD
from fast_batcher.stats import number

# Seconds between two measurements: a quarter of `PATIENCE`.
SCALING_INTERVAL: Final = 0.5
# A measurement later than this many seconds shows that this process itself was stopped or blocked:
# requests have piled up meanwhile, and the observation starts again.
LATENESS: Final = 1.0
# Seconds for which the backlog must stay above its target. A shorter burst is over before a further
# worker has loaded its model, which takes a second at least.
PATIENCE: Final = 2.0
# Target of the backlog in seconds without a `max_latency`: a delay that a person notices, and no
# longer than the fastest start of a worker.
DEFAULT_TARGET: Final = 1.0
# Target of the backlog as a share of `max_latency`. It is below 1, because admission rejects
# requests that would take longer: the backlog cannot reach all of `max_latency`.
SHARE_OF_LATENCY: Final = 0.5
# The target is at least the time of this many full batches: a busy worker has one batch that runs
# and one behind it, also if nothing waits in the queue.
BATCHES_OF_BUSY_WORKER: Final = 2.0
# Seconds after a rejection for which the batcher counts as overloaded: two measurements.
REJECTION_MEMORY: Final = 1.0
# Highest load of the remaining workers at which one ends. Below `HIGH_LOAD` by more than the noise
# of the rate, so that no worker ends which the same load would start again.
LOW_LOAD: Final = 0.5
# Seconds of low load before a worker ends. A further start takes up to minutes, and load that comes
# back within minutes finds its workers.
QUIET: Final = 120.0
# Seconds over which the rate of arrivals is averaged: enough that chance moves it by less than a
# third at one request per second and worker.
RATE_WINDOW: Final = 10.0
# A backlog that shrinks below this share of itself within `PATIENCE` needs no further worker.
SHRINKING: Final = 0.9


class WorkerLoad(NamedTuple):
    """The load of a batcher at one moment."""

    # Target number of workers; number of ready workers; and whether another worker loads its
    # model or is about to be started.
    wanted: int
    ready: int
    is_loading: bool
    # Whether the restarts of a worker are spent: it neither is ready nor loads.
    is_failing: bool
    # Requests that have arrived so far, rejected ones included; and requests that were rejected
    # because the queue was full or the answer would have been late.
    arrived: int
    rejected: int
    # Predicted seconds in which the ready workers answer everything; None if unknown.
    backlog: float | None
    # Predicted seconds of a full batch, and its requests; None if unknown.
    full_batch: tuple[float, int] | None
    # Workers that have places for the live streams or sessions, and for one more.
    needed: int = 1


class ScalingDecision(NamedTuple):
    """A new number of workers, and the reason for the log."""

    workers: int
    reason: str


class Scaling:
    """Decides how many workers a batcher should have."""

    def __init__(self, fewest: int, most: int, max_latency: float | None) -> None:
        self._fewest = fewest
        self._most = most
        self._target = DEFAULT_TARGET if max_latency is None else SHARE_OF_LATENCY * max_latency
        # Moments and `arrived` of the measurements in `RATE_WINDOW`, and of the one before.
        self._arrivals: deque[tuple[float, int]] = deque()
        # Start of the current overload; None without an overload.
        self._overloaded_since: float | None = None
        # The moment and the backlog of the last look at an overload.
        self._looked_at, self._backlog_then = 0.0, 0.0
        self._rejected = 0
        self._rejected_at = -inf
        # Start of the current time of low load; None if the load is not low.
        self._quiet_since: float | None = None

    def decide(self, now: float, load: WorkerLoad) -> ScalingDecision | None:
        """Return another number of workers if it is time for it.

        Called each `SCALING_INTERVAL` seconds while the batcher is open.
        """
        self._note(now, load)
        if not load.ready:
            # All workers are lost, and are being restarted: more workers would be lost, too.
            self._overloaded_since = self._quiet_since = None
            return None
        seconds, size = load.full_batch or (0.0, 0)
        backlog = load.backlog or 0.0
        is_rejecting = now - self._rejected_at < REJECTION_MEMORY
        target = max(self._target, BATCHES_OF_BUSY_WORKER * seconds)
        # Requests per second of one worker.
        capacity = size / seconds if seconds else None
        if backlog > target or is_rejecting:
            self._quiet_since = None
            return self._decide_up(now, load, capacity, is_rejecting=is_rejecting)
        self._overloaded_since = None
        return self._decide_down(now, load, capacity)

    def _note(self, now: float, load: WorkerLoad) -> None:
        """Keep the measurement; forget the earlier ones if it is late."""
        if not self._arrivals:
            self._rejected = load.rejected
        elif now > self._arrivals[-1][0] + SCALING_INTERVAL + LATENESS:
            self._arrivals.clear()
            self._overloaded_since = self._quiet_since = None
            self._rejected = load.rejected
        if load.rejected > self._rejected:
            self._rejected, self._rejected_at = load.rejected, now
        self._arrivals.append((now, load.arrived))
        while len(self._arrivals) > 2 and self._arrivals[1][0] <= now - RATE_WINDOW:
            self._arrivals.popleft()

    def _rate(self, since: float = -inf) -> float:
        """Return the arrivals per second since a moment in `RATE_WINDOW`."""
        now, arrived = self._arrivals[-1]
        then, before = next(sample for sample in self._arrivals if sample[0] >= since)
        return (arrived - before) / (now - then) if now > then else 0.0

    def _decide_up(
        self, now: float, load: WorkerLoad, capacity: float | None, *, is_rejecting: bool
    ) -> ScalingDecision | None:
        backlog = load.backlog or 0.0
        if self._overloaded_since is None:
            self._overloaded_since = self._looked_at = now
            self._backlog_then = backlog
        # If one worker cannot start, perhaps for lack of memory, further workers would fail, too.
        if now - self._looked_at < PATIENCE or capacity is None or load.is_failing:
            return None
        rate = self._rate(since=self._overloaded_since)
        # The rest of the workers' capacity reduces the backlog.
        needed = ceil(rate / (HIGH_LOAD * capacity))
        is_shrinking = not is_rejecting and backlog < SHRINKING * self._backlog_then
        if not (load.is_loading or is_shrinking):
            # The present workers are not enough, whatever is predicted.
            needed = max(needed, load.wanted + 1)
        self._looked_at, self._backlog_then = now, backlog
        count = min(needed, self._most)
        if count <= load.wanted:
            return None
        cause = "requests are rejected" if is_rejecting else f"the backlog is {backlog:.3g} seconds"
        return ScalingDecision(
            count,
            f"{cause}; {number(rate)} requests/s arrive, a worker answers {number(capacity)}",
        )

    def _decide_down(
        self, now: float, load: WorkerLoad, capacity: float | None
    ) -> ScalingDecision | None:
        rate, rest = self._rate(), load.wanted - 1
        is_low = rate <= LOW_LOAD * (capacity or 0.0) * rest
        if load.is_loading or rest < max(self._fewest, load.needed) or not is_low:
            self._quiet_since = None
            return None
        if self._quiet_since is None:
            self._quiet_since = now
        if now - self._quiet_since < QUIET:
            return None
        self._quiet_since = now
        return ScalingDecision(
            rest,
            f"for {QUIET:.0f} seconds fewer workers could have answered twice as many requests; "
            f"{number(rate)} per second arrive now",
        )
