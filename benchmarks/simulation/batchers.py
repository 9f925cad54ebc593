"""Our core, and the exact optimum, as batchers in virtual time. No process, no clock."""

from collections import deque
from collections.abc import Sequence
from math import inf
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.simulation.engine import Decision
from fast_batcher._core.policy import make_policy
from fast_batcher._core.prediction import Method
from fast_batcher._core.queue import BatchPacker
from fast_batcher._core.scheduler import Scheduler
from fast_batcher._core.values import Dispatch, Expire, Limits, Request

# The defaults of `DynBatcher`.
DEFAULT_TIMEOUT = 30.0
LEAST_QUEUE_SIZE, QUEUE_BATCHES = 1024, 8
WORKER = 0


class Ours:
    """The scheduler, driven by its events as the shell drives it.

    Args:
        policy: "adaptive", "greedy" or "fixed".
        max_batch_size: Most requests in a batch.
        max_delay: The setting of `DynBatcher`, seconds.
        target: `max_latency`, seconds, or None.
        costs: Of the requests by their number; batches are then filled by cost.
        max_batch_cost: Most that a batch costs; None for a full batch of requests that cost 1.
        methods: Names of the requests' methods by their number; None for a model without methods.
    """

    def __init__(
        self,
        policy: str,
        max_batch_size: int,
        *,
        max_delay: float | None = None,
        target: float | None = None,
        costs: Sequence[float] | None = None,
        max_batch_cost: float | None = None,
        methods: Sequence[str] | None = None,
    ) -> None:
        packer = None
        if costs is not None:
            packer = BatchPacker(max_batch_cost or float(max_batch_size), is_padded=True)
        self._method_names = methods
        names = sorted(set(methods or ()))
        self._methods = {name: Method(name, None, max_batch_size) for name in names}
        self._scheduler = Scheduler(
            make_policy(policy, max_delay),
            Limits(
                max_batch_size=max_batch_size,
                max_queue_size=max(LEAST_QUEUE_SIZE, QUEUE_BATCHES * max_batch_size),
                timeout=DEFAULT_TIMEOUT,
                max_latency=target,
            ),
            packer=packer,
            methods=[*self._methods.values()],
        )
        self._scheduler.worker_ready(0.0, WORKER)
        self._costs = costs
        # Requests that were rejected since the last decision.
        self._rejected: list[Request] = []

    def arrive(self, now: float, requests: list[int]) -> None:
        """Submit them."""
        arrived = [Request(request, None) for request in requests]
        if self._costs is not None:
            for request in arrived:
                request.cost = self._costs[request.value]
        if self._method_names is not None:
            for request in arrived:
                request.group = self._methods[self._method_names[request.value]].group
        self._rejected += [request for request, _ in self._scheduler.submit(now, arrived)]

    def done(self, now: float, batch: Any) -> Sequence[int]:
        """Tell the scheduler; return the requests whose caller still waits."""
        found = self._scheduler.batch_done(now, WORKER, batch.id)
        assert found is not None, "the worker answers what it was sent"
        answered = [request for request in found.requests if not request.is_settled]
        for request in answered:
            request.is_settled = True
        return [request.value for request in answered]

    def poll(self, now: float) -> Decision:
        """Return the scheduler's actions, in their order."""
        lost = [request.value for request in self._rejected]
        self._rejected = []
        actions, wake_at = self._scheduler.poll(now)
        batches = []
        for action in actions:
            if isinstance(action, Dispatch):
                requests = [request.value for request in action.batch.requests]
                batches.append((action.batch, requests))
            elif isinstance(action, Expire):
                lost.append(action.request.value)
        return Decision(batches, lost, inf if wake_at is None else wake_at)


class Planned:
    """Sends what a table says.

    Args:
        sizes: By queue length while the worker is free, how many to send; 0 to wait for the next
            arrival. A longer queue counts as the longest in the table.
    """

    def __init__(self, sizes: npt.NDArray[np.int64]) -> None:
        self._sizes: list[int] = sizes.tolist()
        self._queue: deque[int] = deque()
        self._is_free = True

    def arrive(self, now: float, requests: list[int]) -> None:
        """Let them wait."""
        self._queue.extend(requests)

    def done(self, now: float, batch: Any) -> Sequence[int]:
        """Free the worker; every request of the batch is answered."""
        self._is_free = True
        requests: Sequence[int] = batch
        return requests

    def poll(self, now: float) -> Decision:
        """Look up how many to send."""
        queue = self._queue
        size = self._sizes[min(len(queue), len(self._sizes) - 1)] if self._is_free else 0
        if size == 0:
            return Decision([], [], inf)
        self._is_free = False
        batch = [queue.popleft() for _ in range(size)]
        return Decision([(batch, batch)], [], inf)
