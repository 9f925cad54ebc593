"""A model that answers in steps, the lengths of its answers, and its ideal; standard library."""

import heapq
import mmap
import time
from collections import deque
from pathlib import Path
from random import Random
from typing import NamedTuple

# Chunks of the shortest, the longest and the average answer.
SHORTEST, LONGEST, MEAN = 4, 64, 20
# Streams that run at a time.
PLACES = 32


class StepTime(NamedTuple):
    """The seconds of a step."""

    fixed: float
    # For each live stream.
    each: float

    def of(self, live: float) -> float:
        """Return the seconds of a step of so many streams."""
        return self.fixed + self.each * live


# By the names that a `Load` gives.
STEP_TIMES = {"Steps": StepTime(0.010, 0.0005), "QuickSteps": StepTime(0.001, 0.0)}


class StepCount:
    """Steps so far and the chunks of all of them, in a file of 16 bytes that processes map."""

    SIZE = 16

    def __init__(self, path: str) -> None:
        with Path(path).open("r+b") as file:
            self._numbers = memoryview(mmap.mmap(file.fileno(), self.SIZE)).cast("q")

    def add(self, live: int) -> None:
        """Count a step of so many streams."""
        self._numbers[0] += 1
        self._numbers[1] += live

    def read(self) -> tuple[int, int]:
        """Return the steps and the chunks."""
        return self._numbers[0], self._numbers[1]


class Stepper:
    """The model: a step computes nothing, it waits as for a GPU.

    Args:
        name: In `STEP_TIMES`.
        path: Of the `StepCount`.
    """

    def __init__(self, name: str, path: str) -> None:
        self._time = STEP_TIMES[name]
        self._count = StepCount(path)

    def step(self, live: int) -> None:
        """Take the time of a step, and count it."""
        time.sleep(self._time.of(live))
        self._count.add(live)


def draw_length(random: Random) -> int:
    """Draw the length of an answer: geometric, cut off."""
    length = SHORTEST
    while length < LONGEST and random.random() > 1 / (MEAN - SHORTEST + 1):
        length += 1
    return length


def draw_arrivals(rate: float, seconds: float, seed: int) -> list[tuple[float, int]]:
    """Draw the moments and lengths of a Poisson process."""
    random = Random(seed)
    arrivals = []
    moment = random.expovariate(rate)
    while moment < seconds:
        arrivals.append((moment, draw_length(random)))
        moment += random.expovariate(rate)
    return arrivals


class IdealStream(NamedTuple):
    """A stream of the simulation."""

    arrived_at: float
    length: int
    # The step that has given its first chunk.
    joined: int


class IdealRun:
    """A simulated run: streams join at each boundary of a step, at no cost but the model's.

    Args:
        step_time: The model's.
        clients: Of a closed loop; 0 for an open one.
        seed: Of the lengths that the clients ask for.
    """

    def __init__(self, step_time: StepTime, clients: int, seed: int) -> None:
        self._step_time = step_time
        self._clients = clients
        self._random = Random(seed)
        # Moments and lengths, a heap.
        self.coming = [(0.0, draw_length(self._random)) for _ in range(clients)]
        self._waiting: deque[tuple[float, int]] = deque()
        self._live: list[IdealStream] = []
        # Virtual seconds, and the steps, chunks and whole answers in them.
        self.seconds = 0.0
        self.steps = self.chunks = self.answers = 0
        # For each stream the moment of its arrival, and the seconds to its first chunk.
        self.firsts: list[tuple[float, float]] = []

    def step(self) -> bool:
        """Let streams join, and take a step; False if no stream is left."""
        if not (self._live or self._waiting):
            if not self.coming:
                return False
            self.seconds = max(self.seconds, self.coming[0][0])
        while self.coming and self.coming[0][0] <= self.seconds:
            self._waiting.append(heapq.heappop(self.coming))
        joining = min(PLACES - len(self._live), len(self._waiting))
        self.steps += 1
        joined = [IdealStream(*self._waiting.popleft(), self.steps) for _ in range(joining)]
        self._live += joined
        self.seconds += self._step_time.of(len(self._live))
        self.chunks += len(self._live)
        self.firsts += [(one.arrived_at, self.seconds - one.arrived_at) for one in joined]
        running = [one for one in self._live if self.steps - one.joined + 1 < one.length]
        ended = len(self._live) - len(running)
        self._live = running
        self.answers += ended
        for _ in range(ended if self._clients else 0):
            heapq.heappush(self.coming, (self.seconds, draw_length(self._random)))
        return True


def simulate_clients(step_time: StepTime, clients: int, seconds: float, seed: int) -> IdealRun:
    """Simulate a closed loop for so many virtual seconds."""
    run = IdealRun(step_time, clients, seed)
    while run.seconds < seconds:
        run.step()
    return run


def simulate_arrivals(step_time: StepTime, rate: float, seconds: float, seed: int) -> IdealRun:
    """Simulate the arrivals of so many virtual seconds until the last stream has ended."""
    run = IdealRun(step_time, 0, seed)
    run.coming = draw_arrivals(rate, seconds, seed)
    while run.step():
        pass
    return run
