"""Table of the workers and the batches they run, and the time limits of both. Pure.

Part of the scheduler. Decides which worker gets the next batch, and when a running request expires
or a worker counts as stalled; worker processes are handled in `_parent/`.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from math import inf

from fast_batcher._core.queue import Queue
from fast_batcher._core.values import (
    SENT,
    Action,
    Batch,
    Expire,
    ExpiryReason,
    Limits,
    Rejection,
    Replace,
    Request,
    Skip,
    Stall,
    most_batches,
    or_infinite,
    settle_open,
)


@dataclass(slots=True, eq=False)
class WorkerSlot:
    """A worker that has been ready and has not been lost, and its batches."""

    id: int
    # Position among the batcher's workers, from 0; a replacement has the same.
    index: int
    # Most batches at a time, and whether it may work on several at the same time.
    most_batches: int
    has_stages: bool
    # Batches, oldest first. The worker computes the first batch; with a stepped model it computes
    # all that are not paused. `paused` is the number of paused batches.
    batches: list[Batch] = field(default_factory=list)
    paused: int = 0
    # Start of the first batch; infinite once that batch is beyond `infer_timeout`.
    started_at: float = 0.0
    # The worker gets no further batch: another worker takes its place. Its streams end at this
    # moment.
    is_retired: bool = False
    ends_at: float = inf
    # The worker is not needed for now: it gets the calls of its sessions alone, until these end.
    is_leaving: bool = False
    # The worker gets no further batch before it answers: no caller waits for its first batch, which
    # has run for `timeout`, or the worker is being replaced.
    is_stalled: bool = False
    # False before its first answer, whose time is not learned: a process is slow at first.
    has_answered: bool = False
    # A second batch would have been late, and its requests stay in the queue. No other second batch
    # is tried before the worker answers: otherwise every arrival would try again.
    is_second_late: bool = False

    @property
    def is_on_trial(self) -> bool:
        """Whether it has several stages, and a request with which another worker died.

        It would prepare the next batch meanwhile. If it died too, that batch could be the cause,
        and the request would be given up: see docs/decisions/0010.
        """
        is_busy = self.has_stages and bool(self.batches)
        return is_busy and self.batches[0].call.losses > 0


# The workers of a queue, None for all.
Slots = list[WorkerSlot] | None


class WorkerTable:
    """Workers by number, their batches, and the next expiry among these."""

    def __init__(self, limits: Limits) -> None:
        self._timeout = or_infinite(limits.timeout)
        self._infer_timeout = or_infinite(limits.infer_timeout)
        self._batches_per_worker = limits.batches_per_worker
        # Workers, by their number.
        self.slots: dict[int, WorkerSlot] = {}
        # Batches on workers, by id.
        self.batches: dict[int, Batch] = {}
        # Answered batches, by id, whose output is being copied out of a worker's memory.
        self.copying_out: dict[int, Batch] = {}
        # Lower bound of the next expiry in this table, computed again only when it is reached: most
        # requests are answered long before their deadlines.
        self.next_expiry = inf
        # Batches behind others, without a caller that waits, for the `Skip` actions of the next
        # poll.
        self.deserted: list[Batch] = []

    @property
    def ready_count(self) -> int:
        """Workers that have loaded their model, are alive, and are neither stalled nor retired."""
        return sum(not slot.is_stalled for slot in self.assignable)

    @property
    def assignable(self) -> list[WorkerSlot]:
        """Workers that take new work; a stalled one will be back when it answers."""
        return [slot for slot in self.slots.values() if not (slot.is_retired or slot.is_leaving)]

    @property
    def running(self) -> int:
        """Number of requests on workers or being copied out, whose callers still wait."""
        return sum([batch.open_count for batch in self.all_batches()])

    def all_batches(self) -> Iterator[Batch]:
        """Iterate over the batches on workers and the batches that are being copied out."""
        yield from self.batches.values()
        yield from self.copying_out.values()

    def add(self, worker: int, index: int, stages: int) -> None:
        """Add a worker that has become ready, its index and its number of stages."""
        assert worker not in self.slots, "a worker is lost before it can be ready again"
        self.slots[worker] = WorkerSlot(
            worker, index, most_batches(stages, self._batches_per_worker), has_stages=stages > 1
        )

    def retire(self, worker: int, ends_at: float = inf) -> None:
        """Give a worker no more batches; it finishes its own."""
        slot = self.slots.get(worker)
        if slot is not None:
            slot.is_retired = True

    def remove(self, worker: int) -> list[Batch]:
        """Remove a worker and return its batches, oldest first."""
        slot = self.slots.pop(worker, None)
        if slot is None:
            return []
        for batch in slot.batches:
            del self.batches[batch.id]
        return slot.batches

    def clear(self) -> None:
        """Forget everything."""
        self.slots.clear()
        self.batches.clear()
        self.copying_out.clear()
        self.deserted.clear()
        self.next_expiry = inf

    def find(self, worker: int, batch_id: int) -> Batch | None:
        """Return this worker's batch with this id, or None."""
        batch = self.batches.get(batch_id)
        return batch if batch is not None and batch.worker == worker else None

    def least_loaded(
        self, below: float = inf, slots: Slots = None, queue: Queue | None = None
    ) -> WorkerSlot | None:
        """Return the available worker for the next batch of a queue, or None.

        It is the one with the fewest batches, below `below`.
        """
        found = None
        for slot in self.slots.values() if slots is None else slots:
            count = len(slot.batches)
            is_out = slot.is_stalled or slot.is_retired or (slot.is_leaving and slots is None)
            if not is_out and count < below and count < slot.most_batches:
                if count and slot.is_on_trial:
                    continue
                found, below = slot, count
        return found

    def find_for_retry(self, cost: float) -> WorkerSlot | None:
        """Return the worker for a batch that is tried again, or None: an idle one."""
        return self.least_loaded(1)

    def give(self, now: float, slot: WorkerSlot, batch: Batch) -> None:
        """Add a batch behind the other batches of a worker."""
        rests = len(slot.batches) == slot.paused
        slot.batches.append(batch)
        self.batches[batch.id] = batch
        if rests:
            self._begin_first(now, slot)

    def take_back(self, now: float, batch: Batch) -> None:
        """Remove a batch from its worker: it was answered, or could not be sent."""
        del self.batches[batch.id]
        slot = self.slots[batch.worker]
        batch.began_at = slot.started_at
        was_first = slot.batches[0] is batch
        slot.batches.remove(batch)
        slot.paused -= batch.is_paused
        if was_first:
            slot.is_stalled = False
            if slot.batches:
                self._begin_first(now, slot)

    def withdraw(self, now: float, batch: Batch, requests: list[Request]) -> list[Request]:
        """Remove requests that could not be sent from a batch; an empty batch is removed too."""
        withdrawn = {request.id for request in requests}
        batch.requests = [left for left in batch.requests if left.id not in withdrawn]
        settled = settle_open(requests)
        batch.open_count -= len(settled)
        if not batch.requests:
            self.take_back(now, batch)
        elif settled:
            self.notice_deserted(batch)
        return settled

    def _begin_first(self, now: float, slot: WorkerSlot) -> None:
        """Start the time of a worker's first batch."""
        slot.started_at = now
        if now + self._infer_timeout < self.next_expiry:
            self.next_expiry = now + self._infer_timeout
        if not slot.batches[0].open_count:  # its callers left while it waited behind another one
            self.notice_deserted(slot.batches[0])

    def caller_gone(self, request: Request) -> None:
        """Record that the caller of a sent request has gone."""
        batches = self.batches if request.phase == SENT else self.copying_out
        batch = batches[request.batch_id]
        batch.open_count -= 1
        self.notice_deserted(batch)

    def notice_deserted(self, batch: Batch) -> None:
        """If no caller waits for this batch, schedule the check for a stall, or a `Skip`.

        A worker that computes the batch may stall; one that has another first need not begin.
        """
        slot = self.slots.get(batch.worker)
        if batch.open_count or slot is None or batch.id not in self.batches:
            return
        if batch is slot.batches[0]:
            self.next_expiry = min(self.next_expiry, slot.started_at + self._timeout)
        if self._can_leave(slot, batch):
            self.deserted.append(batch)

    def _can_leave(self, slot: WorkerSlot, batch: Batch) -> bool:
        """Return whether the worker may omit a batch: it need not begin with it."""
        return batch is not slot.batches[0]

    def take_deserted(self) -> list[Skip]:
        """Return actions for the batches behind others that have become without callers."""
        deserted, self.deserted = self.deserted, []
        return [Skip(batch) for batch in deserted if batch.id in self.batches]

    def not_sent_yet(self, now: float, worker: int, begun: int | None) -> None:
        """Restart the time of a worker's first batch, because the frame is only now being written.

        A worker that has begun with its first batch keeps the time. The worker is not to blame for
        a delay in this process.
        """
        slot = self.slots.get(worker)
        if slot is None or not slot.batches or slot.started_at == inf:
            return
        if begun is None or slot.batches[0].id > begun:
            slot.started_at = now

    def expire(
        self, now: float, actions: list[Action], *, has_read: bool, answering: Collection[int]
    ) -> None:
        """Expire requests on workers, and find stalled and late workers; see `Scheduler.poll`.

        Whatever is settled is in `actions`, also if an error ends it.
        """
        for slot in self.slots.values() if has_read else ():
            is_answering = slot.id in answering
            if not is_answering:
                self._expire_running(now, slot, actions)
            for batch in slot.batches[is_answering:]:
                if batch.open_count and batch.deadline <= now:
                    actions += _expire_batch(now, batch, self._find_cause(slot, batch))
                    self.notice_deserted(batch)
            if not is_answering:
                self._stall(now, slot, actions)
            if slot.ends_at <= now:
                self._end_streams(slot, actions)
        self.next_expiry = self._earliest_expiry()

    def give_up_late(self, now: float) -> list[Request]:
        """Settle and return the requests on workers that are late; the scheduler has an error."""
        late = [each for batch in self.batches.values() for each in _settle_late(now, batch)]
        self.next_expiry = self._earliest_expiry()
        return late

    def _find_cause(self, slot: WorkerSlot, batch: Batch) -> Rejection | None:
        """Return None: a late batch has no further cause."""

    def _expire_running(self, now: float, slot: WorkerSlot, actions: list[Action]) -> None:
        """Replace a worker whose first batch has run for `infer_timeout`.

        With it expire all streams that cannot begin again on another worker: they share the step.
        """
        if len(slot.batches) > slot.paused and slot.started_at + self._infer_timeout <= now:
            late = slot.batches[0].settle_open()
            for batch in slot.batches:
                if batch.call.has_chunks:
                    late += batch.settle_open()
            actions += [Expire(request, ExpiryReason.INFER_TIMEOUT) for request in late]
            actions.append(Replace(slot.id))
            slot.is_stalled = True
            slot.started_at = inf  # so that it is replaced once

    def _end_streams(self, slot: WorkerSlot, actions: list[Action]) -> None:
        """Expire the streams of a retired worker, which leave it."""
        slot.ends_at = inf
        for batch in slot.batches:
            actions += [Expire(each, ExpiryReason.RETIRED) for each in batch.settle_open()]
            self.notice_deserted(batch)

    def _stall(self, now: float, slot: WorkerSlot, actions: list[Action]) -> None:
        """Mark a worker as stalled if its first batch has run for `timeout` and no caller waits."""
        is_deserted = len(slot.batches) > slot.paused and not slot.batches[0].open_count
        if is_deserted and slot.started_at + self._timeout <= now and not slot.is_stalled:
            slot.is_stalled = True
            actions.append(Stall(slot.id))

    def _earliest_expiry(self) -> float:
        moments = [batch.deadline for batch in self.batches.values() if batch.open_count]
        for slot in self.slots.values():
            if len(slot.batches) > slot.paused:
                moments.append(slot.started_at + self._infer_timeout)
                if not slot.is_stalled and not slot.batches[0].open_count:
                    moments.append(slot.started_at + self._timeout)
            moments.append(slot.ends_at)
        return min(moments, default=inf)


def _expire_batch(now: float, batch: Batch, cause: Rejection | None) -> list[Action]:
    """Expire the requests of a batch whose deadlines have passed."""
    return [Expire(request, ExpiryReason.RUNNING, cause) for request in _settle_late(now, batch)]


def _settle_late(now: float, batch: Batch) -> list[Request]:
    late = settle_open([request for request in batch.requests if request.deadline <= now])
    batch.open_count -= len(late)
    waiting = [request.deadline for request in batch.requests if not request.is_settled]
    batch.deadline = min(waiting, default=inf)
    return late
