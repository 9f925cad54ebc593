"""Limit of the batch size after the model has run out of memory. Pure.

Additive increase after multiplicative decrease, as in congestion control, and for the same reason:
the true limit is unknown, it changes, and only failures show it.
"""

from typing import Final

# Full batches that must succeed before a larger one is tried. A failed try costs its requests one
# more batch, so failures should be rare.
FIRST_WAIT: Final = 32
# The wait doubles with each failure, up to a try in 4096 batches: less than 0.1 % of the work.
MAX_WAIT: Final = 4096
# Each step adds an eighth of the size, at least one: the way back from half to full size takes six
# steps.
STEP_SHARE: Final = 8


class SizeCap:
    """Largest size of a batch for now: `max_batch_size`, or less after the model ran out of memory.

    Args:
        most: `max_batch_size`.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self.size = most
        # Whether successes are counted: from the first failure until enough full batches of the
        # largest size have succeeded.
        self.is_watching = False
        # The largest batch that succeeded since the first failure.
        self._good = 0
        # Full batches that must succeed before a larger try, and those that have.
        self._wait = FIRST_WAIT
        self._seen = 0
        # Size, `is_watching`, `_good` and `_wait` before the batch that is being divided.
        self._before = (most, False, 0, FIRST_WAIT)

    def limit(self, most: int) -> None:
        """Set another `max_batch_size`; a lower limit found by failures stays."""
        self._most = most
        if not self.is_watching:
            self.size = most
        self.size = min(self.size, most)
        self._good = min(self._good, most)
        self._before = (self.size, self.is_watching, self._good, self._wait)

    def ran_out(self, size: int, *, is_retry: bool = False) -> None:
        """Lower the limit after a batch of this size has run out of memory.

        The new limit is the largest size that has succeeded, or else half of this one. A request
        that runs out of memory alone is too large by itself, and says nothing about other batches:
        the limit returns to its value before that batch was divided.

        Args:
            size: The size of the batch.
            is_retry: Whether it is a part of a divided batch.
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
        """Count a success; raise the limit after enough batches of the present limit's size."""
        if not self.is_watching:
            return
        self._good = max(self._good, size)
        if size < self.size:  # no evidence about larger batches
            return
        self._seen += 1
        if self._seen < self._wait:
            return
        self._seen = 0
        if self.size == self._most:
            self.is_watching = False
            self._wait, self._good = FIRST_WAIT, 0
        self.size = min(self._most, self.size + max(1, self.size // STEP_SHARE))
