"""Sessions of callers: their places in workers, their queues and their ends. Pure.

Part of the scheduler of a batcher with sessions. A session has a *state* in one worker, so all of
its requests go to that worker. Its caller sends one request after the other, so a batch has at most
one of them, and a worker computes batches in the order of their arrival.
"""

from collections import deque
from collections.abc import Iterator
from itertools import chain
from math import inf
from typing import Final

from fast_batcher._core.queue import BatchPacker, RankedQueue, WorkAhead
from fast_batcher._core.values import (
    CALL_FAILED,
    Batch,
    EndSession,
    Rejection,
    Request,
    SessionPlace,
    Share,
    settle_open,
)
from fast_batcher._core.workers import Slots, WorkerSlot, WorkerTable
from fast_batcher.errors import BatcherClosedError, QueueFullError, SessionLostError

# Sessions whose lengths are kept: enough for a mean, as many as of streams.
MOST_LENGTHS: Final = 128


def _age_of(queue: tuple[RankedQueue, Slots]) -> int:
    oldest = queue[0].oldest()
    assert oldest is not None, "it has requests"
    return oldest.id


class SessionQueue:
    """The sessions of all workers, and the waiting requests: a queue for each worker.

    Requests without a session have a queue of their own, and any worker takes them.

    Args:
        workers: The workers.
        most: Most sessions of a worker.
        common: The queue of the requests without a session.
        packer: Fills batches up to a cost, None without costs.
    """

    def __init__(
        self, workers: WorkerTable, most: int, common: RankedQueue, packer: BatchPacker | None
    ) -> None:
        self._workers = workers
        self._most = most
        self._packer = packer
        # A model with sessions has one method.
        self.next_method = common.next_method
        self._common = common
        # Queues by worker. Under None are the first requests of sessions that have no place yet,
        # because no worker is ready, or those with a place are stalled.
        self._queues: dict[int | None, RankedQueue] = {}
        # Live sessions by worker and by their ids.
        self._live: dict[int, dict[int, SessionPlace]] = {}
        self._next_id = 0
        # Seconds of the last sessions.
        self._lengths: deque[float] = deque(maxlen=MOST_LENGTHS)
        # Sessions that have ended since the last poll.
        self._ended: list[EndSession] = []
        # Lower bound of the moment at which the next session has been idle for its timeout.
        self.next_end = inf

    # The queue.

    def __iter__(self) -> Iterator[Request]:
        """Iterate over the waiting requests."""
        return chain.from_iterable(self._all())

    def _all(self) -> list[RankedQueue]:
        return [self._common, *self._queues.values()]

    @property
    def size(self) -> int:
        """Waiting requests."""
        return sum([queue.size for queue in self._all()])

    @property
    def bytes(self) -> int:
        """Sum of their sizes."""
        return sum([queue.bytes for queue in self._all()])

    @property
    def cost(self) -> float:
        """Sum of their costs."""
        return sum([queue.cost for queue in self._all()])

    def extend(self, requests: list[Request]) -> None:
        """Append requests, whose sessions have been admitted."""
        for request in requests:
            self._queue_of(request).extend([request])

    def discard(self, request: Request) -> None:
        """Forget a waiting request."""
        self._queue_of(request).discard(request)

    def _queue_of(self, request: Request) -> RankedQueue:
        if request.session is None:
            return self._common
        worker = request.session.worker
        if worker not in self._queues:
            self._queues[worker] = RankedQueue(self._packer, self.next_method)
        return self._queues[worker]

    def held_by(self, share: Share) -> int:
        """Return the number of waiting requests of a share."""
        return sum([queue.held_by(share) for queue in self._all()])

    def ahead_of(self, priority: int, share: Share) -> WorkAhead:
        """Estimate which part of the queue is served before a new request of this rank."""
        found = [queue.ahead_of(priority, share) for queue in self._all()]
        requests, costs, groups = zip(*found, strict=True)
        return WorkAhead(sum(requests), sum(costs), sum(groups))

    def earliest_deadline(self) -> float:
        """Return the first moment at which a waiting request expires."""
        return min([queue.earliest_deadline() for queue in self._all()])

    def pop_expired(self, now: float) -> list[Request]:
        """Remove and settle every request whose deadline is at or before `now`."""
        return [request for queue in self._all() for request in queue.pop_expired(now)]

    def clear(self) -> None:
        """Forget all waiting requests, which are settled."""
        self._common = RankedQueue(self._packer, self.next_method)
        self._queues.clear()

    def list_queues(self) -> list[tuple[RankedQueue, Slots]]:
        """Return the queues with requests, each with its workers; that of the oldest first."""
        found: list[tuple[RankedQueue, Slots]] = [(self._common, None)]
        for worker, queue in self._queues.items():
            if worker is not None and worker in self._workers.slots:
                found.append((queue, [self._workers.slots[worker]]))
        return sorted([pair for pair in found if pair[0].size], key=_age_of)

    # Places.

    @property
    def count(self) -> int:
        """Live sessions."""
        return sum([len(places) for places in self._live.values()])

    def count_of(self, worker: int) -> int:
        """Return the live sessions of a worker."""
        return len(self._live.get(worker, ()))

    def admit(
        self, now: float, requests: list[Request], *, is_draining: bool
    ) -> tuple[list[Request], list[tuple[Request, Rejection]]]:
        """Give new sessions places; return the requests that may be queued, and the rejected ones.

        While the batcher drains, sessions that have a place go on.
        """
        accepted: list[Request] = []
        rejected: list[tuple[Request, Rejection]] = []
        for request in requests:
            session = request.session
            rejection = None
            if session is not None:
                rejection = self._admit(now, session, is_draining=is_draining)
            if rejection is None:
                accepted.append(request)
            else:
                rejected.append((request, rejection))
        return accepted, rejected

    def _admit(self, now: float, session: SessionPlace, *, is_draining: bool) -> Rejection | None:
        if session.end is not None:
            return Rejection(SessionLostError, f"the session has ended: {session.end}")
        if session.worker is not None:
            self._use(now, session)
            return None
        if is_draining or not session.may_begin:
            return Rejection(BatcherClosedError, "the batcher is draining and takes no new session")
        slots = self._workers.assignable
        if self._place(now, session) or not slots or any(map(self._has_place, slots)):
            return None
        text = f"{self.count} sessions are live (max_sessions={self._most} for each worker)"
        retry_after = None
        if self._lengths:  # one of the places is free after this time on average
            retry_after = sum(self._lengths) / len(self._lengths) / max(1, self.count)
        return Rejection(QueueFullError, text, retry_after)

    def reject(self, requests: list[Request]) -> None:
        """Take the places of new sessions back whose first requests were rejected after all."""
        for request in requests:
            session = request.session
            if session is None or session.worker is None or session.was_answered:
                continue
            if not self._is_busy(session):  # with a call that its caller has left
                self._leave(session.worker, session.id)
                session.worker = None

    def place_waiting(self, now: float) -> None:
        """Give sessions places that have waited for a worker, the oldest first."""
        for request in sorted(self._queues.get(None, ()), key=lambda request: request.id):
            assert request.session is not None, "the queue is for these"
            before = self._queues[None]
            if self._place(now, request.session):
                before.discard(request)
                self._queue_of(request).extend([request])

    def _place(self, now: float, session: SessionPlace) -> bool:
        """Give a session a place in the worker that has the fewest; False if none has a place."""
        slots = [slot for slot in self._workers.assignable if not slot.is_stalled]
        slot = min(slots, key=lambda slot: self.count_of(slot.id), default=None)
        if slot is None or not self._has_place(slot):
            return False
        session.id, session.worker, session.began_at = self._next_id, slot.id, now
        self._next_id += 1
        self._live.setdefault(slot.id, {})[session.id] = session
        self._use(now, session)
        return True

    def _has_place(self, slot: WorkerSlot) -> bool:
        """Return whether a worker may take one more session, perhaps only once it answers."""
        return self.count_of(slot.id) < self._most

    def _use(self, now: float, session: SessionPlace) -> None:
        """Let the time begin again for which a session may be idle."""
        session.ends_at = now + session.timeout
        self.next_end = min(self.next_end, session.ends_at)

    def answered(self, now: float, batch: Batch) -> None:
        """Record that a worker has computed requests."""
        for request in batch.requests:
            if request.session is not None:
                request.session.was_answered = True
                self._use(now, request.session)

    # Ends.

    def end(self, now: float, session: SessionPlace, reason: str) -> list[Request]:
        """End a session; return its waiting requests, which are settled."""
        if session.end is not None:
            return []
        session.end = reason
        waiting = [
            request for request in self._waiting_beside(session) if request.session is session
        ]
        for request in waiting:
            self.discard(request)
        if session.worker is not None:
            self._lengths.append(now - session.began_at)
            self._leave(session.worker, session.id)
        return settle_open(waiting)

    def _leave(self, worker: int, session_id: int) -> None:
        """Free a place; its worker may have a state."""
        self._ended.append(EndSession(worker, session_id))
        del self._live[worker][session_id]

    def _waiting_beside(self, session: SessionPlace) -> list[Request]:
        """Return the waiting requests of the session's worker."""
        return [*self._queues.get(session.worker, ())]

    def end_batch(self, now: float, batch: Batch) -> list[Request]:
        """End the sessions of a failed batch; return their waiting requests, settled."""
        sessions = [request.session for request in batch.requests if request.session is not None]
        waiting = [self.end(now, session, CALL_FAILED) for session in sessions]
        return [*chain.from_iterable(waiting)]

    def end_all(self, reason: str, worker: int | None = None) -> list[Request]:
        """End the sessions of a worker, or of all; return their waiting requests, settled."""
        workers = [*self._live] if worker is None else [worker]
        waiting: list[Request] = []
        for found in workers:
            for session in self._live.pop(found, {}).values():
                session.end = reason
            waiting += self._queues.pop(found, ())
        return settle_open(waiting)

    def expire(self, now: float) -> None:
        """End the sessions that have been idle for their timeouts."""
        sessions = [session for places in self._live.values() for session in places.values()]
        for session in sessions:
            if session.ends_at > now:
                continue
            if self._is_busy(session):
                self._use(now, session)
            else:
                text = f"it was idle for its timeout of {session.timeout} seconds"
                self.end(now, session, text)
        live = (session for places in self._live.values() for session in places.values())
        self.next_end = min([session.ends_at for session in live], default=inf)

    def _is_busy(self, session: SessionPlace) -> bool:
        """Return whether a request of a session waits or runs."""
        assert session.worker is not None, "it is live"
        running = [batch.requests for batch in self._workers.slots[session.worker].batches]
        requests = chain(self._waiting_beside(session), *running)
        return any(request.session is session for request in requests)

    def take_ended(self) -> list[EndSession]:
        """Return actions for the sessions that have ended."""
        ended, self._ended = self._ended, []
        return ended
