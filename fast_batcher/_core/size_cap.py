"""How many requests a batch may have after the model has run out of memory. Pure.

Additive increase after a multiplicative decrease, like congestion control and for its reason: the
limit is unknown, it moves, and only failures show it.
"""

from typing import Final

# Full batches that must go well before a larger one is tried. A try that fails costs its requests
# one more batch, so it should be rare among batches that go well.
FIRST_WAIT: Final = 32
# It doubles with each failure, up to where a try costs less than a thousandth of the work.
MAX_WAIT: Final = 4096
# What is added is an eighth of the size, at least one: from half the size back to all of it takes
# six steps.
STEP_SHARE: Final = 8


class SizeCap:
    """The largest batch that is made.

    Args:
        most: `max_batch_size`.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self.size = most
        # Whether batches that go well matter: from the first failure until full batches of the
        # largest size have gone well for a while.
        self.is_watching = False
        # The largest batch that went well since.
        self._good = 0
        self._wait = FIRST_WAIT
        self._seen = 0
        # How it was before the batch that is being divided.
        self._before = (most, False, 0, FIRST_WAIT)

    def limit(self, most: int) -> None:
        """Set another `max_batch_size`; what has been learned about memory stays."""
        self._most = most
        if not self.is_watching:
            self.size = most
        self.size = min(self.size, most)
        self._good = min(self._good, most)
        self._before = (self.size, self.is_watching, self._good, self._wait)

    def ran_out(self, size: int, *, is_retry: bool = False) -> None:
        """Halve after a batch of this size has run out of memory, or go back to what went well.

        A request that runs out of memory alone is too large by itself, and says nothing about
        batches of other requests.

        Args:
            size: Of the batch.
            is_retry: Whether it is a part of one that has failed.
        """
        if not is_retry:
            self._before = (self.size, self.is_watching, self._good, self._wait)
        if size == 1:
            self.size, self.is_watching, self._good, self._wait = self._before
            return
        known = self._good if self._good < size else 0
        self.size = max(1, min(self.size, max(known, size // 2)))
        self._good = min(self._good, self.size)
        if self.is_watching:
            self._wait = min(2 * self._wait, MAX_WAIT)
        self._seen = 0
        self.is_watching = True

    def went_well(self, size: int) -> None:
        """Try larger batches again once enough of the present size were computed."""
        if not self.is_watching:
            return
        self._good = max(self._good, size)
        if size < self.size:  # says nothing about a larger one
            return
        self._seen += 1
        if self._seen < self._wait:
            return
        self._seen = 0
        if self.size == self._most:
            self.is_watching = False
            self._wait, self._good = FIRST_WAIT, 0
        self.size = min(self._most, self.size + max(1, self.size // STEP_SHARE))
