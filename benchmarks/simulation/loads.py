"""Arrivals and lengths of requests in virtual time. No process, no clock.

Open loops and independent arrivals are those of `fast_batcher/_cli/simulation.py`.

All draws depend on the seed alone, so every system meets the same arrivals (open loop), or every
client has the same pauses in the same order (closed loop).
"""

from collections.abc import Callable, Iterable
from heapq import heapify, heappop, heappush
from math import inf, log
from random import Random

from fast_batcher._cli.simulation import Arrivals

# The bursty load: shares of the capacity that arrive in and between bursts, and their mean lengths,
# seconds; 0.6 of the capacity in the mean. No system can serve a peak of 1.9 in time, so what
# matters is which requests are answered.
PEAK, CALM = 1.9, 0.4
PEAK_SECONDS, CALM_SECONDS = 0.5, 3.25

# Clients beside the one that floods.
FLOODED = 9

# The names of two methods of one model.
RARE, FREQUENT = "rare", "frequent"


def short_pause(random: Random) -> float:
    """Draw a client's pause between an answer and its next request: 0.1 to 1.1 ms, in seconds.

    Short beside the gpu model's time, where waiting for the clients to return pays.
    """
    return random.uniform(0.1e-3, 1.1e-3)


class ClosedLoop(Arrivals):
    """Clients that ask again a pause after their answer.

    Args:
        clients: How many.
        draw: One pause in seconds, from a client's own random numbers.
        seed: Of all of them.
    """

    def __init__(self, clients: int, draw: Callable[[Random], float], seed: int) -> None:
        super().__init__(())
        self._draw = draw
        self._randoms = [Random(f"{seed} {client}") for client in range(clients)]
        self._heap = [(draw(random), client) for client, random in enumerate(self._randoms)]
        heapify(self._heap)
        self.next_at = self._heap[0][0]

    def pop(self) -> int:
        """Take the next arrival and return its client."""
        client = heappop(self._heap)[1]
        self.next_at = self._heap[0][0] if self._heap else inf
        return client

    def settled(self, now: float, client: int) -> None:
        """Draw when this client asks again."""
        moment = now + self._draw(self._randoms[client])
        heappush(self._heap, (moment, client))
        self.next_at = self._heap[0][0]


class Flood(ClosedLoop):
    """Clients that ask again, and one more that floods the queue.

    Args:
        in_flight: Requests of each of the clients, which ask again a pause after each answer.
        moments: Rising, the arrivals of the one that floods.
        seed: Of the pauses.
    """

    def __init__(self, in_flight: int, moments: Iterable[float], seed: int) -> None:
        super().__init__(FLOODED * in_flight, short_pause, seed)
        self._in_flight = in_flight
        self._moments = iter(moments)
        self._flood_at = next(self._moments, inf)
        self._calm_at = self.next_at
        # The client of each request, by its number; FLOODED is the one that floods.
        self.clients: list[int] = []
        self._set_next()

    def pop(self) -> int:
        """Take the next arrival and return its number among those in flight."""
        if self._flood_at < self._calm_at:
            self._flood_at, number = next(self._moments, inf), FLOODED * self._in_flight
        else:
            number = super().pop()
            self._calm_at = self.next_at
        self.clients.append(number // self._in_flight)
        self._set_next()
        return number

    def settled(self, now: float, client: int) -> None:
        """Draw when this client asks again; the one that floods does not wait for answers."""
        if client < FLOODED * self._in_flight:
            super().settled(now, client)
            self._calm_at = self.next_at
            self._set_next()

    def _set_next(self) -> None:
        self.next_at = min(self._calm_at, self._flood_at)


def bursty(capacity: float, seconds: float, seed: int) -> list[float]:
    """Draw a Markov-modulated Poisson process of two states: PEAK and CALM times the capacity."""
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
        # The next gap is drawn at the next state's rate: exponential gaps have no memory.
        now, is_peak = end, not is_peak
    return moments


def draw_methods(count: int, rare_share: float, seed: int) -> list[str]:
    """Draw which of two methods each of `count` requests calls, RARE or FREQUENT.

    Of Poisson arrivals each method then gets Poisson arrivals, which do not depend on the other's.
    """
    random = Random(f"methods {seed}")
    return [RARE if random.random() < rare_share else FREQUENT for _ in range(count)]


def draw_lengths(kind: str, count: int, most: int, seed: int) -> list[float]:
    """Draw the lengths of `count` texts, 4 to `most` tokens.

    Args:
        kind: "uniform", "log-normal" (a median of 60 and a long tail), or "two kinds" (four of five
            are queries of 10 to 30 tokens, the others documents of more than half of the most).
        count: How many.
        most: Tokens.
        seed: Of the draws.
    """
    random = Random(f"lengths {seed}")

    def draw() -> int:
        if kind == "uniform":
            return random.randint(8, most)
        if kind == "log-normal":
            return min(most, max(4, round(random.lognormvariate(log(60), 1.0))))
        return random.randint(10, 30) if random.random() < 0.8 else random.randint(most // 2, most)

    return [float(draw()) for _ in range(count)]


def log_normal_costs(count: int, sigma: float, seed: int) -> list[float]:
    """Draw `count` costs whose mean is 1 and whose logarithm deviates by `sigma`."""
    random = Random(f"costs {seed}")
    return [random.lognormvariate(-sigma * sigma / 2, sigma) for _ in range(count)]
