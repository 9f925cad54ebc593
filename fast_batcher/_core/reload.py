"""Order of a reload: every worker is replaced by one with another model, one after the other.

Pure. If one replacement fails, the workers that were replaced before go back to the model of
before, in the same way.
"""

from collections import deque


class Reload:
    """A reload of `num_workers` workers, or its way back.

    Args:
        num_workers: Number of workers.
    """

    def __init__(self, num_workers: int) -> None:
        # Indexes of workers that have the wrong model; the first one is being replaced.
        self._wrong = deque(range(num_workers))
        self._right: list[int] = []
        # Whether the model of before is the right one, because a replacement has failed.
        self.goes_back = False

    @property
    def current(self) -> int | None:
        """Index of the worker that is being replaced; None when all have the right model."""
        return self._wrong[0] if self._wrong else None

    def replaced(self) -> None:
        """Note that the present replacement is ready."""
        self._right.append(self._wrong.popleft())

    def failed(self) -> None:
        """Note that the present replacement could not load; on the way back it is given up."""
        if self.goes_back:
            self._wrong.popleft()
        else:
            self.goes_back = True
            self._wrong, self._right = deque(self._right), []
