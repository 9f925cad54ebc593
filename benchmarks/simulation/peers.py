"""The peers' policies, written anew for virtual time. No process, no clock.

They do what the peers' code does. Each has one worker and is spared what it costs outside its
policy: threads, queues, timers that ring late. Their polling is kept where it decides when a batch
leaves or an answer arrives.
"""

from collections import deque
from collections.abc import Sequence
from math import ceil, inf
from typing import Any

import numpy as np

from benchmarks.simulation.engine import Decision

NOTHING: list[Any] = []


class Peer:
    """A queue and one worker; a subclass says when a batch leaves."""

    answer_tick = 0.0

    def __init__(self, max_batch_size: int) -> None:
        self.most = max_batch_size
        # (moment of arrival, number)
        self.queue: deque[tuple[float, int]] = deque()
        self.is_free = True

    def arrive(self, now: float, requests: list[int]) -> None:
        """They wait; none of the peers looks at them before its next turn."""
        for request in requests:
            self.queue.append((now, request))

    def done(self, now: float, batch: Any) -> Sequence[int]:
        """All of it."""
        self.is_free = True
        requests: Sequence[int] = batch
        return requests

    def take(self, count: int) -> Decision:
        """Send so many of the oldest, or all."""
        self.is_free = False
        queue = self.queue
        batch = [queue.popleft()[1] for _ in range(min(count, len(queue)))]
        return Decision([(batch, batch)], NOTHING, inf)


class FastDynamicBatcher(Peer):
    """fast_dynamic_batcher 1.1.0: a window that opens when the free worker sees the first request.

    Its worker looks every millisecond while there is nothing to do, takes what there is, and begins
    when the batch is full or `max_delay` has passed since it saw the first one. What has waited
    while it computed waits for a new window. Answers are fetched every millisecond. Spared: its
    callers each hold one of at most `cpus + 4` threads, which bounds its batches.

    Args:
        max_batch_size: Most requests in a batch.
        max_delay: Seconds; its default is 0.1.
    """

    TICK = 1e-3
    answer_tick = TICK

    def __init__(self, max_batch_size: int, max_delay: float) -> None:
        super().__init__(max_batch_size)
        self._max_delay = max_delay
        self._opened_at = inf
        # It looks at this moment and so many ticks later.
        self._awake_at = 0.0

    def done(self, now: float, batch: Any) -> Sequence[int]:
        """It looks again at once."""
        self._opened_at, self._awake_at = inf, now
        return super().done(now, batch)

    def poll(self, now: float) -> Decision:
        """See the first, or see whether the batch is full or its window over."""
        if not self.is_free or not self.queue:
            return Decision(NOTHING, NOTHING, inf)
        looks_at = self._next_look(now)
        if looks_at > now:
            return Decision(NOTHING, NOTHING, looks_at)
        if self._opened_at == inf:
            self._opened_at = now
        if len(self.queue) >= self.most or now >= self._opened_at + self._max_delay:
            return self.take(self.most)
        return Decision(NOTHING, NOTHING, self._next_look(now + self.TICK / 2))

    def _next_look(self, now: float) -> float:
        """The first look not before now; exact, so that a wake-up for it finds it due."""
        ticks = ceil((now - self._awake_at) / self.TICK - 1e-6)
        return max(now, self._awake_at + ticks * self.TICK) if ticks > 0 else now


class Batched(Peer):
    """batched 0.1.5: unless a full batch waits it sleeps `timeout`, then takes what there is.

    It takes whole batches' worth where there are more, and computes them one after the other before
    it looks again.

    Args:
        max_batch_size: Most requests in a batch.
        timeout: Seconds; its default is 5 ms.
    """

    def __init__(self, max_batch_size: int, timeout: float) -> None:
        super().__init__(max_batch_size)
        self._timeout = timeout
        # Since when it sleeps again and again; None when it has slept enough.
        self._asleep_since = 0.0
        self._left = 0

    def done(self, now: float, batch: Any) -> Sequence[int]:
        """With the last one of those that it has taken it begins anew."""
        self._left -= 1
        if self._left == 0:
            self._asleep_since = now if len(self.queue) < self.most else -inf
            super().done(now, batch)
        requests: Sequence[int] = batch
        return requests

    def poll(self, now: float) -> Decision:
        """Awake at whole multiples of the timeout after it fell asleep."""
        if not self.is_free or not self.queue:
            return Decision(NOTHING, NOTHING, inf)
        if self._asleep_since != -inf:
            arrival = self.queue[0][0]
            # Whoever had come before it fell asleep is seen after one sleep.
            slept = max(1, ceil((arrival - self._asleep_since) / self._timeout - 1e-9))
            wakes_at = self._asleep_since + slept * self._timeout
            if wakes_at > now:
                return Decision(NOTHING, NOTHING, wakes_at)
        self.is_free = False
        count = len(self.queue)
        whole = max(1, count // self.most)
        taken = [self.queue.popleft()[1] for _ in range(min(whole * self.most, count))]
        batches = [taken[i : i + self.most] for i in range(0, len(taken), self.most)]
        self._left = len(batches)
        return Decision([(batch, batch) for batch in batches], NOTHING, inf)


class Aimd(Peer):
    """Clipper's adaptive batch size: a free worker takes what waits, up to a size that it learns.

    The size rises by one after a full batch in time and falls by a tenth after a batch that took
    longer than `objective`. Source: Crankshaw et al., "Clipper", NSDI 2017, section 4.3.

    Args:
        max_batch_size: Most requests in a batch.
        objective: Seconds that a batch may take.
    """

    def __init__(self, max_batch_size: int, objective: float) -> None:
        super().__init__(max_batch_size)
        self._objective = objective
        self._size = 1.0
        self._sent_at = 0.0

    def done(self, now: float, batch: Any) -> Sequence[int]:
        """Learn."""
        if now - self._sent_at > self._objective:
            self._size = max(1.0, self._size * 0.9)
        elif len(batch) >= int(self._size):
            self._size = min(self.most, self._size + 1.0)
        return super().done(now, batch)

    def poll(self, now: float) -> Decision:
        """Take what waits."""
        if not self.is_free or not self.queue:
            return Decision(NOTHING, NOTHING, inf)
        self._sent_at = now
        return self.take(int(self._size))


class Bento(Peer):
    """BentoML 1.4.39's dispatcher: a line through the last 50 batches, and a wait of its average.

    It looks every millisecond while it waits or the worker is busy, refuses the oldest when the
    line says that the whole queue in one batch would be late for it, and holds a batch while
    n * (time since the last arrival + 1 ms + a) stays below 95 % of the average wait. First it
    trains: eight batches as they come, one more, then one of two and one of three if they come.

    Args:
        max_batch_size: Most requests in a batch; its default is 100.
        max_latency: Seconds; its default is 60.
    """

    TICK = 1e-3
    # Requests that may wait unharmed, batches, and the size that is hoped for.
    TRAINING = ((2, 8, 1), (6, 1, 1), (5, 1, 2), (3, 1, 3))
    KEPT, SKIPPED, SECONDS_PER_REFRESH, DECAY = 50, 2, 5.0, 0.95

    def __init__(self, max_batch_size: int, max_latency: float = 60.0) -> None:
        super().__init__(max_batch_size)
        self._max_latency = max_latency
        # The line a * n + b, seconds, and the average wait.
        self._a = min(2.0, max_latency * 2.0 / 30)
        self._b = min(1.0, max_latency * 1.0 / 30)
        self._wait = 0.0
        self._samples: deque[tuple[int, float, float]] = deque(maxlen=self.KEPT)
        self._seen = 0
        # Its bucket of tokens for refreshes.
        self._tokens, self._tokens_at = 2.0, 0.0
        # Which training it is at, batches of it so far, and how long that may hold a batch.
        self._stage, self._stage_batches, self._stage_wait = 0, 0, 0.0
        # Of the running batch: when it was sent, its oldest request's wait, whether to train.
        self._sent_at, self._sent_wait, self._is_training = 0.0, 0.0, False
        self._looks_at = 0.0

    def done(self, now: float, batch: Any) -> Sequence[int]:
        """Learn."""
        self._seen += 1
        if self._seen > self.SKIPPED:
            wait = 0.0 if self._is_training else self._sent_wait
            self._samples.append((len(batch), now - self._sent_at, wait))
            earned = (now - self._tokens_at) / self.SECONDS_PER_REFRESH
            tokens = min(earned + self._tokens, 1.0)
            if tokens >= 1.0:
                self._tokens, self._tokens_at = tokens - 1.0, now
                self._refresh()
        return super().done(now, batch)

    def _refresh(self) -> None:
        if not self._samples:
            return
        sizes, seconds, waits = np.array(self._samples).T
        line = np.linalg.lstsq(np.column_stack([sizes, np.ones_like(sizes)]), seconds, rcond=None)
        a, b = line[0].tolist()
        self._a, self._b = max(1e-6, a), max(0.0, b)
        self._wait = float(waits.mean())

    def poll(self, now: float) -> Decision:
        """Do what it does when it looks; asleep it sees nothing."""
        lost: list[int] = []
        if not self.queue or now < self._looks_at:
            return Decision(NOTHING, lost, self._looks_at if self.queue else inf)
        while self.queue and self._is_hopeless(now):
            lost.append(self.queue.popleft()[1])
        if not self.queue:
            return Decision(NOTHING, lost, inf)
        if not self.is_free or self._holds(now):
            self._looks_at = now + self.TICK
            return Decision(NOTHING, lost, self._looks_at)
        self._sent_at, self._sent_wait = now, now - self.queue[0][0]
        self._is_training = self._stage < len(self.TRAINING)
        if self._is_training:
            self._train()
        decision = self.take(self.most)
        # It looks again at once: at those that are left while the worker is busy, or else it waits
        # for the next arrival and looks then.
        self._looks_at = now + self.TICK if self.queue else now
        return decision._replace(lost=lost, wake_at=self._looks_at if self.queue else inf)

    def _is_hopeless(self, now: float) -> bool:
        count, waited = len(self.queue), now - self.queue[0][0]
        if self._stage < len(self.TRAINING):
            unharmed = self.TRAINING[self._stage][0] - self._stage_batches
            return count > unharmed and waited >= self._max_latency
        if count > 1:
            return waited + self._a * count + self._b >= self._max_latency
        return not self.is_free and waited >= self._max_latency

    def _holds(self, now: float) -> bool:
        count = len(self.queue)
        if self._stage < len(self.TRAINING):
            size = min(self.TRAINING[self._stage][2], self.most)
            expected = size * self._a + self._b + now - self.queue[0][0]
            return size > 1 and count < size and expected <= self._stage_wait
        quiet = now - self.queue[-1][0]
        return (
            count < self.most and count * (quiet + self.TICK + self._a) <= self._wait * self.DECAY
        )

    def _train(self) -> None:
        self._stage_batches += 1
        if self._stage_batches < self.TRAINING[self._stage][1]:
            return
        if self._stage > 0:
            self._refresh()
        self._stage, self._stage_batches = self._stage + 1, 0
        if self._stage < len(self.TRAINING):
            size = min(self.TRAINING[self._stage][2], self.most)
            self._stage_wait = min(self._max_latency * 0.95, (2 * size + 1) * self._a + self._b)
