"""Table of the workers and the batches they run, and the time limits of both. Pure.

Part of the scheduler. Decides which worker gets the next batch, and when a running request expires
or a worker counts as stalled; worker processes are handled in `_parent/`.
"""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from math import inf

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
from fast_batcher.errors import DeadlineExceededError


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
        return is_busy and self.batches[0].requests[0].losses > 0


class WorkerTable:
    """Workers by number, their batches, and the next expiry among these."""

    def __init__(self, limits: Limits) -> None:
        self._timeout = or_infinite(limits.timeout)
        self._infer_timeout = or_infinite(limits.infer_timeout)
        self._batches_per_worker = limits.batches_per_worker
        self._is_stepped = limits.is_stepped
        self._places, self._most_cost = limits.places, limits.most_stream_cost
        self._sends_ahead = limits.batches_per_worker > limits.places
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
        """Give a worker no more batches; it finishes its own, and its streams until a moment."""
        slot = self.slots.get(worker)
        if slot is not None:
            slot.is_retired = True
            if self._is_stepped:
                slot.ends_at = ends_at
                self.next_expiry = min(self.next_expiry, ends_at)

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
        self, below: float = inf, slots: Iterable[WorkerSlot] | None = None
    ) -> WorkerSlot | None:
        """Return the available worker with the fewest batches, below `below`, or None."""
        found = None
        for slot in self.slots.values() if slots is None else slots:
            count = len(slot.batches)
            is_out = slot.is_stalled or slot.is_retired or (slot.is_leaving and slots is None)
            if not is_out and count < below and count < slot.most_batches:
                if count and slot.is_on_trial:
                    continue
                found, below = slot, count
        return found

    def list_places(self, cost: float) -> list[WorkerSlot]:
        """Return the workers that can begin a stream of this cost.

        Without other workers a stream may also be sent ahead, and wait in the worker. Beside others
        it waits in the queue, for the worker that has room first.
        """
        if self._sends_ahead and len(self.assignable) == 1:
            return [slot for slot in self.assignable if not self.is_full(slot)]
        return [
            slot
            for slot in self.assignable
            if len(slot.batches) < self._places
            and (not slot.batches or self.sum_costs(slot) + cost <= self._most_cost)
        ]

    def sum_costs(self, slot: WorkerSlot) -> float:
        """Return the cost of a worker's streams together."""
        return sum([batch.requests[0].cost for batch in slot.batches])

    def is_full(self, slot: WorkerSlot) -> bool:
        """Return whether the streams of a worker cost the most; the youngest may wait there."""
        return self.sum_costs(slot) >= self._most_cost

    def find_for_retry(self, cost: float) -> WorkerSlot | None:
        """Return the worker for a batch that is tried again, or None: an idle one.

        A stream runs beside others. Of the streams with which a worker has died, one at a time is
        on trial, until its first chunk: if its worker dies, too, the others are not suspected.
        """
        if not self._is_stepped:
            return self.least_loaded(1)
        slot = self.least_loaded(inf, self.list_places(cost))
        if slot is None or any(batch.is_on_trial for batch in slot.batches):
            return None
        return slot

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
        is_first = batch is slot.batches[0]
        if is_first:
            self.next_expiry = min(self.next_expiry, slot.started_at + self._timeout)
        if not is_first or self._is_stepped:
            self.deserted.append(batch)

    def take_deserted(self) -> list[Skip]:
        """Return actions for the batches behind others that have become without callers."""
        deserted, self.deserted = self.deserted, []
        return [Skip(batch) for batch in deserted if batch.id in self.batches]

    def begin_step(self, now: float, worker: int) -> None:
        """Record that a worker has sent chunks: `infer_timeout` is that of one step."""
        slot = self.slots.get(worker)
        if slot is not None and slot.started_at != inf:
            slot.started_at, slot.is_stalled = now, False

    def resume(self, now: float, batch: Batch) -> None:
        """Record that a stream takes part in the steps again; a worker that rested begins one."""
        slot = self.slots[batch.worker]
        if len(slot.batches) == slot.paused:
            self._begin_first(now, slot)
        batch.is_paused = False
        slot.paused -= 1

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
        """Describe why a stream is late that the costs of others hold back; None for others."""
        cost = self.sum_costs(slot) if self._most_cost < inf else 0.0
        if cost <= self._most_cost or batch.is_paused or len(slot.batches) == 1:
            return None
        (request,) = batch.requests
        if slot.started_at <= request.deadline - (request.timeout or self._timeout):
            return None  # no step has passed it over: the model is slow
        return Rejection(
            DeadlineExceededError,
            f"no chunk came in time, because the stream waited for others to end: the streams of "
            f"its worker cost {cost:g}, and max_batch_cost={self._most_cost:g}; raise it, or lower "
            "max_batch_size",
        )

    def _expire_running(self, now: float, slot: WorkerSlot, actions: list[Action]) -> None:
        """Replace a worker whose first batch has run for `infer_timeout`.

        With it expire all streams that cannot begin again on another worker: they share the step.
        """
        if len(slot.batches) > slot.paused and slot.started_at + self._infer_timeout <= now:
            late = slot.batches[0].settle_open()
            for batch in slot.batches:
                if batch.requests[0].has_chunks:
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
