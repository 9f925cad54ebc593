"""Context managers of observers around the computation of a batch.

Used on the main thread of a worker process, and on the threads and in the tasks that compute the
batches of decorated functions.
"""

import logging
import pickle
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Self

logger = logging.getLogger("fast_batcher")


class BatchContexts:
    """Enters and exits the context managers of each batch of one worker, one batch at a time.

    A context manager that raises harms no batch; the first error is logged.
    """

    def __init__(self) -> None:
        self._given: Sequence[AbstractContextManager[Any]] = ()
        self._entered: list[AbstractContextManager[Any]] = []
        self._has_logged = False

    def give(self, contexts: Sequence[AbstractContextManager[Any]]) -> Self:
        """Set the context managers of the next batch; enter the result."""
        self._given = contexts
        return self

    def give_pickled(self, pickled: list[bytes]) -> Self:
        """Set the context managers of the next batch, each pickled; enter the result."""
        contexts: list[AbstractContextManager[Any]] = []
        for one in pickled:
            try:
                contexts.append(pickle.loads(one))
            except Exception as error:  # noqa: BLE001  the observer's code
                self._log(error)
        return self.give(contexts)

    def __enter__(self) -> None:
        given, self._given = self._given, ()
        for context in given:
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

    def _log(self, error: Exception) -> None:
        if not self._has_logged:
            self._has_logged = True
            logger.error(
                "the context of an observer has raised; later errors are not logged", exc_info=error
            )
