"""Recycling: replacement of healthy workers after a number of batches, or above a memory limit.

Pure. Models leak memory; a fresh process starts without the leak.
"""

from typing import Final

# A worker above the limit after its first batch is as large as the model needs: a replacement
# would be no smaller.
BATCHES_OF_A_FRESH_WORKER: Final = 1


class Recycling:
    """Limits after which a worker is replaced.

    Args:
        max_batches: Batches after which a worker is due, or None.
        max_rss_bytes: Resident memory from which on a worker is due, or None.
    """

    def __init__(self, max_batches: int | None, max_rss_bytes: int | None) -> None:
        self._max_batches = max_batches
        self._max_rss_bytes = max_rss_bytes
        # Whether any worker is ever due.
        self.is_wanted = max_batches is not None or max_rss_bytes is not None
        # A fresh worker was above the memory limit, which therefore cannot detect a leak.
        self.is_limit_too_low = False

    def is_due(self, batches: int, rss_bytes: int) -> bool:
        """Return whether a worker is to be replaced.

        Args:
            batches: Number of batches it has answered, 1 or more.
            rss_bytes: Its resident memory; 0 if it cannot be read.
        """
        if self._max_batches is not None and batches >= self._max_batches:
            return True
        if self._max_rss_bytes is None or rss_bytes < self._max_rss_bytes:
            return False
        self.is_limit_too_low |= batches <= BATCHES_OF_A_FRESH_WORKER
        return not self.is_limit_too_low
