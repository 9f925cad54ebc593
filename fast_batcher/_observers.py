"""Calls the observers of one batcher. API process, on the thread that ends the requests."""

import logging
from collections.abc import Iterable
from contextvars import Context, copy_context

from fast_batcher.errors import ConfigurationError
from fast_batcher.observing import (
    BatchAnswered,
    CollectionPaused,
    Observer,
    RequestEnded,
    WorkerChanged,
)

logger = logging.getLogger("fast_batcher")

Event = BatchAnswered | RequestEnded | WorkerChanged | CollectionPaused


class Observers:
    """The observers of one batcher, in the order in which they are called.

    Args:
        name: The batcher's name, for logs.
        observers: The first ones.

    Raises:
        ConfigurationError: One of them is no `Observer`.
    """

    def __init__(self, name: str, observers: Iterable[Observer]) -> None:
        self._name = name
        self._observers: list[Observer] = []
        # Observers that have raised; the log has the first error of each.
        self._faulty: set[int] = set()
        for observer in observers:
            self.add(observer)

    def __bool__(self) -> bool:
        """Whether there is any observer."""
        return bool(self._observers)

    def add(self, observer: Observer) -> None:
        """Call an observer from now on."""
        if not isinstance(observer, Observer):
            raise ConfigurationError(
                f"observers={observer!r:.100}: give instances of fast_batcher.observing.Observer"
            )
        self._observers.append(observer)

    def copy_context(self) -> Context | None:
        """Copy the context of a caller if an observer needs it."""
        return copy_context() if any(one.needs_context for one in self._observers) else None

    def tell(self, event: Event) -> None:
        """Call every observer, in an empty context; log the first error of each."""
        Context().run(self._tell, event)

    def _tell(self, event: Event) -> None:
        for observer in self._observers:
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
