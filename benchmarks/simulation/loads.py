"""Who asks, and when: open and closed loops in virtual time. No process, no clock.

All draws come from a seed and belong to the load alone, so every system meets the same arrivals
(open loop), or every client has the same pauses in the same order (closed loop).
"""

from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush
from math import inf
from random import Random
from typing import Protocol

# Of the bursty load: the share of capacity that comes in and between bursts, and for how many
# seconds on average. 0.6 of capacity in the mean, which leaves a batcher with no target at all
# nothing to do but to choose whom to answer: no system can serve a peak of 1.9 in time.
PEAK, CALM = 1.9, 0.4
PEAK_SECONDS, CALM_SECONDS = 0.5, 3.25


def short_pause(random: Random) -> float:
    """Of a client between an answer and its next request, uniform from 0.1 to 1.1 ms; seconds.

    Chosen so that greedy and a 1 ms window answer 32 clients of the gpu model about as often as in
    the project's policy notes, which do not say what theirs was.
    """
    return random.uniform(0.1e-3, 1.1e-3)


class Load(Protocol):
    """What arrives next. A client is a number, of no meaning in an open loop."""

    # The next arrival's moment, infinite if none is known.
    next_at: float

    def pop(self) -> int:
        """The client of the next arrival, which is then in the past."""

    def settled(self, now: float, client: int) -> None:
        """This client has its answer or refusal."""


class OpenLoop:
    """Requests that come when they come.

    Args:
        moments: Rising, seconds.
    """

    def __init__(self, moments: Sequence[float]) -> None:
        self._moments = moments
        self._next = 0
        self.next_at = moments[0] if moments else inf

    def pop(self) -> int:
        """Nobody in particular."""
        self._next += 1
        self.next_at = self._moments[self._next] if self._next < len(self._moments) else inf
        return 0

    def settled(self, now: float, client: int) -> None:
        """Nobody asks again for it."""


class ClosedLoop:
    """Clients that ask again a while after their answer.

    Args:
        clients: How many.
        draw: One pause in seconds, from a client's own random numbers.
        seed: Of all of them.
    """

    def __init__(self, clients: int, draw: Callable[[Random], float], seed: int) -> None:
        self._draw = draw
        self._randoms = [Random(f"{seed} {client}") for client in range(clients)]
        self._heap = [(draw(random), client) for client, random in enumerate(self._randoms)]
        heapify(self._heap)
        self.next_at = self._heap[0][0]

    def pop(self) -> int:
        """Who asks next."""
        client = heappop(self._heap)[1]
        self.next_at = self._heap[0][0] if self._heap else inf
        return client

    def settled(self, now: float, client: int) -> None:
        """It will ask again."""
        moment = now + self._draw(self._randoms[client])
        heappush(self._heap, (moment, client))
        self.next_at = self._heap[0][0]


def poisson(rate: float, seconds: float, seed: int) -> list[float]:
    """Arrivals of many independent people, in order.

    Args:
        rate: Per second.
        seconds: From 0 to then.
        seed: Of the gaps. At another rate the same gaps are stretched.
    """
    random = Random(f"poisson {seed}")
    moments = []
    now = random.expovariate(1.0) / rate
    while now < seconds:
        moments.append(now)
        now += random.expovariate(1.0) / rate
    return moments


def bursty(capacity: float, seconds: float, seed: int) -> list[float]:
    """A Markov-modulated Poisson process of two states: PEAK and CALM times the capacity."""
    random = Random(f"bursty {seed}")
    moments = []
    now, is_peak = 0.0, False
    while now < seconds:
        rate = capacity * (PEAK if is_peak else CALM)
        length = random.expovariate(1.0 / (PEAK_SECONDS if is_peak else CALM_SECONDS))
        end = min(now + length, seconds)
        now += random.expovariate(rate)
        while now < end:
            moments.append(now)
            now += random.expovariate(rate)
        # What had not come yet comes at the next state's rate: gaps have no memory.
        now, is_peak = end, not is_peak
    return moments


def stall_moments(every: float, seconds: float, seed: int) -> list[float]:
    """Moments at which something else holds up the worker, on average `every` so many seconds."""
    return poisson(1.0 / every, seconds, seed + 1_000_000)


def log_normal_costs(count: int, sigma: float, seed: int) -> list[float]:
    """Costs of `count` requests whose mean is 1 and whose logarithm deviates by `sigma`."""
    random = Random(f"costs {seed}")
    return [random.lognormvariate(-sigma * sigma / 2, sigma) for _ in range(count)]
