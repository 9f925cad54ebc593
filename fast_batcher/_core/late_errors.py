"""Late errors: errors of batches that no caller gets, because the callers have left. Pure."""

from math import inf
from typing import Final

# Seconds between two log records of one batcher: a model that always fails late must not fill the
# log, and an operator reads one record a minute.
LOG_INTERVAL: Final = 60.0


class LateErrors:
    """Count of late errors, and the decision which of them are logged."""

    def __init__(self) -> None:
        self.count = 0
        # The next error from this moment on is logged.
        self._log_at = -inf
        # Errors since the last logged one.
        self._omitted = 0

    def add(self, now: float) -> tuple[bool, int]:
        """Count an error."""
        self.count += 1
        omitted = self._omitted
        if now < self._log_at:
            self._omitted += 1
            return False, omitted
        self._log_at, self._omitted = now + LOG_INTERVAL, 0
        return True, omitted
