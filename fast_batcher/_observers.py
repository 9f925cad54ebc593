"""Calls the observers of one batcher or function, on the thread that ends the requests."""

import gc
import logging
from collections import deque
from collections.abc import Iterable, Sequence
from contextvars import Context, copy_context
from time import perf_counter

from fast_batcher._clock import monotonic
from fast_batcher._core.messages import Batch, Request
from fast_batcher.observing import (
    AnsweredRequest,
    BatchAnswered,
    CollectionPaused,
    Observer,
    Outcome,
    RequestEnded,
    WorkerChanged,
)

logger = logging.getLogger("fast_batcher")

Event = BatchAnswered | RequestEnded | WorkerChanged | CollectionPaused
# Pauses that are kept until the next event; a process has some in a second.
MAX_PAUSES = 1000


def describe_answer(
    model: str,
    batch: Batch,
    ended: Sequence[tuple[Request, Outcome]],
    worker: int = 0,
) -> BatchAnswered:
    """Describe the answer to a batch that has just ended these requests."""
    now, began_at = monotonic(), batch.began_at
    return BatchAnswered(
        model=model,
        worker=worker,
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
    )


class Observers:
    """The observers of one batcher, in the order in which they are called.

    Args:
        name: The batcher's name, for logs.
        observers: The first ones.
    """

    def __init__(self, name: str, observers: Iterable[Observer] = ()) -> None:
        self._name = name
        self.active = list(observers)
        # Observers that have raised; the log has the first error of each.
        self._faulty: set[int] = set()
        # Pauses of the garbage collector since the last event. A collection may begin while an
        # observer holds a lock of its own, so observers are not called from there.
        self._pauses: deque[CollectionPaused] = deque(maxlen=MAX_PAUSES)
        self._pause_began = 0.0
        self._watches = False

    def add(self, observer: Observer) -> None:
        """Call an observer from now on."""
        self.active.append(observer)

    def copy_context(self) -> Context | None:
        """Copy the context of a caller if an observer needs it."""
        return copy_context() if any(one.needs_context for one in self.active) else None

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

    def tell(self, event: Event) -> None:
        """Call every observer, in an empty context; log the first error of each."""
        Context().run(self._tell, event)

    def _tell(self, event: Event) -> None:
        while self._pauses:
            self._call(self._pauses.popleft())
        self._call(event)

    def _call(self, event: Event) -> None:
        for observer in self.active:
            try:
                if isinstance(event, BatchAnswered):
                    observer.batch_answered(event)
                elif isinstance(event, RequestEnded):
                    observer.request_ended(event)
                elif isinstance(event, WorkerChanged):
                    observer.worker_changed(event)
                else:
                    observer.collection_paused(event)
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
