"""A service in virtual time around a real scheduler: arrivals in, what became of each out.

The shell's loop without a shell: apply the event, poll, do the actions, go on to the next moment.
"""

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from math import inf

from fast_batcher._core.messages import Batch, Dispatch, Expire, Request
from fast_batcher._core.scheduler import Scheduler

# From the requests of a batch and its number to the seconds that it takes.
Work = Callable[[list[Request], int], float]


@dataclass
class Outcomes:
    """What became of the requests of one run."""

    # Seconds from arrival to answer, by the arrival.
    answered: list[tuple[float, float]] = field(default_factory=list)
    # Seconds from arrival to the refusal: 0.0 at the door.
    rejected: list[tuple[float, float]] = field(default_factory=list)
    # When each batch was answered, by its number.
    done_at: dict[int, float] = field(default_factory=dict)

    def count_within(self, seconds: float, since: float = 0.0) -> int:
        """Requests that arrived from then on and were answered in time."""
        return sum(took <= seconds for arrival, took in self.answered if arrival >= since)


def poisson(rate: float, until: float, seed: int, since: float = 0.0) -> list[float]:
    """Moments of arrival, so many per second on average."""
    chance = random.Random(seed)
    moments = []
    now = since + chance.expovariate(rate)
    while now < until:
        moments.append(now)
        now += chance.expovariate(rate)
    return moments


def serve(  # noqa: C901  the one loop, flat on purpose
    scheduler: Scheduler,
    arrivals: Iterable[tuple[float, Request]],
    work: Work,
) -> Outcomes:
    """Serve all arrivals, and what waits when they are over.

    Args:
        scheduler: Its workers are ready.
        arrivals: Moments, rising, with what arrives.
        work: How long each batch takes.
    """
    outcomes = Outcomes()
    order = count()
    events: list[tuple[float, int, Request | Batch | None]] = [
        (moment, next(order), request) for moment, request in arrivals
    ]
    # When each worker is free: its batches run one after the other.
    free_at: dict[int, float] = {}
    wake_at = inf
    while events or wake_at < inf:
        now, event = wake_at, None
        if events and events[0][0] <= wake_at:
            now, _, event = heappop(events)
        if isinstance(event, Request):
            if scheduler.submit(now, [event]):
                outcomes.rejected.append((now, 0.0))
        elif event is not None:
            assert scheduler.batch_done(now, event.worker, event.id) is event
            for request in event.requests:
                if not request.is_settled:
                    request.is_settled = True
                    scheduler.counters.completed += 1
                    outcomes.answered.append((request.arrival, now - request.arrival))
        actions, next_wake = scheduler.poll(now)
        wake_at = inf if next_wake is None else next_wake
        for action in actions:
            if isinstance(action, Expire):
                request = action.request
                outcomes.rejected.append((request.arrival, now - request.arrival))
            elif isinstance(action, Dispatch):
                batch = action.batch
                seconds = work(batch.requests, batch.id)
                done_at = max(now, free_at.get(batch.worker, now)) + seconds
                free_at[batch.worker] = done_at
                heappush(events, (done_at, next(order), batch))
                outcomes.done_at[batch.id] = done_at
    return outcomes
