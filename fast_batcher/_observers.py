"""Observers of one batcher: calls them, and enters their contexts around batches. Every process.

`Observers` runs in the API process or the host; `BatchContexts` on the main thread of a worker, and
on the threads and in the tasks that compute the batches of decorated functions.
"""

import gc
import logging
import pickle
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import Context, copy_context
from time import perf_counter
from typing import Any, TypeVar

from fast_batcher._core.values import Batch, Request
from fast_batcher._process import monotonic
from fast_batcher.observing import (
    AnsweredRequest,
    BatchAnswered,
    BatchDispatched,
    BatchLost,
    CacheUsed,
    CollectionPaused,
    Observer,
    Outcome,
    ReporterChanged,
    RequestEnded,
    WorkerChanged,
)

logger = logging.getLogger("fast_batcher")


# The context manager of a batch for which no observer has given one.
NO_CONTEXTS = nullcontext()


class BatchContexts:
    """Makes the context manager of each batch of one worker from those of the observers.

    A context manager that raises harms no batch; the first error is logged.
    """

    def __init__(self) -> None:
        self._has_logged = False

    def join(self, contexts: Sequence[AbstractContextManager[Any]]) -> AbstractContextManager[None]:
        """Return the context manager of one batch, which enters and exits these."""
        return _Joined(contexts, self._log) if contexts else NO_CONTEXTS

    def join_pickled(self, pickled: Sequence[bytes]) -> AbstractContextManager[None]:
        """Return the context manager of one batch, which enters and exits these, each pickled."""
        contexts: list[AbstractContextManager[Any]] = []
        for data in pickled:
            try:
                contexts.append(pickle.loads(data))
            except Exception as error:  # noqa: BLE001  the observer's code
                self._log(error)
        return self.join(contexts)

    def _log(self, error: Exception) -> None:
        if not self._has_logged:
            self._has_logged = True
            logger.error(
                "the context of an observer has raised; later errors are not logged", exc_info=error
            )


class _Joined(AbstractContextManager[None]):
    """Enters the context managers of one batch, and exits them in the reverse order."""

    def __init__(
        self, contexts: Sequence[AbstractContextManager[Any]], log: Callable[[Exception], None]
    ) -> None:
        self._contexts = contexts
        self._log = log
        self._entered: list[AbstractContextManager[Any]] = []

    def __enter__(self) -> None:
        for context in self._contexts:
            try:
                context.__enter__()
            except Exception as error:  # noqa: BLE001  the observer's code
                self._log(error)
            else:
                self._entered.append(context)

    def __exit__(self, *_: object) -> None:
        while self._entered:
            try:
                self._entered.pop().__exit__(None, None, None)
            except Exception as error:  # noqa: BLE001  the observer's code
                self._log(error)


# The contexts of callers in other processes.
_contexts = BatchContexts()


class PickledContexts(nullcontext[None]):
    """Context managers that were pickled one by one; it is unpickled as one that enters them."""

    def __init__(self, managers: list[bytes]) -> None:
        super().__init__()
        self._managers = managers

    def __reduce__(self) -> tuple[Any, ...]:
        return join_carried, (self._managers,)


def join_carried(managers: list[bytes]) -> AbstractContextManager[None]:
    """Return a context manager that enters the context managers of a `Carried`."""
    return _contexts.join_pickled(managers)


def restore_context(managers: list[bytes]) -> Context:
    """Make a context in this process from the context managers of a `Carried`."""
    context = Context()
    context.run(join_carried(managers).__enter__)
    return context


Event = (
    BatchAnswered
    | BatchLost
    | RequestEnded
    | WorkerChanged
    | CacheUsed
    | ReporterChanged
    | CollectionPaused
)
# The method of an observer for each event.
_METHODS: dict[type[Event], str] = {
    BatchAnswered: "batch_answered",
    BatchLost: "batch_lost",
    RequestEnded: "request_ended",
    WorkerChanged: "worker_changed",
    CacheUsed: "cache_used",
    ReporterChanged: "reporter_changed",
    CollectionPaused: "collection_paused",
}
# Pickled context managers that make a caller's context current, and whether its batch is followed.
Carried = tuple[list[bytes], bool]
# Pauses that are kept until the next event; a process has some in a second.
MAX_PAUSES = 1000

_GivenT = TypeVar("_GivenT")


def describe_answer(
    model: str,
    batch: Batch,
    ended: Sequence[tuple[Request, Outcome]],
) -> BatchAnswered:
    """Describe the answer to a batch that has just ended these requests."""
    now, began_at = monotonic(), batch.began_at
    return BatchAnswered(
        model=model,
        worker=batch.worker_index,
        batch_id=batch.id,
        size=len(batch.requests),
        cost=sum([request.cost for request in batch.requests]),
        release=str(batch.release),
        dispatched_at=batch.sent_at,
        began_at=began_at,
        answered_at=now,
        infer_seconds=batch.infer_seconds,
        requests=[
            AnsweredRequest(
                outcome, began_at - request.arrival, now - request.arrival, request.context
            )
            for request, outcome in ended
        ],
        retried=sum([not request.is_settled for request in batch.requests]),
        dispatched=batch.dispatched,
        chunks=batch.chunk_times,
    )


class Observers:
    """The observers of one batcher, in the order in which they are called."""

    def __init__(self, name: str, observers: Iterable[Observer] = ()) -> None:
        self._name = name
        self.active: list[Observer] = []
        # Observers that need the contexts of callers, and follow batches from their dispatch.
        self.followers: list[Observer] = []
        # Observers that have raised; the log has the first error of each.
        self._faulty: set[int] = set()
        # Pauses of the garbage collector since the last event. A collection may begin while an
        # observer holds a lock of its own, so observers are not called from there.
        self._pauses: deque[CollectionPaused] = deque(maxlen=MAX_PAUSES)
        self._pause_began = 0.0
        self._watches = False
        for observer in observers:
            self.add(observer)

    def add(self, observer: Observer) -> None:
        """Call an observer from now on."""
        self.active.append(observer)
        if observer.needs_context:
            self.followers.append(observer)

    def copy_context(self) -> Context | None:
        """Copy the context of a caller if an observer needs it."""
        return copy_context() if self.followers else None

    def carry(self, requests: Sequence[Request]) -> dict[int, Carried]:
        """Pack the contexts of callers for other processes, by position."""
        return Context().run(self._carry, requests)

    def _carry(self, requests: Sequence[Request]) -> dict[int, Carried]:
        found = {}
        for position, request in enumerate(requests):
            managers: list[bytes] = []
            is_followed = False
            for observer in self.followers if request.context is not None else ():
                try:
                    carried = observer.carry_context(request.context)
                    if carried is not None:
                        managers.append(pickle.dumps(carried.manager, pickle.HIGHEST_PROTOCOL))
                        is_followed |= carried.is_followed
                except Exception as error:  # noqa: BLE001  it must harm no request
                    self._log(observer, error)
            if managers:
                found[position] = managers, is_followed
        return found

    def follow(
        self,
        dispatched: Batch | BatchDispatched,
        convert: Callable[[AbstractContextManager[Any]], _GivenT],
    ) -> list[_GivenT]:
        """Tell the observers that follow batches of a dispatch; return the contexts they give."""
        if not self.followers:
            return []
        event = self._describe(dispatched) if isinstance(dispatched, Batch) else dispatched
        return Context().run(self._follow, event, convert)

    def _describe(self, batch: Batch) -> BatchDispatched:
        event = batch.dispatched = BatchDispatched(
            model=self._name,
            worker=batch.worker_index,
            batch_id=batch.id,
            size=len(batch.requests),
            cost=sum([request.cost for request in batch.requests]),
            release=str(batch.release),
            dispatched_at=batch.sent_at,
            contexts=[request.context for request in batch.requests],
            is_stream=batch.chunk_times is not None,
        )
        return event

    def _follow(
        self,
        event: BatchDispatched,
        convert: Callable[[AbstractContextManager[Any]], _GivenT],
    ) -> list[_GivenT]:
        given: list[_GivenT] = []
        for observer in self.followers:
            try:
                context = observer.batch_dispatched(event)
                if context is not None:
                    given.append(convert(context))
            except Exception as error:  # noqa: BLE001  it must harm no request
                self._log(observer, error)
        return given

    def lose(self, batches: Iterable[Batch], reason: str) -> None:
        """Tell the observers of batches that end without an answer, if they follow them."""
        for batch in batches:
            if batch.dispatched is not None:
                self.tell(BatchLost(batch.dispatched, reason, batch.chunk_times))

    def watch_collector(self) -> None:
        """Note the pauses of the garbage collector from now on."""
        if not self._watches:
            self._watches = True
            gc.callbacks.append(self._note_pause)

    def unwatch_collector(self) -> None:
        """Note no more pauses."""
        if self._watches:
            self._watches = False
            gc.callbacks.remove(self._note_pause)

    def _note_pause(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._pause_began = perf_counter()
        elif self.active:
            seconds = perf_counter() - self._pause_began
            self._pauses.append(CollectionPaused(info["generation"], seconds))

    def tell(self, event: Event, follow: bool | None = None) -> None:
        """Call every observer, only the followers of batches, or only the others.

        They are called in an empty context; the first error of each is logged.
        """
        observers = self.active
        if follow is not None:
            observers = [found for found in observers if (found in self.followers) is follow]
        Context().run(self._tell, event, observers)

    def _tell(self, event: Event, observers: Sequence[Observer]) -> None:
        while self._pauses:
            self._call(self._pauses.popleft(), self.active)
        self._call(event, observers)

    def _call(self, event: Event, observers: Sequence[Observer]) -> None:
        for observer in observers:
            try:
                getattr(observer, _METHODS[type(event)])(event)
            except Exception as error:  # noqa: BLE001  it must harm no request
                self._log(observer, error)

    def _log(self, observer: Observer, error: Exception) -> None:
        if id(observer) not in self._faulty:
            self._faulty.add(id(observer))
            logger.error(
                "%s: an observer has raised; its later errors are not logged: %r",
                self._name,
                observer,
                exc_info=error,
            )
