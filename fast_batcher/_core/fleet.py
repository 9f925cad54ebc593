"""Fleet: the workers that a batcher has, and the workers that it should have. Pure.

    wishes    `count`, `Replica.is_due` and `reload`; they may change at any time
    events    `ready`, `failed` and `lost` record what has happened to a worker
    actions   `reconcile` compares both, and returns the next steps

A wish needs no procedure of its own: after every event `reconcile` looks at the whole table again.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import inf
from typing import Any, NamedTuple

from fast_batcher._core.supervision import (
    MAX_BACKOFF,
    NextTry,
    Restarts,
    choose_added,
    choose_surplus,
)


@dataclass(slots=True, eq=False)
class Replica:
    """The place of one worker, over the processes that follow each other.

    A worker is any object with `model_spec`, `is_serving` (it has been ready, and lives),
    `is_ready` (it is serving, and is not being ended), `shared_device` (workers that share one lose
    it together; None if it shares none) and `has_lost_device` (by the fault of another worker).
    """

    index: int
    # The model of the next process, and that of the last process that was ready.
    model: Any
    restarts: Restarts
    loaded: Any = None
    # None while the replica waits for a restart.
    worker: Any = None
    # A process that loads its model while the worker that it will replace still serves.
    successor: Any = None
    # Earliest moment of the next start.
    start_at: float = -inf
    # Whether the worker is to be replaced by a fresh one.
    is_due: bool = False
    # Whether its worker is to end first when there are too many.
    is_surplus: bool = False
    # Whether the restart budget is spent, and no worker has been ready since.
    is_given_up: bool = False

    @property
    def is_ready(self) -> bool:
        """Whether its worker is ready."""
        return self.worker is not None and bool(self.worker.is_ready)


@dataclass(slots=True, eq=False)
class Reload:
    """A reload of every replica in turn.

    If one replacement fails, the replicas that were replaced before go back in the same way. If one
    of these fails, its worker ends, which has the rejected model; it is restarted like any other.
    """

    before: Any
    after: Any
    # The error of the replacement that has failed.
    error: BaseException | None = None
    is_over: bool = False

    @property
    def target(self) -> Any:
        """The model that the replicas are to have."""
        return self.after if self.error is None else self.before

    def find_next(self, replicas: Iterable[Replica]) -> Replica | None:
        """Return the first replica that does not have its model yet, None if all have it."""
        goes_back = self.error is not None
        left = (each for each in replicas if (each.loaded is self.after) == goes_back)
        return next(left, None)


class StartWorker(NamedTuple):
    """The action to start the worker of a replica, or the successor of its worker."""

    replica: Replica


class EndWorker(NamedTuple):
    """The action to end a worker that has lost its place; if it serves, after its batches."""

    worker: Any
    # Whether a successor has its place; otherwise there are to be fewer workers.
    has_successor: bool


class Fleet:
    """The replicas of a batcher.

    Further workers load the model together. Of too many workers, the ones not ready or marked
    as surplus end first, then those with the highest indexes; the last ready worker stays. Ready
    workers are replaced one at a time, because the machine may have no room for two more copies of
    the model.
    """

    def __init__(self, count: int, model: Any, make_restarts: Callable[[], Restarts]) -> None:
        # Replicas that there should be, except during a reload.
        self.count = count
        self._make_restarts = make_restarts
        # The replicas, by index.
        self.replicas = {index: Replica(index, model, make_restarts()) for index in range(count)}
        # Serving workers that have lost their places; and workers that are still to be ended.
        self._retired: set[Any] = set()
        self._rejected: list[Any] = []
        self.reload: Reload | None = None

    # The table.

    def find(self, worker: Any) -> Replica | None:
        """Return the replica of a worker, None if it has lost its place."""
        for replica in self.replicas.values():
            if worker is replica.worker or worker is replica.successor:
                return replica
        return None

    def find_sharers(self, worker: Any) -> list[Any]:
        """Return the workers that die with a worker whose device is lost."""
        workers = [each for one in self.replicas.values() for each in (one.worker, one.successor)]
        workers = [each for each in (*workers, *self._retired) if each not in (None, worker)]
        device = worker.shared_device
        return [each for each in workers if device is not None and each.shared_device == device]

    @property
    def is_loading(self) -> bool:
        """Whether a worker loads its model, or will be started soon, in a place without another."""
        return len(self.replicas) < self.count or any(
            not replica.is_given_up and (replica.worker is None or not replica.worker.is_serving)
            for replica in self.replicas.values()
        )

    def count_unready(self) -> int:
        """Return how many replicas have no ready worker."""
        return sum(not replica.is_ready for replica in self.replicas.values())

    @property
    def is_failing(self) -> bool:
        """Whether a worker has spent its restarts."""
        return any(replica.is_given_up for replica in self.replicas.values())

    @property
    def is_given_up(self) -> bool:
        """Whether all workers have spent their restarts."""
        return all(replica.is_given_up for replica in self.replicas.values())

    @property
    def all_were_ready(self) -> bool:
        """Whether as many workers as there should be have been ready, each at least once."""
        ready = sum(replica.loaded is not None for replica in self.replicas.values())
        return ready >= self.count

    # Wishes.

    def begin_reload(self, model: Any) -> Reload:
        """Wish for another model in every replica."""
        self.reload = Reload(next(iter(self.replicas.values())).model, model)
        return self.reload

    # Events.

    def ready(self, now: float, worker: Any) -> bool:
        """Record a ready worker; return whether it follows one that was lost or recycled."""
        replica = self.find(worker)
        assert replica is not None, "a worker without a place is killed before it is ready"
        is_restart = replica.loaded is not None and not self._is_awaited(replica, worker)
        replica.loaded = worker.model_spec
        replica.restarts.ready(now)
        replica.is_given_up = False
        return is_restart

    def failed(self, now: float, worker: Any, error: BaseException) -> NextTry | None:
        """Record a worker that could not start; return the next try if its place is empty."""
        replica = self.find(worker)
        assert replica is not None, "the caller has looked"
        if self.reload is not None and self._is_awaited(replica, worker):
            if self.reload.error is None:
                self.reload.error = error
                for other in self.replicas.values():
                    other.model = self.reload.before
            else:
                replica.loaded = self.reload.before
                if worker is replica.successor:
                    self._rejected.append(replica.worker)
                    replica.worker, replica.successor = worker, None
        if worker is replica.successor:
            replica.successor, replica.start_at = None, now + MAX_BACKOFF
            return None
        return self.lost(now, worker)

    def lost(self, now: float, worker: Any) -> NextTry | None:
        """Record the death of a worker; return the next try if its place is empty now.

        A worker that has lost its device spends no restart, and another is started at once.
        """
        self._retired.discard(worker)
        replica = self.find(worker)
        if replica is None:
            return None
        replica.worker, replica.successor, replica.is_due = replica.successor, None, False
        counts = not worker.has_lost_device
        next_try = replica.restarts.lost(now) if counts else NextTry(0.0, is_given_up=False)
        if replica.worker is not None:
            return None
        replica.start_at = now + next_try.delay
        replica.is_given_up |= next_try.is_given_up
        return next_try

    def _is_awaited(self, replica: Replica, worker: Any) -> bool:
        """Return whether a worker is the replacement that the reload waits for."""
        reload = self.reload
        if reload is None or worker.has_lost_device or worker.model_spec is not reload.target:
            return False
        return replica is reload.find_next(self.replicas.values())

    # Actions.

    def reconcile(self, now: float) -> list[StartWorker | EndWorker]:
        """Return the next steps from the present workers to the wished ones.

        A ready successor takes the place of its worker here; the caller puts each worker that it
        starts into the replica of the action.
        """
        actions: list[StartWorker | EndWorker] = []
        while self._rejected:
            actions.append(self._end(self._rejected.pop(), has_successor=False))
        for replica in self.replicas.values():
            if replica.successor is not None and replica.successor.is_serving:
                actions.append(self._end(replica.worker, has_successor=True))
                replica.worker, replica.successor, replica.is_due = replica.successor, None, False
        if self.reload is None:
            actions += self._resize()
        else:
            self._advance(now, self.reload)
        for replica in self.replicas.values():
            if replica.worker is None and replica.start_at <= now:
                actions.append(StartWorker(replica))
        replaced = self._choose_replaced(now)
        if replaced is not None:
            actions.append(StartWorker(replaced))
        return actions

    def wake_at(self, now: float) -> float:
        """Return the next moment for `reconcile`, unless an event comes first."""
        waiting = (r.start_at for r in self.replicas.values() if r.worker is None or r.is_due)
        return min((moment for moment in waiting if moment > now), default=inf)

    def _end(self, worker: Any, *, has_successor: bool) -> EndWorker:
        if worker.is_serving:
            self._retired.add(worker)
        return EndWorker(worker, has_successor)

    def _resize(self) -> list[StartWorker | EndWorker]:
        """Add or remove replicas until there are `count`; return the ends of removed workers."""
        ended: list[StartWorker | EndWorker] = []
        model = next(iter(self.replicas.values())).model
        ready = {
            index: replica.is_ready and not replica.is_surplus
            for index, replica in self.replicas.items()
        }
        # Without a ready worker the next one that becomes ready checks again, and stays.
        if any(ready.values()):
            for index in choose_surplus(ready, self.count):
                removed = self.replicas.pop(index)
                workers = [removed.worker, removed.successor]
                ended += [self._end(each, has_successor=False) for each in workers if each]
        for index in choose_added(self.replicas, self.count):
            self.replicas[index] = Replica(index, model, self._make_restarts())
        return ended

    def _advance(self, now: float, reload: Reload) -> None:
        """Give the next replica its model; it is started at once if its restarts are spent."""
        replica = reload.find_next(self.replicas.values())
        if replica is None:
            reload.is_over = True
            return
        replica.model = reload.target
        if replica.worker is None and replica.is_given_up:
            replica.restarts, replica.is_given_up = self._make_restarts(), False
            replica.start_at = now

    def _choose_replaced(self, now: float) -> Replica | None:
        """Choose a replica whose worker gets a successor."""
        if any(replica.successor is not None for replica in self.replicas.values()):
            return None
        if self.reload is not None:
            # A worker that loads, or will be restarted, comes first.
            replica = self.reload.find_next(self.replicas.values())
            return replica if replica is not None and replica.is_ready else None
        due = (r for r in self.replicas.values() if r.is_due and r.is_ready and r.start_at <= now)
        return None if self._retired else next(due, None)
