"""A model that answers in steps, its arrivals and their lengths; standard library only."""

import mmap
import time
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
