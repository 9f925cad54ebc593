"""When a worker that is well is replaced by a fresh one. Pure.

Models leak; a fresh process has all its memory again.
"""

from typing import Final

# A worker that is too large from its first batch on is as large as the model needs: another would
# be no smaller.
BATCHES_OF_A_FRESH_WORKER: Final = 1


class Recycling:
    """The limits of a worker.

    Args:
        max_batches: Batches after which it is due, or None.
        max_rss_bytes: Resident memory from which on it is due, or None.
    """

    def __init__(self, max_batches: int | None, max_rss_bytes: int | None) -> None:
        self._max_batches = max_batches
        self._max_rss_bytes = max_rss_bytes
        # Whether any worker is ever due.
        self.is_wanted = max_batches is not None or max_rss_bytes is not None
        # The memory of a fresh worker was beyond the limit, so that it says nothing about leaks.
        self.is_limit_too_low = False

    def is_due(self, batches: int, rss_bytes: int) -> bool:
        """Whether a worker is to be replaced.

        Args:
            batches: How many it has answered, 1 or more.
            rss_bytes: Its resident memory; 0 if it cannot be read.
        """
        if self._max_batches is not None and batches >= self._max_batches:
            return True
        if self._max_rss_bytes is None or rss_bytes < self._max_rss_bytes:
            return False
        self.is_limit_too_low |= batches <= BATCHES_OF_A_FRESH_WORKER
        return not self.is_limit_too_low
