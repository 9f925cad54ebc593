"""The event loop of virtual time: one load, one batcher, one worker. No process, no clock.

At each moment the batcher is told in this order: the worker's answer, the arrivals (those of one
moment together, like those of one turn of the shell); then it decides once.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from math import inf, nan
from typing import Any, NamedTuple, Protocol

import numpy as np

from benchmarks.simulation.loads import Load

# Decisions at one moment after which virtual time stands still: more than any batcher needs.
MOST_DECISIONS_AT_ONCE = 10_000


class Decision(NamedTuple):
    """A batcher's actions at one moment."""

    # Batches and their requests. All go to the one worker, which computes them in this order.
    batches: Sequence[tuple[Any, Sequence[int]]]
    # Requests that leave without an answer.
    lost: Sequence[int]
    # When it decides again if nothing happens before; infinite for never.
    wake_at: float


class Times(Protocol):
    """Seconds of batches on the one worker."""

    def seconds(self, now: float, requests: Sequence[int]) -> float:
        """Return the seconds of a batch of these requests that begins now."""


class Batcher(Protocol):
    """A policy with a queue; requests are numbers that rise with their arrival."""

    def arrive(self, now: float, requests: list[int]) -> None:
        """Requests that come at this moment."""

    def done(self, now: float, batch: Any) -> Sequence[int]:
        """The worker has finished a batch; returns the requests that are answered with it."""

    def poll(self, now: float) -> Decision:
        """Decide."""


class Record:
    """The outcome of each request, by its number."""

    def __init__(self) -> None:
        self.arrivals: list[float] = []
        # The moment of the answer, nan where there is none; and of the rejection or expiry.
        self.answers: list[float] = []
        self.losses: list[float] = []
        self.batch_sizes: list[int] = []

    def select(self, requests: Iterable[int]) -> "Record":
        """Return the record of some requests, with the batches of all."""
        selected = Record()
        selected.batch_sizes = self.batch_sizes
        for request in requests:
            selected.arrivals.append(self.arrivals[request])
            selected.answers.append(self.answers[request])
            selected.losses.append(self.losses[request])
        return selected

    def figures(self, start: float, end: float, target: float = inf) -> dict[str, float]:
        """Compute figures of the requests that arrived from `start` until `end`.

        Args:
            start: Seconds; the warm-up before it does not count.
            end: Seconds.
            target: Seconds within which an answer is in time.
        """
        arrivals = np.array(self.arrivals)
        counted = (arrivals >= start) & (arrivals < end)
        latencies = (np.array(self.answers) - arrivals)[counted]
        until_lost = (np.array(self.losses) - arrivals)[counted]
        latencies = latencies[~np.isnan(latencies)]
        until_lost = until_lost[~np.isnan(until_lost)]
        total = max(1, int(counted.sum()))
        answers = np.array(self.answers)
        figures = {
            "requests": float(counted.sum()),
            "answered_per_second": float(((answers >= start) & (answers < end)).sum())
            / (end - start),
            "in_time_per_second": float((latencies <= target).sum()) / (end - start),
            "in_time": float((latencies <= target).sum()) / total,
            "lost": 1 - len(latencies) / total,
            "batch_size": float(np.mean(self.batch_sizes)) if self.batch_sizes else 0.0,
        }
        if len(latencies):
            figures["mean_ms"] = 1e3 * float(latencies.mean())
            figures["p50_ms"] = 1e3 * float(np.quantile(latencies, 0.50))
            figures["p99_ms"] = 1e3 * float(np.quantile(latencies, 0.99))
        if len(until_lost):
            figures["loss_p99_ms"] = 1e3 * float(np.quantile(until_lost, 0.99))
        return figures


class _Server:
    """The worker and the batches that wait in its pipe."""

    def __init__(self, worker: Times) -> None:
        self._worker = worker
        self._batches: deque[tuple[Any, Sequence[int]]] = deque()
        self.done_at = inf

    def send(self, now: float, batch: tuple[Any, Sequence[int]]) -> None:
        self._batches.append(batch)
        if len(self._batches) == 1:
            self.done_at = now + self._worker.seconds(now, batch[1])

    def finish(self, now: float) -> Any:
        """Return the batch that is finished, and begin the next one."""
        batch, _ = self._batches.popleft()
        if self._batches:
            self.done_at = now + self._worker.seconds(now, self._batches[0][1])
        else:
            self.done_at = inf
        return batch


class _Simulation:
    """Tells the batcher what happens, and records the outcome of each request."""

    def __init__(self, batcher: Batcher, load: Load, worker: Times) -> None:
        self.record = Record()
        self.batcher = batcher
        self.load = load
        self.server = _Server(worker)
        self._clients: list[int] = []

    def finish_batch(self, now: float) -> None:
        for request in self.batcher.done(now, self.server.finish(now)):
            self.record.answers[request] = now
            self.load.settled(now, self._clients[request])

    def arrive(self, now: float) -> None:
        record, load = self.record, self.load
        first = len(record.arrivals)
        while load.next_at <= now:
            self._clients.append(load.pop())
            record.arrivals.append(now)
            record.answers.append(nan)
            record.losses.append(nan)
        self.batcher.arrive(now, list(range(first, len(record.arrivals))))

    def decide(self, now: float) -> float:
        batches, lost, wake_at = self.batcher.poll(now)
        for batch in batches:
            self.record.batch_sizes.append(len(batch[1]))
            self.server.send(now, batch)
        for request in lost:
            self.record.losses[request] = now
            self.load.settled(now, self._clients[request])
        return wake_at


def simulate(batcher: Batcher, load: Load, worker: Times, until: float) -> Record:
    """Let virtual time pass until then, or until nothing can happen any more.

    Raises:
        RuntimeError: The batcher decides again and again at one moment.
    """
    simulation = _Simulation(batcher, load, worker)
    server = simulation.server
    wake_at = inf
    last, repeats = -1.0, 0
    while True:
        now = min(load.next_at, server.done_at, wake_at)
        if now > until or now == inf:
            return simulation.record
        repeats = repeats + 1 if now == last else 0
        if repeats > MOST_DECISIONS_AT_ONCE:
            raise RuntimeError(f"{type(batcher).__name__} does not get beyond the moment {now}")
        last = now
        if server.done_at <= now:
            simulation.finish_batch(now)
        if load.next_at <= now:
            simulation.arrive(now)
        wake_at = simulation.decide(now)
