"""Functions to decorate in tests: one whose batches wait until they are let on."""

import os
import threading
from collections.abc import Callable
from queue import SimpleQueue
from time import monotonic
from typing import Any

from waits import LIMIT


class Held:
    """Doubles each item, once its batch has been let on."""

    def __init__(self) -> None:
        # The batches that have begun, in their order.
        self.begun: SimpleQueue[list[Any]] = SimpleQueue()
        self._gate = threading.Semaphore(0)

    def __call__(self, items: list[Any]) -> list[Any]:
        self.begun.put(list(items))
        assert self._gate.acquire(timeout=LIMIT), "nobody has let it on"
        return [2 * item for item in items]

    def next_batch(self) -> list[Any]:
        """Wait for the next batch to begin."""
        return self.begun.get(timeout=LIMIT)

    def let_on(self, batches: int = 1) -> None:
        """Let so many batches end."""
        self._gate.release(batches)


def spin_until(is_so: Callable[[], bool]) -> None:
    """Give way to other threads until this is true of a batcher, which does not tell when."""
    deadline = monotonic() + LIMIT
    while not is_so():
        assert monotonic() < deadline, "it has not come about"
        os.sched_yield()


class InThread:
    """A call in a thread of its own."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self._outcome: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()

        def run() -> None:
            try:
                self._outcome.put((function(*args), None))
            except BaseException as error:  # noqa: BLE001  it is told by `result`
                self._outcome.put((None, error))

        self._thread = threading.Thread(target=run)
        self._thread.start()

    def result(self) -> Any:
        """Wait for what it returned or raised."""
        value, error = self._outcome.get(timeout=LIMIT)
        self._thread.join()
        if error is not None:
            raise error
        return value
