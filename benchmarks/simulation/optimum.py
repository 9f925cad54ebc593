"""The exact optimum at Poisson arrivals, which no policy can exceed. No process, no clock.

A semi-Markov decision process. Its state is the number q of waiting requests when the worker is
free; its actions are to wait for the next arrival and to send n of them, 1 <= n <= min(q, B). Its
cost is the number of requests in the system, over time; by Little's law the mean of that divided by
the arrival rate is the mean latency. The gaps between arrivals have no memory, so a policy that
waits for a moment or remembers the past gains nothing.

The queue is cut at `states - 1`: arrivals above it are not counted. It is solved by Howard's policy
iteration, with the relative value of the empty queue as 0.

`most_in_time` is a bound for any arrivals, where only answers within a target count.
"""

from collections.abc import Iterable
from functools import lru_cache
from math import exp, lgamma, log, sqrt

import numpy as np
import numpy.typing as npt

from benchmarks.simulation.models import Model

Array = npt.NDArray[np.float64]
# Queue lengths that are told apart, in full batches, and at least. At 98 % load the optimum of half
# as many again is the same to 1e-6.
FULL_BATCHES, LEAST_STATES = 20, 600
# An action is changed only for a gain beyond rounding: relative to the value.
LEAST_GAIN = 1e-10
# Seconds by which sums of many parts may be off.
ROUNDING = 1e-9


class Optimum:
    """The optimal policy and its mean latency.

    Args:
        model: Of the batches.
        rate: Arrivals per second; below the model's capacity.
        states: Queue lengths that are told apart, from 0 on; more than `max_batch_size`.
    """

    def __init__(self, model: Model, rate: float, states: int) -> None:
        self._rate = rate
        self._most = model.max_batch_size
        self._states = states
        times = [model.seconds(size) for size in range(self._most + 1)]
        self._times = np.array(times, dtype=np.float64)
        self._arriving = [poisson_weights(rate * seconds) for seconds in self._times]
        # By queue length: how many to send, 0 to wait.
        self.sizes = np.minimum(np.arange(states), self._most)
        self.mean_seconds, values = self.evaluate(self.sizes)
        while True:
            sizes = self._improve(values)
            if np.array_equal(sizes, self.sizes):
                break
            self.sizes = sizes
            self.mean_seconds, values = self.evaluate(sizes)

    def evaluate(self, sizes: npt.NDArray[np.int64]) -> tuple[float, Array]:
        """Compute a policy's mean latency in seconds, and the relative value of each state.

        Args:
            sizes: By queue length, how many to send; 0 to wait. The longest queue must send.
        """
        states, last = self._states, self._states - 1
        moves = np.zeros((states, states))
        seconds = np.empty(states)
        costs = np.empty(states)
        for queue, size in enumerate(sizes):
            if size == 0:
                moves[queue, queue + 1] = 1.0
                seconds[queue] = 1.0 / self._rate
                costs[queue] = queue / self._rate
                continue
            weights = self._arriving[size]
            rest = queue - size
            inside = min(len(weights), last - rest)
            moves[queue, rest : rest + inside] = weights[:inside]
            moves[queue, last] += weights[inside:].sum()
            seconds[queue] = self._times[size]
            costs[queue] = self._cost(queue, size)
        system = np.eye(states) - moves
        # The value of state 0 is 0: its column is free for the unknown mean.
        system[:, 0] = seconds
        values = np.asarray(np.linalg.solve(system, costs), dtype=np.float64)
        mean_number = float(values[0])
        values[0] = 0.0
        return mean_number / self._rate, values

    def _cost(self, queue: int, size: int) -> float:
        """The waiting requests for the time of the batch, and the arrivals meanwhile."""
        seconds = float(self._times[size])
        return queue * seconds + self._rate * seconds * seconds / 2

    def _improve(self, values: Array) -> npt.NDArray[np.int64]:
        states, last = self._states, self._states - 1
        mean_number = self.mean_seconds * self._rate
        queues = np.arange(states)
        best = np.full(states, np.inf)
        # Waiting; not in the longest queue, which has no next one.
        best[:last] = (queues[:last] - mean_number) / self._rate + values[1:]
        # As long as it is no worse, what is done now stays: else rounding goes in circles.
        best[:last] -= np.where(self.sizes[:last] == 0, LEAST_GAIN * np.abs(best[:last]), 0.0)
        sizes = np.zeros(states, dtype=np.int64)
        for size in range(1, self._most + 1):
            weights = self._arriving[size]
            beyond = np.full(len(weights) - 1, values[last])
            expected = np.correlate(np.concatenate([values, beyond]), weights, "valid")
            seconds = self._times[size]
            cost = queues[size:] * seconds + self._rate * seconds * seconds / 2
            found = cost - mean_number * seconds + expected[: states - size]
            is_kept = self.sizes[size:] == size
            found = np.where(is_kept, found - LEAST_GAIN * np.abs(found), found)
            is_better = found < best[size:]
            best[size:][is_better] = found[is_better]
            sizes[size:][is_better] = size
        return sizes


def most_in_time(model: Model, moments: Iterable[float]) -> float:
    """Compute the largest share of requests that any policy can answer within the target.

    Even a policy that knew all arrivals beforehand, with a worker that never stalls: a batch of n
    takes n / capacity or longer, after its last request's arrival and before its first one's
    target. So each request needs 1 / capacity seconds of the worker between its own arrival and its
    own target. Of these equal jobs, whose targets are in the order of arrival, most are in time if
    they are done in that order and each job that would be late is left out.

    Args:
        model: Of the batches, with its target.
        moments: Of the arrivals, rising, at least one.
    """
    seconds = 1.0 / model.capacity
    free_at, done, count = 0.0, 0, 0
    for moment in moments:
        count += 1
        ended = max(free_at, moment) + seconds
        if ended <= moment + model.target + ROUNDING:
            free_at = ended
            done += 1
    return done / count


def poisson_weights(mean: float) -> Array:
    """Compute the probabilities of 0, 1, 2, ... arrivals, until the rest is below 1e-15."""
    count = int(mean + 12 * sqrt(mean) + 30)
    weights = np.array([exp(k * log(mean) - mean - lgamma(k + 1)) for k in range(count)])
    return np.asarray(weights / weights.sum())


@lru_cache(maxsize=64)
def optimum(model: Model, load: float) -> Optimum:
    """Compute the optimum at a share of the model's capacity."""
    states = max(FULL_BATCHES * model.max_batch_size, LEAST_STATES)
    return Optimum(model, load * model.capacity, states)
