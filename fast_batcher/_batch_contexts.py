"""Context managers of observers around the computation of a batch.

Used on the main thread of a worker process, and on the threads and in the tasks that compute the
batches of decorated functions.
"""

import logging
import pickle
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

logger = logging.getLogger("fast_batcher")


# Of a batch for which no observer has given a context manager.
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

    def join_pickled(self, pickled: list[bytes]) -> AbstractContextManager[None]:
        """Return the context manager of one batch, which enters and exits these, each pickled."""
        contexts: list[AbstractContextManager[Any]] = []
        for one in pickled:
            try:
                contexts.append(pickle.loads(one))
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
    """Enters the context managers of one batch, and exits them in the reverse order.

    Args:
        contexts: The context managers.
        log: Called with each error that they raise.
    """

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
